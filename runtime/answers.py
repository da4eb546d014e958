"""Answers on a terminal: the first streamed as it is made, the others behind it; then usage."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence

from export_grok.runtime.generate import Piece, Usage

__all__ = ["print_answers"]


def print_answers(
    prompts: Sequence[str],
    run: Callable[[Callable[[Usage], None]], Iterator[Piece]],
    *,
    as_json: bool,
) -> None:
    """Print the answers to stdout; speed and finish reasons to stderr.

    Args:
        prompts: what is answered.
        run: starts the stream of pieces, given what takes the usage at its end.
        as_json: print one JSON object a prompt instead, at the end, with its usage.
    """
    usage: list[Usage] = []
    texts = [""] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons = [""] * len(prompts)
    for piece in run(usage.append):
        texts[piece.row] += piece.text
        if piece.token is not None:
            tokens[piece.row].append(piece.token)
        reasons[piece.row] = piece.finished or ""
        if piece.row == 0 and not as_json:
            print(piece.text, end="", flush=True)
    took = usage[0]
    if as_json:
        for row, prompt in enumerate(prompts):
            answer = {
                "prompt": prompt,
                "text": texts[row],
                "tokens": tokens[row],
                "finish_reason": reasons[row],
                "load_seconds": took.load_seconds,
                "prefill_seconds": took.prefill_seconds,
                "tokens_per_second": took.tokens_per_second,
            }
            print(json.dumps(answer, ensure_ascii=False))
        return
    print("".join(f"\n\n{text}" for text in texts[1:]))
    counts = ", ".join(
        f"{len(ids)} tokens ({reason})" for ids, reason in zip(tokens, reasons, strict=True)
    )
    print(
        f"{counts}; {took.tokens_per_second:.1f} tokens/s after a prompt of "
        f"{took.prefill_seconds:.2f} s; loaded in {took.load_seconds:.2f} s",
        file=sys.stderr,
    )
