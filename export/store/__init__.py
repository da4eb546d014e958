"""A checkpoint as safetensors files of ours, and how one is imported from any other layout."""
