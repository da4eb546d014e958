"""Released checkpoint -> PyTorch model -> per-layer ONNX graphs."""
