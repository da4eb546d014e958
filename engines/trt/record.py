"""What a bundle of TensorRT plans is: its sizes, its graphs, every binding, every plan.

It stands in the manifest, so that a reader in any language knows what to bind where, and so that a
plan of another version, GPU or option is refused before it is deserialised.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from export_grok.config import EngineOptions, GrokConfig, Sums
from export_grok.errors import BundleError, ConfigError
from export_grok.export.contract import GraphKind
from export_grok.manifest import Manifest

__all__ = [
    "PHASES",
    "Binding",
    "GraphRecord",
    "Phase",
    "PlanRecord",
    "Sizes",
    "TrtRecord",
    "record_in",
]

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = get_args(Phase)

MOST_ROWS = 1024
MOST_TOKENS = 4096
SLOT_STEP = 128
MOST_SLOTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The fixed lengths that graphs are made for.

    Attributes:
        tensor_parallel: ranks that share each layer.
        batch: rows of a decode step, B.
        chunk: tokens of one row that prefill takes at once, S.
        max_length: longest row, prompt and answer together, in tokens.

    Raises:
        ConfigError: rows are longer than positions are told apart, or more than graphs are made
            for, or have no slot behind them to be parked in.
    """

    tensor_parallel: int = 1
    batch: int = 1
    chunk: int = 256
    max_length: int = 8192

    def __post_init__(self) -> None:
        for name, most in (("batch", MOST_ROWS), ("chunk", MOST_TOKENS)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; graphs are made for up to {most}"
                )
        if self.slots > MOST_SLOTS:
            raise ConfigError(
                f"max_length {self.max_length} and chunk {self.chunk} make a cache of "
                f"{self.slots} slots; positions are told apart up to {MOST_SLOTS}, as float32 has "
                "them"
            )
        if self.batch > 1 and self.slots == self.max_length:
            raise ConfigError(
                f"chunk 1 and max_length {self.max_length} make a cache without a slot to spare; "
                f"while others of {self.batch} rows run, a full one needs one: use a chunk of 2 "
                "or more, or another max_length"
            )

    @classmethod
    def of(cls, options: EngineOptions, config: GrokConfig) -> "Sizes":
        """Return the sizes asked for; else one row, of the length the model was trained for."""
        length = options.max_length or config.sequence_len
        return cls(
            tensor_parallel=options.tensor_parallel,
            batch=options.batch or cls.batch,
            chunk=options.chunk or min(cls.chunk, length),
            max_length=length,
        )

    @property
    def slots(self) -> int:
        """Slots of the cache for each row, T: the last chunk of a prompt is written whole.

        Of several rows one that is full is parked in a slot behind its `max_length` while others
        run. So there is one.

        They are a multiple of 128: a row then begins at a multiple of 256 bytes, as TensorRT asks
        of the addresses it is given.
        """
        needed = self.max_length + self.chunk - 1
        return -(-needed // SLOT_STEP) * SLOT_STEP

    def rows(self, phase: Phase) -> tuple[int, int]:
        """Return B and S of a graph: prefill takes one row at a time."""
        return (self.batch, 1) if phase == "decode" else (1, self.chunk)


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One input or output of a graph, and of its plan.

    Attributes:
        name: of the tensor.
        direction: seen from the graph.
        shape: all numbers; on each rank the same.
        dtype: as in `export_grok.weights`, or int64.
        aliases: for an output, the input that must be bound to the same address.
        weight: for a weight, its name in the weight index less `export.contract.weight_prefix`.
            It is stored in `dtype` or, for the embedding's table, in float32 and converted.
        cut: the axis of the stored tensor that ranks share evenly, rank r having the r-th part;
            None if every rank has the whole.
    """

    name: str
    direction: Literal["in", "out"]
    shape: tuple[int, ...]
    dtype: str
    aliases: str | None = None
    weight: str | None = None
    cut: int | None = None


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """A lowered graph of one kind for one phase, or a part of one.

    Attributes:
        kind: of the graph, as in `export.contract`.
        phase: decode or prefill.
        file: its name in the bundle.
        bindings: all inputs, then all outputs, in the graph's order.
        nodes: plugin node op type -> how many.
        part: its number, if the graph is cut where ranks are summed: `engines.cut` says how.
    """

    kind: GraphKind
    phase: Phase
    file: str
    bindings: tuple[Binding, ...]
    nodes: dict[str, int]
    part: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A plan: one graph built for one GPU architecture.

    Attributes:
        kind: of the graph.
        phase: of the graph.
        sm: compute capability times ten, e.g. 90.
        file: its name in the bundle.
        part: of the graph.
    """

    kind: GraphKind
    phase: Phase
    sm: int
    file: str
    part: int = 0


@dataclass(frozen=True, kw_only=True)
class TrtRecord:
    """All of it.

    Attributes:
        module: the package that built the plans, `tensorrt` or `tensorrt_rtx`.
        version: of that package; a plan runs in the same version only.
        sizes: of the graphs.
        graphs: two of each kind; if ranks are summed between plans, so many parts of each.
        plans: of each graph one for each architecture.
        kernels: plugin node op type -> hash of its kernels; empty if plans hold no plugins.
        recipe: hash of the program that made the graphs and kernels.
        sums: where ranks are summed: in the plans, or between those of parts.
    """

    module: str
    version: str
    sizes: Sizes
    graphs: tuple[GraphRecord, ...]
    plans: tuple[PlanRecord, ...]
    kernels: dict[str, str]
    recipe: str
    sums: Sums = "plan"

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all graphs and plans in the bundle."""
        rows = [graph.file for graph in self.graphs] + [plan.file for plan in self.plans]
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))  # tuples: lists
        return value

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "TrtRecord":
        """Return the record that JSON values describe.

        Raises:
            KeyError, TypeError, ValueError: they describe none.
        """
        graphs = tuple(
            GraphRecord(
                **{
                    **graph,
                    "bindings": tuple(
                        Binding(**{**binding, "shape": tuple(binding["shape"])})
                        for binding in graph["bindings"]
                    ),
                }
            )
            for graph in value["graphs"]
        )
        plans = tuple(PlanRecord(**plan) for plan in value["plans"])
        rest = {"sizes": Sizes(**value["sizes"]), "graphs": graphs, "plans": plans}
        return cls(**{**value, **rest})


def record_in(manifest: Manifest) -> TrtRecord:
    """Return the record that a manifest of a TensorRT engine holds.

    Raises:
        BundleError: it holds none, or a damaged one.
    """
    try:
        return TrtRecord.from_dict(manifest.engine)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BundleError(
            f"the manifest's record of the {manifest.backend} engine is damaged ({error}): build "
            "the engine again"
        ) from error
