"""A summary as tables for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from export_grok.export.data_sheets import DATA_SHEETS
from export_grok.export.summary import CHECKPOINT_DTYPE, GpuEstimates, Summary

__all__ = ["print_summary"]

WIDTH = 100


def print_summary(
    summary: Summary, *, bandwidth: float, estimates: Sequence[GpuEstimates] = ()
) -> None:
    """Print the summary to stdout.

    Args:
        summary: of a folder.
        bandwidth: bytes per second that each rank's memory gives, for speed bounds.
        estimates: of GPUs, to print in their place.
    """
    console = Console(width=None if Console().is_terminal else WIDTH)
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
    for found in estimates:
        console.print(_gpu_table(found))
    if not estimates:
        console.print(_rank_table(summary, bandwidth))


def _rank_table(summary: Summary, bandwidth: float) -> Table:
    cache = summary.dtype or CHECKPOINT_DTYPE
    ranks = Table(
        title=f"One rank at each TP: cache in {cache}, {bandwidth / 1e9:,.0f} GB/s of memory",
        title_justify="left",
    )
    for column in (
        "TP",
        "weights",
        "cache\n/token",
        "cache\nfull",
        "read\n/token",
        "all-reduced\n/token",
        "all-reduces\n/token",
        "tokens/s\nat most",
    ):
        ranks.add_column(column, justify="right")
    for rank in summary.ranks:
        ranks.add_row(
            str(rank.tensor_parallel),
            _size(rank.weight_bytes),
            _size(rank.cache_bytes_per_token),
            _size(rank.cache_bytes),
            _size(rank.read_bytes_per_token),
            _size(rank.all_reduce_bytes_per_token),
            str(rank.all_reduces_per_token),
            f"{rank.tokens_per_second(bandwidth):,.1f}",
        )
    return ranks


def _gpu_table(estimates: GpuEstimates) -> Table:
    sheet, work = DATA_SHEETS[estimates.gpu], estimates.workload
    table = Table(
        title=f"{sheet.name}, on paper: batch {work.batch}, {work.context:,} tokens a row; "
        f"{estimates.bandwidth_share:.0%} of {sheet.bandwidth / 1e9:,.0f} GB/s, "
        f"{estimates.latency * 1e6:g} us an all-reduce by {sheet.link.name}",
        title_justify="left",
    )
    for column in (
        "TP",
        "weights,\ncache",
        f"of\n{sheet.memory / 1e9:.0f} GB",
        "read\n/step",
        "sums\n/step",
        "ms to\nread",
        "ms to\nsum",
        "tokens/s\na row",
        "tokens/s\nin all",
    ):
        table.add_column(column, justify="right")
    for size, found in estimates.ranks.items():
        step = found.step
        table.add_row(
            str(size),
            _size(step.held + step.cache_held),
            f"{(step.held + step.cache_held) / sheet.memory:.0%}",
            _size(step.read),
            str(step.sums),
            f"{found.read_seconds * 1e3:,.2f}",
            f"{found.sum_seconds * 1e3:,.2f}",
            f"{found.row_tokens_per_second:,.1f}",
            f"{found.tokens_per_second:,.1f}",
        )
    return table


def _size(length: float) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if length >= 1000**power:
            return f"{length / 1000**power:,.2f} {unit}"
    return f"{length:,.0f} B"
