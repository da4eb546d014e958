"""Polygraphy's side: runners, inputs and the comparison, for its command and its Python API."""
