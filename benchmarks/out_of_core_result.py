"""What decoding out of memory found: every token, the disk, and what may be doubted."""

import statistics
from dataclasses import dataclass

__all__ = ["Result", "Run", "Token"]

FEWEST_TOKENS = 5
WIDEST = 0.15
SPOILT = 0.02


@dataclass(frozen=True, kw_only=True)
class Token:
    """One step of decoding.

    Attributes:
        bytes: read from the disk meanwhile.
    """

    seconds: float
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes from the disk per second."""
        return self.bytes / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.seconds:.2f} s, {self.bytes / 1e9:.2f} GB from the disk, "
            f"{self.rate / 1e9:.2f} GB/s"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A process that decoded.

    Attributes:
        private: peak of its own memory (RssAnon) in bytes; None where the system does not say.
    """

    tokens: tuple[Token, ...]
    private: int | None

    @property
    def seconds(self) -> float:
        """Of a token, the median."""
        return statistics.median(token.seconds for token in self.tokens)

    @property
    def bytes(self) -> float:
        """From the disk for a token, the median."""
        return statistics.median(token.bytes for token in self.tokens)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Decoding with a limit of memory, and without.

    Attributes:
        layers: of the model.
        touchable: bytes of the weights that decoding can touch: layers and head.
        limit: of memory in bytes.
        step_bytes: that a token has to read, from memory or disk.
        stayed: bytes of the weights that were in memory when decoding with the limit began.
        disk: bytes per second that it gave before and after that.
        limited: with the limit.
        free: without it, all weights in memory before.
        most_used: memory in the group at the most, in bytes; None where the system does not say.
    """

    layers: int
    touchable: int
    limit: int
    step_bytes: float
    stayed: int
    disk: tuple[float, float]
    limited: Run
    free: Run
    most_used: int | None

    @property
    def disk_rate(self) -> float:
        """Bytes per second of the disk, the mean of before and after."""
        return statistics.mean(self.disk)

    @property
    def share(self) -> float:
        """Which part of it decoding with the limit reached, the median of the tokens."""
        return statistics.median(token.rate for token in self.limited.tokens) / self.disk_rate

    def doubts(self) -> list[str]:
        """Return why figures should not be trusted; none if there is nothing to doubt."""
        told = []
        count, change = len(self.limited.tokens), max(self.disk) / min(self.disk) - 1
        again = self.free.bytes / self.step_bytes
        if count < FEWEST_TOKENS:
            told.append(f"--tokens {count} is too few for a median; give {FEWEST_TOKENS} or more")
        if change > WIDEST:
            told.append(
                f"the disk was {change:.0%} faster once than the other time: something else reads "
                "or writes here; end it"
            )
        if self.stayed > SPOILT * self.touchable:
            told.append(
                f"{self.stayed / 1e9:.2f} GB of the weights could not be taken out of memory: "
                "something else has them in use; end it"
            )
        if self.share > 1:
            told.append(
                "decoding read more than the disk was measured to give: it gave more meanwhile, "
                "or something between keeps what was read before, as a virtual machine's host may"
            )
        if again > SPOILT:
            told.append(
                f"without the limit too {again:.0%} of a token came from the disk: this machine "
                "has too little memory for the comparison"
            )
        return told
