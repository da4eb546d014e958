"""Known mistakes, each in the PyTorch reference and in a built engine: what checks are held to."""
