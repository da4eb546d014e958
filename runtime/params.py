"""What a user may choose of a request or an evaluation: the parameters, without what they do."""

from dataclasses import dataclass

from export_grok.errors import RequestError

__all__ = ["LARGEST_TEMPERATURE", "EvaluationOptions", "SamplingParams"]

# The largest float32: logits are divided in that type.
LARGEST_TEMPERATURE = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token each time.
        top_k: how many of the most probable tokens may be drawn; 0 allows all.
        top_p: mass of the most probable tokens that may be drawn; 1 allows all, 0 only the
            most probable one and those equal to it.
        seed: which random numbers are used. The same seed, step and logits give the same token.

    Raises:
        RequestError: a value is outside its range; all such values are named.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        # NaN compares false with both ends, so it is refused like any number outside.
        if (
            not _is(self.temperature, (int, float))
            or not 0 <= self.temperature <= LARGEST_TEMPERATURE
        ):
            faults.append(
                f"temperature is {self.temperature!r}; it must be 0 (always the most probable "
                f"token) or a positive number up to {LARGEST_TEMPERATURE:.2g}"
            )
        if not _is(self.top_k, int) or self.top_k < 0:
            faults.append(f"top_k is {self.top_k!r}; it must be a whole number, 0 (off) or more")
        if not _is(self.top_p, (int, float)) or not 0 <= self.top_p <= 1:
            faults.append(f"top_p is {self.top_p!r}; it must be a number from 0 to 1 (off)")
        if not _is(self.seed, int) or not 0 <= self.seed < 2**64:
            faults.append(f"seed is {self.seed!r}; it must be a whole number from 0 to 2**64 - 1")
        if faults:
            raise RequestError("; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How a text is cut.

    Attributes:
        window: tokens of a window.
        batch: windows that are read together.
        lines: whether each line is a text of its own, with the end token behind it.

    Raises:
        RequestError: a window has nothing to guess, or a batch no rows.
    """

    window: int = 256
    batch: int = 8
    lines: bool = False

    def __post_init__(self) -> None:
        if self.window < 2 or self.batch < 1:
            raise RequestError(
                f"window is {self.window}, batch {self.batch}; a window needs 2 tokens or more, "
                "a batch 1 row or more"
            )


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # True is an int
