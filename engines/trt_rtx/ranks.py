"""One rank of plans of TensorRT-RTX: by TensorRT's session, which the record tells the package."""

from export_grok.engines.trt.ranks import open_rank

__all__ = ["open_rank"]
