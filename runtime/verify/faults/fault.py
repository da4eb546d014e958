"""What a known mistake is: how it is made in the reference, and how in the files of an engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from export_grok.config import GrokConfig

# NOTE: no onnx_ir and no torch; what lists faults as data needs neither.
if TYPE_CHECKING:
    import onnx_ir as ir

    from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["Fault", "FaultGraph", "RankPart"]

FaultGraph = Literal["layer", "embedding", "head"]


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What is wrong in the weights of rank 1, in an engine of ranks.

    Attributes:
        tensors: of the layer, those that are wrong.
        content: gives the wrong bytes from those of rank 1 and those of rank 0.
    """

    tensors: tuple[str, ...]
    content: Callable[[bytes, bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A known mistake.

    It is planted in an engine in one of three ways, or in none: an edit of its graph, the weights
    of another layer, or other bytes in a rank's weights.

    Attributes:
        name: by which it is asked for.
        title: what is wrong then, in a sentence.
        graph: the kind of graph that computes wrongly; of the head both graphs do.
        shows: first tensor of `runtime.verify.tolerances.TENSORS` that is wrong, where the graph
            is fed what is right. If it is wrong by less than its tolerance, as in a model of other
            sizes, one that comes later is seen first.
        mistake: makes it in the PyTorch model; None if there is no telling which it would be.
        plant: makes it in one stamped graph of float32, in place.
        weights_of: of a layer's number and the number of layers, the layer whose weights it gets.
        of_ranks: what a rank holds, if it is a mistake that only ranks can make.
        harmless: why it changes nothing in a model; None if it does.
    """

    name: str
    title: str
    graph: FaultGraph
    shows: str
    mistake: "Callable[[Mistake], None] | None"
    plant: "Callable[[ir.Model, GrokConfig], None] | None"
    weights_of: Callable[[int, int], int] | None = None
    of_ranks: RankPart | None = None
    harmless: Callable[[GrokConfig], str | None] = lambda config: None
