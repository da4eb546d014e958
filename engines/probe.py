"""One graph of an engine at a time, on arrays, with what it computes on the way: for comparing."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.export.contract import GraphKind

__all__ = ["TAPS", "GraphName", "Probe", "Run"]

# What a layer computes on its way from `h` to `h_out`, in the order of computing; not all engines
# can show it. Letters are the legend of `export.model`.
TAPS = (
    "probabilities",  # of all experts, by the router [B, S, E]
    "heads",  # what attention gives, before its output matrix [B, S, Hq*D]
    "attention",  # after it, summed over ranks [B, S, M]
    "gates",  # of the chosen experts, as they weigh them [B, S, C]
    "experts",  # the chosen, int64 [B, S, C]
    "moe",  # what the experts give, summed over ranks [B, S, M]
)

# Takes the inputs of a graph by the names of `export.contract`, and gives its outputs and taps.
# Floating point arrays are float32 whatever the engine's dtype is: no value is lost. The arrays
# given are left as they are, and those that come out are new.
Run = Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]


@dataclass(frozen=True, kw_only=True, order=True)
class GraphName:
    """Which graph of a model: its kind, and for a decoder layer its number."""

    kind: GraphKind
    layer: int | None = None

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"layer {self.layer}"


class Probe(Protocol):
    """What runs graphs one at a time: an engine, or what it is compared with."""

    @property
    def name(self) -> str:
        """What runs, in a few words."""

    @property
    def config(self) -> GrokConfig:
        """Hyper-parameters of the model."""

    @property
    def dtype(self) -> Dtype:
        """Of activations and cache."""

    def graph(self, name: GraphName) -> AbstractContextManager[Run]:
        """Load a graph and return what runs it; it is let go when the block ends.

        Raises:
            BundleError: it does not load.
        """
