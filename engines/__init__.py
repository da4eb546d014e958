"""Lowered graphs and engines, one folder per backend."""
