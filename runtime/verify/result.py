"""What a comparison found, as plain data: for the table, the page, JSON, and who calls it."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from export_grok.engines.probe import GraphName

__all__ = [
    "Cause",
    "Deviation",
    "FreeRun",
    "GraphResult",
    "Place",
    "Verification",
    "failure",
]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where two tensors differ most.

    Attributes:
        row: of the batch.
        position: of the token in its row.
        index: behind row and position, e.g. (head, channel), or (token id,) for logits.
        value: of the engine there.
        wanted: by the reference.
    """

    row: int
    position: int
    index: tuple[int, ...]
    value: float
    wanted: float


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far one tensor of one step is from the reference; padding is left out.

    Attributes:
        tensor: its name, e.g. "moe".
        step: in which it was computed.
        error: the statistic that is held to the tolerance, see `runtime.verify.tolerances`.
        tolerance: the most that it may be.
        largest: absolute difference.
        mean: absolute difference.
        median: absolute difference.
        share: part of the values that differ by more than the tolerance allows one value.
        columns: first and last where such values are, counted through all that lies behind row
            and position, if they leave half of it out.
        place: of the largest difference; None where nothing was compared.
    """

    tensor: str
    step: str
    error: float
    tolerance: float
    largest: float
    mean: float
    median: float
    share: float
    columns: tuple[int, int] | None
    place: Place | None

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; what is no number is not."""
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float:
        """Error as a part of the tolerance: more than 1 fails, infinity if none was allowed."""
        if self.tolerance and not math.isnan(self.error):
            return self.error / self.tolerance
        return 0.0 if self.passed else math.inf


@dataclass(frozen=True, kw_only=True)
class GraphResult:
    """One graph held to the reference, both fed the reference's inputs.

    Attributes:
        deviations: of each tensor in each step; tensors in the order of computing.
        choices: tokens whose experts were compared; 0 if they were not.
        flips: tokens where other experts were chosen.
        near_ties: those of them where the reference itself was nearly undecided, which are no
            fault; what follows from the choice is not compared there.
    """

    graph: GraphName
    deviations: tuple[Deviation, ...]
    choices: int = 0
    flips: int = 0
    near_ties: int = 0

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its tolerance."""
        return all(deviation.passed for deviation in self.deviations)

    @property
    def first_failed(self) -> Deviation | None:
        """The failed deviation that was computed first; in a step others follow from it."""
        return next((found for found in self.deviations if not found.passed), None)

    @property
    def worst(self) -> Deviation | None:
        """The deviation that is nearest to, or farthest beyond, its tolerance."""
        return max(self.deviations, key=lambda one: one.ratio, default=None)

    @property
    def ratio(self) -> float:
        """The largest error as a part of its tolerance; 0 if nothing was compared."""
        return 0.0 if self.worst is None else self.worst.ratio


@dataclass(frozen=True, kw_only=True)
class FreeRun:
    """The whole engine and the whole reference, each on its own from the tokens on.

    Attributes:
        positions: whose logits were compared.
        error: for each step, the largest over its positions of |difference| / rms of the logits.
        mean_error: mean over all positions of the difference's rms / rms of the logits.
        beyond: positions beyond the tolerance.
        allowed: how many may be.
        tolerance: of a position's error.
        top_1: part of the positions where the likeliest token is the same.
        undecided: positions with another one where the reference was nearly undecided.
        firm: positions with another one where it was not.
        kl_mean: mean over positions of KL(reference || engine), in nats.
        kl_max: the largest.
        perplexity: of the engine on the tokens that were fed.
        perplexity_wanted: of the reference on them.
        greedy: tokens that both continued each row by, choosing the likeliest.
        parted: row and number of the first such token that differs, the first where the reference
            was not undecided if there is one; None if none does.
        margin: by how much the reference preferred its own token there, in rms of its logits.
        failures: which rules are broken, one line each.
        floor: the same of a bfloat16 computation that rounds wherever the original does, to which
            a bfloat16 engine is held; None for others.
    """

    positions: int
    error: dict[str, float]
    mean_error: float
    beyond: int
    allowed: int
    tolerance: float
    top_1: float
    undecided: int
    firm: int
    kl_mean: float
    kl_max: float
    perplexity: float
    perplexity_wanted: float
    greedy: int
    parted: tuple[int, int] | None
    margin: float | None
    failures: tuple[str, ...] = ()
    floor: "FreeRun | None" = None

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return not self.failures


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A mistake that has the same signature: the reference with it agrees with the engine.

    Attributes:
        fault: its name, see `runtime.verify.faults`.
        title: what is wrong then, in a sentence.
        error: largest error of the engine against the reference with the mistake, in tolerances.
    """

    fault: str
    title: str
    error: float


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All that was compared.

    Attributes:
        bundle: folder.
        engine: what ran.
        reference: what it was held to.
        dtype: of the engine.
        layers: of the model.
        rows: tokens of each row that was fed.
        decoded: how many of them singly.
        text: where the tokens came from.
        graphs: in the order of computing, those that were compared.
        free_run: None if it was left out.
        cause: of the first failed graph, if one is known.
        notes: what was left out and why, one line each.
    """

    bundle: str
    engine: str
    reference: str
    dtype: str
    layers: int
    rows: tuple[int, ...]
    decoded: int
    text: str
    graphs: tuple[GraphResult, ...]
    free_run: FreeRun | None
    cause: Cause | None
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether nothing is beyond its tolerance."""
        return self.failed is None and (self.free_run is None or self.free_run.passed)

    @property
    def failed(self) -> GraphResult | None:
        """The first graph that failed."""
        return next((graph for graph in self.graphs if not graph.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is no finite number is null."""
        value: dict[str, Any] = dataclasses.asdict(self)
        for graph, found in zip(value["graphs"], self.graphs, strict=True):
            graph["graph"], graph["passed"] = str(found.graph), found.passed
        if self.free_run is not None:
            value["free_run"]["passed"] = self.free_run.passed
        value["passed"] = self.passed
        json_value: dict[str, Any] = _finite(value)
        return json_value


def failure(result: Verification) -> str:
    """Return in a clause what is wrong first."""
    graph = result.failed
    if graph is None or graph.first_failed is None:
        return "; ".join(result.free_run.failures) if result.free_run else "nothing is wrong"
    found = graph.first_failed
    known = f" ({result.cause.title})" if result.cause else ""
    return (
        f"{graph.graph} is wrong, its {found.tensor} in {found.step} by {found.error:.1e} where "
        f"{found.tolerance:.1e} is allowed{known}"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
