"""Plans of TensorRT-RTX, one graph at a time: by TensorRT's probe, as the record tells which."""

from export_grok.engines.trt.probe import open_probe

__all__ = ["open_probe"]
