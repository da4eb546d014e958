"""What a user may choose of a verification."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from export_grok.errors import ConfigError

__all__ = ["VerifyOptions"]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How an engine is held to a reference.

    Attributes:
        against: "torch", "ort", "goldens", or a path: of a bundle, a checkpoint or a file of
            goldens.
        layers: that are compared; all by default. With a choice the free run is left out.
        tokens: of each row that come one at a time, and that greedy answers are long.
        prompt: tokens of the longest row before them.
        text: UTF-8, what the tokens are taken from; some verses by default.
        tolerances: those that are not the usual ones, by tensor.
        keep_going: compare what follows a failed graph too.
        graphs: compare graph by graph; else the whole engine running free only.
        interpret: run no plans, but the graphs that they are built from, in float32 on a CPU.

    Raises:
        ConfigError: a number is out of its range; all are named.
    """

    against: str = "torch"
    layers: tuple[int, ...] | None = None
    tokens: int = 8
    prompt: int = 24
    text: Path | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    keep_going: bool = False
    graphs: bool = True
    interpret: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.tokens < 0:
            faults.append(f"tokens is {self.tokens}; it must be 0 (prompts only) or more")
        if self.prompt < 3:
            faults.append(f"prompt is {self.prompt}; rows of different length need 3 or more")
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            faults.append(f"layers is {self.layers}; name some, from 0 on")
        if self.layers is not None and not self.graphs:
            faults.append("layers are chosen, and no graphs are compared; leave one of both away")
        if faults:
            raise ConfigError("\n  ".join(faults))
