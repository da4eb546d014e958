"""From a Triton kernel to PTX that TensorRT's launcher can call, without a GPU. No op: a tool."""
