"""Graphs of TensorRT-RTX plans, interpreted: they are those of TensorRT."""

from export_grok.engines.trt.interpreter import open_interpreter

__all__ = ["open_interpreter"]
