"""Run plans of TensorRT-RTX: by TensorRT's session, which the record tells the package."""

from export_grok.engines.trt.session import open_engine

__all__ = ["open_engine"]
