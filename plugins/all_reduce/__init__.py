"""all_reduce: the sum over the ranks that share a layer."""
