"""The sizes of a model for sessions that are made up."""

from export_grok.config import GrokConfig

__all__ = ["SMALL"]

SMALL = GrokConfig(
    num_layers=1,
    emb_size=16,
    num_q_heads=1,
    num_kv_heads=1,
    key_size=2,
    ffn_size=8,
    vocab_size=12,
    attn_output_multiplier=1.0,
    embedding_multiplier_scale=1.0,
    output_multiplier_scale=1.0,
    row_parallel_scale_groups=1,
)
