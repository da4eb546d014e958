"""Drives what `engines` built: prompt in, text out."""
