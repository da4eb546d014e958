"""Runs a bundle in the Python backend of Triton Inference Server. Not run under Triton yet."""
