"""What a benchmark measures: lengths, batches and rounds, and the settings that follow."""

from dataclasses import dataclass
from typing import Literal

from export_grok.config import GrokConfig
from export_grok.errors import RequestError

__all__ = ["BenchOptions", "Setting", "cache_length", "settings_of"]

PROMPTS = (128, 512)
CONTEXTS = (32, 256)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and how often.

    Attributes:
        prompt_tokens: lengths of the prompts whose prefill is measured; 128 and 512 by default,
            shortened to what the model takes.
        context: tokens in the cache when decoding begins; 32 and 256 by default, likewise.
        batch: rows of the batches that decode. The first of them does the prefill too.
        rounds: how often each setting is measured.
        decode_tokens: steps of decoding in a round.
        seed: which random tokens are read.

    Raises:
        RequestError: a value is outside its range; all such values are named.
    """

    prompt_tokens: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    batch: tuple[int, ...] = (1,)
    rounds: int = 7
    decode_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        for name in ("prompt_tokens", "context", "batch"):
            values = getattr(self, name)
            if values is None:
                continue
            if not values or min(values) < 1:
                faults.append(f"{name} is {_list(values)}; it must be numbers from 1")
            elif len(set(values)) < len(values):
                faults.append(f"{name} is {_list(values)}; name each number once")
        for name, least in (("rounds", 1), ("decode_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                faults.append(f"{name} is {value}; it must be {least} or more")
        if faults:
            raise RequestError("; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One thing that is measured.

    Attributes:
        batch: rows, B.
        tokens: of each row's prompt, or in each row's cache when decoding begins.
    """

    stage: Literal["prefill", "decode"]
    batch: int
    tokens: int

    def __str__(self) -> str:
        length = "prompt" if self.stage == "prefill" else "context"
        return f"{self.stage} of batch {self.batch}, {length} {self.tokens}"


def settings_of(options: BenchOptions, config: GrokConfig) -> tuple[Setting, ...]:
    """Return what is measured of a model, in the order of a round.

    Raises:
        RequestError: a length is beyond what the model takes; all such lengths are named.
    """
    longest = config.sequence_len
    steps = options.decode_tokens
    if steps >= longest:
        raise RequestError(
            f"decode_tokens is {steps}; this model takes {longest} tokens, so 1 to {longest - 1}"
        )
    prompts = options.prompt_tokens or _shortened(PROMPTS, longest - 1)
    contexts = options.context or _shortened(CONTEXTS, longest - steps)
    faults = [
        f"{name} {_list(beyond)} is too long; it must be 1 to {limit}, as this model takes "
        f"{longest} tokens and {room} of them is kept for what follows"
        for name, lengths, limit, room in (
            ("prompt_tokens", prompts, longest - 1, 1),
            ("context", contexts, longest - steps, f"decode_tokens ({steps})"),
        )
        if (beyond := tuple(length for length in lengths if length > limit))
    ]
    if faults:
        raise RequestError("; ".join(faults))
    prefill = [Setting(stage="prefill", batch=options.batch[0], tokens=each) for each in prompts]
    decode = [
        Setting(stage="decode", batch=batch, tokens=context)
        for batch in options.batch
        for context in contexts
    ]
    return (*prefill, *decode)


def cache_length(options: BenchOptions, settings: tuple[Setting, ...]) -> int:
    """Return the slots of a cache that takes every setting, T."""
    after = {"prefill": 1, "decode": options.decode_tokens}
    return max(setting.tokens + after[setting.stage] for setting in settings)


def _shortened(lengths: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(sorted({min(length, limit) for length in lengths}))


def _list(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values)) or "empty"
