"""The chosen experts of every token, weighted by their gates."""
