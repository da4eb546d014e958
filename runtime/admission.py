"""How much may be under way at once, and what is said when that is reached."""

from collections.abc import Sequence
from dataclasses import dataclass

from export_grok.errors import BusyError, RequestError

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be under way at once.

    Attributes:
        batch: requests that run, each in a row of the cache.
        chunk: tokens of prompts that go through the layers at once.
        max_waiting: requests that may wait for a row.
        max_waiting_tokens: tokens of their prompts; any number by default.

    Raises:
        RequestError: a limit is below what lets one request through.
    """

    batch: int
    chunk: int
    max_waiting: int
    max_waiting_tokens: int | None = None

    def __post_init__(self) -> None:
        least = {"batch": 1, "chunk": 1, "max_waiting": 0, "max_waiting_tokens": 1}
        faults = [
            f"{name} is {value}; it must be {limit} or more"
            for name, limit in least.items()
            if (value := getattr(self, name)) is not None and value < limit
        ]
        if faults:
            raise RequestError("; ".join(faults))

    def refusal(self, prompts: Sequence[int], tokens: int) -> BusyError | None:
        """Return why one request more is too much; None if it is not.

        Args:
            prompts: tokens of the prompts under way, in the order in which they came: those that
                came first have the rows, or get them in the next turn.
            tokens: of the prompt that is to come.
        """
        waiting, most = prompts[self.batch :], self.max_waiting_tokens
        if len(prompts) < self.batch:
            return None
        if len(waiting) < self.max_waiting and (most is None or sum(waiting) + tokens <= most):
            return None
        return BusyError(
            f"{len(waiting)} requests with {sum(waiting)} tokens wait for {self.batch} rows, and "
            f"one of {tokens} tokens more is too much: {self.max_waiting} may wait"
            + ("" if most is None else f", of {most} tokens together")
            + "; submit it later, or with wait=True"
        )
