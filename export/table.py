"""A summary as tables for people."""

from rich.console import Console
from rich.table import Table

from export_grok.export.summary import Summary

__all__ = ["print_summary"]


def print_summary(summary: Summary, *, bandwidth: float) -> None:
    """Print the summary to stdout, with speed bounds for `bandwidth` bytes per second a rank."""
    console = Console(width=None if Console().is_terminal else 100)
    facts = Table(title=f"{summary.path}: {summary.kind}", show_header=False, title_justify="left")
    facts.add_column(style="bold")
    facts.add_column()
    config = summary.config
    facts.add_row("layers", str(config.num_layers))
    facts.add_row(
        "shape",
        f"width {config.emb_size:,}, {config.num_q_heads} query and {config.num_kv_heads} "
        f"key/value heads of {config.key_size}, {config.num_experts} experts of "
        f"{config.ffn_size:,} ({config.num_selected_experts} chosen), "
        f"vocabulary {config.vocab_size:,}",
    )
    facts.add_row("parameters", f"{summary.parameters:,} and {summary.scales:,} scales")
    facts.add_row("files", f"{summary.files:,} of weights, {_size(summary.file_bytes)}")
    for dtype, length in sorted(summary.bytes_by_dtype.items()):
        facts.add_row(f"  {dtype}", _size(length))
    head = f"{summary.head}, {_size(summary.head_bytes)}"
    if (error := summary.head_error) is not None:
        head += (
            f", relative error {error.relative:.3%}, "
            f"{error.largest:.3%} in the worst entry of the vocabulary"
        )
    facts.add_row("head", head)
    if summary.dtype:
        facts.add_row("graphs", f"activations and cache in {summary.dtype}")
    if summary.backend:
        facts.add_row("engine", summary.backend)
    for op, counts in summary.lowering.items():
        facts.add_row(f"  {op}", f"{counts['lowered']} lowered, {counts['function']} by function")
    console.print(facts)

    cache = summary.dtype or "bfloat16"
    ranks = Table(
        title=f"One rank at each TP: cache in {cache}, {bandwidth / 1e9:,.0f} GB/s of memory",
        title_justify="left",
    )
    columns = ("TP", "weights", "cache/token", "cache full", "read/token", "tokens/s at most")
    for column in columns:
        ranks.add_column(column, justify="right")
    for rank in summary.ranks:
        ranks.add_row(
            str(rank.tensor_parallel),
            _size(rank.weight_bytes),
            _size(rank.cache_bytes_per_token),
            _size(rank.cache_bytes),
            _size(rank.read_bytes_per_token),
            f"{rank.tokens_per_second(bandwidth):,.1f}",
        )
    console.print(ranks)


def _size(length: float) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if length >= 1000**power:
            return f"{length / 1000**power:,.2f} {unit}"
    return f"{length:,.0f} B"
