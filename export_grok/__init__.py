"""Export Grok-1 to per-layer ONNX graphs and run them on ONNX Runtime or TensorRT."""

__version__ = "0.1.0"
