"""TensorRT, and TensorRT-RTX beside it: static graphs, plans, and the session that runs them."""
