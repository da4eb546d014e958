"""Grouped-query attention with soft-capped logits over a cache that is written in place."""
