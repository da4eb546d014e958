"""Text and token ids: into each other, whole or as a stream, to its end."""
