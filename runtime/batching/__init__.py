"""Many requests in one cache: each has a row while it runs, and comes and goes between turns."""
