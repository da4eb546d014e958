"""A benchmark of a bundle: what is measured, how, and what may be doubted."""
