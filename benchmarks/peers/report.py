"""The report of a comparison: its tables, what was compared, and how it was measured."""

import re
from collections.abc import Mapping
from pathlib import Path

from tables import OURS, Comparison

from export_grok.files import atomic_file

__all__ = ["write_report"]

BEGIN = "<!-- by hand from here: kept when this file is written again -->"
END = "<!-- to here -->"

REPORT = """\
# Performance

The same random weights through this project and through others, on one machine: {processor},
{threads} threads, {days}. Written by the command at the end.

![Time for a token, and speed of prefill]({picture})

{tables}

## What was compared

{peers}

The model is a random Grok-1 of middle size: {layers} layers, width {width}, {query_heads} query
and {kv_heads} key/value heads of {head}, {experts} experts of {ffn} ({chosen} chosen), vocabulary
{vocabulary}. All peers have the same int8 codes; their scales are exact in float16, and the
embedding is int8 codes times a scale, so nothing is lost on the way to a peer's format.

{versions}

## How it was measured

- {rounds} rounds; in each, every peer once, in a process of its own, in an order that rotates.
- Decode: batch 1, fixed random tokens one by one behind a prompt of 32; a round's figure is the
  median of {tokens} tokens. Prefill: a fixed prompt of 128 or 512 tokens into an empty cache.
- Figures are medians over the rounds, with the range behind them. "times {ours}" is the median of
  the ratios of times within a round: above 1 is slower than {ours}.
- "MB a token" is counted from the weights: the matrices that a token goes through, with their
  scales, and the head. The ceiling is what as many threads can read if they do nothing else,
  {slowest:.1f} to {fastest:.1f} GB/s here, measured before and after each measurement.
- Private memory is the peak (RssAnon); mapped memory is that at the end (RssFile), which other
  processes share. Load is from the model's path to a session that can run, with the files in
  memory and the programs imported.
- The error is the RMS of the difference from logits in float64, by the RMS of those: at the end of
  a prompt of 16 tokens, and of its tokens fed one by one. At a near tie of the router a coarse
  peer takes another expert: then the worst token is far from the median.

## Again

    pip install -c constraints.txt -e ".[export,onnxruntime,plot]"
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python
    python benchmarks/peers/compare.py DIR --rounds {rounds} --report docs/performance.md

llama-cpp-python is compiled in some 20 minutes on 2 cores. It may live in an environment of its
own, which needs numpy besides: say where with `--llama-python`. Without it the others are
compared. The results of every round are kept in `DIR/results.jsonl`, so a comparison that was
broken off goes on.

{begin}
{by_hand}{end}
"""


def write_report(
    path: Path,
    comparison: Comparison,
    *,
    left_out: Mapping[str, str],
    machine: Mapping[str, str],
    versions: Mapping[str, str],
    picture: str,
) -> None:
    """Write the report; what stands between its two markers stays as it is.

    Args:
        path: of the report.
        comparison: what it is about.
        left_out: why peers are not in it, by name.
        machine: `processor`, `threads` and `tokens` of a round.
        versions: of the programs, and what else they say of themselves, by name.
        picture: its place, seen from the report.

    Raises:
        OutputError: it cannot be written.
    """
    config = comparison.config
    rows = list(comparison.results.all_rows())
    days = sorted({row["at"][:10] for row in rows})
    ceilings = [row["ceiling_gb_s"] for row in rows]
    peers = [f"- **{peer.name}**: {peer.text}." for peer in comparison.peers]
    peers += [f"- {name} was left out: {reason}." for name, reason in left_out.items()]
    text = REPORT.format(
        **machine,
        days=" to ".join(dict.fromkeys((days[0], days[-1]))),
        begin=BEGIN,
        by_hand=_by_hand(path),
        end=END,
        picture=picture,
        tables=comparison.tables(),
        peers="\n".join(peers),
        layers=config.num_layers,
        width=config.emb_size,
        query_heads=config.num_q_heads,
        kv_heads=config.num_kv_heads,
        head=config.key_size,
        experts=config.num_experts,
        ffn=config.ffn_size,
        chosen=config.num_selected_experts,
        vocabulary=config.vocab_size,
        versions="\n".join(f"- {name}: {version}" for name, version in versions.items()),
        rounds=comparison.rounds,
        ours=OURS,
        slowest=min(ceilings),
        fastest=max(ceilings),
    )
    with atomic_file(path) as file:
        file.write(text.encode())


def _by_hand(path: Path) -> str:
    """Return what stands between the markers of the report in `path`, if there is one."""
    text = path.read_text() if path.exists() else ""
    found = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.DOTALL)
    return found[1] if found else ""
