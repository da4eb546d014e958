"""Which prompts come next, and how many tokens of each: what is fair, and what may be waited for.

Prompts go through the layers by chunks. Weights are read once a chunk, so a chunk should be large;
but everyone who has a row waits for it, so its size is bounded, all rows of it together. Short
prompts share it with long ones in equal parts, as a rectangle: none waits until another is done.
"""

from collections.abc import Sequence

from export_grok.runtime.batching.answer import Answer

__all__ = ["chunk_of"]


def chunk_of(
    prompts: Sequence[Answer], *, chunk: int, budget: int, together: int, max_length: int
) -> tuple[list[Answer], int]:
    """Return whose prompts come next, and up to how many tokens of each.

    Args:
        prompts: that are not all in the cache, the one longest without a chunk first.
        chunk: most tokens of a row.
        budget: most tokens of all rows together; a row gets one at least.
        together: rows that are best brought at once.
        max_length: tokens of a row of the cache, T. No row is written beyond it, padding included.
    """
    chosen = list(prompts[:together])
    longest = max(answer.missing for answer in chosen)
    room = max_length - max(answer.held for answer in chosen)
    width = min(chunk, longest, room, max(1, budget // len(chosen)))
    return chosen, width
