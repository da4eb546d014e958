"""TensorRT-RTX: the same graphs and session, by the package that builds plans on any CPU."""
