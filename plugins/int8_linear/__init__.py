"""y = x @ W for an int8 matrix with one scale per column and group of rows."""
