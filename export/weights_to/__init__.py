"""The weights as files that other programs load: safetensors by a peer's names, and GGUF."""
