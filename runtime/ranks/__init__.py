"""Ranks that share a model: a process each, a parent that adds, a watch that names the dead."""
