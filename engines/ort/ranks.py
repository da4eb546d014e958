"""Run one rank's share of a bundle in ONNX Runtime: part by part, with sums over ranks between.

A part is bound as a graph of `engines.ort.session` is, by address, once for each span. What is to
be summed comes out where the group takes it from, and the sum goes in from where the group puts
it, so nothing is copied but the embedding's sum, which the first layer needs longer than the group
keeps it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import RANK_GRAPHS, Bundle, graph_file, rank_folder
from export_grok.engines.group import Group
from export_grok.engines.ort.chains import Span, Workspace
from export_grok.engines.ort.graphs import (
    Array,
    bound,
    head_options,
    load_graph,
    run_bound,
    session_options,
)
from export_grok.engines.ort.session import CachedSession
from export_grok.errors import ConfigError
from export_grok.progress import progress_bar

__all__ = ["RankSession", "open_rank", "part_files"]

# The parts of a layer, for the error that names a rank at the sum behind one.
_LAYER_PARTS = ("attention", "experts", "end")


def open_rank(
    bundle: Bundle, group: Group, *, batch: int, max_length: int, threads: int | None = None
) -> "RankSession":
    """Return one rank's loaded share of an engine.

    Args:
        bundle: with an engine for as many ranks as there are in `group`.
        group: the ranks, seen from this one.
        batch: rows of the cache.
        max_length: longest row, prompt and answer together, in tokens.
        threads: to compute with; as many as there are cores by default.

    Raises:
        BundleError: a graph does not load.
        ConfigError: the engine is for another number of ranks.
    """
    built_for = bundle.manifest.engine.get("tensor_parallel", 1)
    if built_for != group.ranks:
        raise ConfigError(
            f"{bundle.folder} needs {built_for} ranks, sees {group.ranks}; start {built_for}, or "
            f"build it again with --tp {group.ranks}"
        )
    return RankSession(bundle, group, batch=batch, max_length=max_length, threads=threads)


def part_files(
    bundle: Bundle, kind: str, layer: int | None = None, *, lowered: bool
) -> list[Path]:
    """Return the files of all parts of a graph, in order.

    Args:
        bundle: of ranks.
        kind: of the graph.
        layer: its number, if it is one of a layer.
        lowered: for the kernels built into ONNX Runtime, not the native ones.
    """
    files: list[Path] = []
    while True:
        variant = f"{len(files)}.ort" if lowered else f"{len(files)}"
        name = f"{RANK_GRAPHS}/{graph_file(kind, layer, variant=variant)}"
        if files and name not in bundle.manifest.files:
            return files
        files.append(bundle.folder / name)


class RankSession(CachedSession):
    """The parts of all graphs, with one rank's weights, and a cache for its heads.

    All ranks of the group are asked for the same tokens. Their logits side by side, in the order
    of ranks, are those of the model.

    Attributes:
        group: the ranks, seen from this one.
    """

    def __init__(
        self,
        bundle: Bundle,
        group: Group,
        *,
        batch: int,
        max_length: int,
        threads: int | None = None,
    ) -> None:
        rank = bundle.config.for_rank(group.ranks)
        super().__init__(rank, batch=batch, max_length=max_length)
        self.group = group
        self.first_token = group.rank * rank.vocab_size
        self._bundle = bundle
        root = bundle.folder / rank_folder(group.rank)
        self._options = session_options(root, threads, self.kernels)
        self._head_options = head_options(root, threads, self.kernels)
        self._embedding = self._load("embedding", self._options)
        self._layers = []
        with progress_bar("loading", self.config.num_layers, unit="layers") as advance:
            for layer in range(self.config.num_layers):
                self._layers.append(self._load("layer", self._options, layer))
                advance(1)

    def _new_chain(self, span: Span, workspace: Workspace) -> "_Chain":
        return _Chain(self, self._embedding, self._layers, span, workspace)

    def _load_head(self, kind: str) -> ort.InferenceSession:
        (head,) = self._load(kind, self._head_options)
        return head

    def _load(
        self, kind: str, options: ort.SessionOptions, layer: int | None = None
    ) -> list[ort.InferenceSession]:
        """Return all parts of a graph."""
        lowered = self.kernels.library is None
        files = part_files(self._bundle, kind, layer, lowered=lowered)
        return [load_graph(file, options) for file in files]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A part, bound; `total` says of what the sum behind it is, if there is one."""

    session: ort.InferenceSession
    binding: ort.IOBinding
    total: str | None


class _Chain:
    """The parts of embedding and layers bound to their memory for some rows and new tokens."""

    def __init__(
        self,
        session: RankSession,
        embedding: list[ort.InferenceSession],
        layers: list[list[ort.InferenceSession]],
        span: Span,
        workspace: Workspace,
    ) -> None:
        self._group, self._workspace = session.group, workspace
        self._shape = (span.rows, span.tokens, session.config.emb_size)
        self._tokens, self._start = workspace.tokens(span), workspace.start(span)
        self._total = self._group.total(self._shape)
        # From layer to layer the residual stream goes from one of two arrays to the other.
        # A binding knows addresses only: what it names must live as long as it does.
        self._streams = [workspace.stream(name, self._shape) for name in ("even", "odd")]
        self._hidden = self._streams[len(layers) % 2]
        self._arrays: dict[str, Array] = {
            "tokens": self._tokens,
            "first": np.array([session.first_token]),
            "start": self._start,
            "partial": self._group.partial(self._shape),
            "sum": self._total,
        }
        self._embedding = [self._step(part, self._arrays, "embedding") for part in embedding]
        self._layers: list[_Step] = []
        for number, parts in enumerate(layers):
            keys, values = span.of(session.keys[number]), span.of(session.values[number])
            arrays: dict[str, Array] = self._arrays | {
                "h": self._streams[number % 2],
                "h_out": self._streams[(number + 1) % 2],
                "k_cache": keys,
                "k_out": keys,
                "v_cache": values,
                "v_out": values,
            }
            for part, what in zip(parts, _LAYER_PARTS, strict=True):
                self._layers.append(self._step(part, arrays, f"layer {number}, {what}"))

    def run(self, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the residual stream behind the last layer; good until the next run of any."""
        self._tokens[:] = tokens
        self._start[:] = start
        self._take(self._embedding)
        self._streams[0][:] = self._total  # which the group keeps until the next sum only
        self._take(self._layers)
        return self._hidden

    def _take(self, steps: list[_Step]) -> None:
        for step in steps:
            run_bound(step.session, step.binding)
            if step.total is not None:
                self._group.all_reduce(self._shape, step.total)

    def _step(self, part: ort.InferenceSession, arrays: dict[str, Array], what: str) -> _Step:
        outputs: dict[str, Array] = {}
        for output in part.get_outputs():
            if output.name not in arrays:
                # It crosses to a later part of its layer; other layers use the memory again.
                lengths = {"B": self._shape[0], "S": self._shape[1]}
                shape = tuple(lengths.get(length, length) for length in output.shape)
                crossing = self._workspace.stream(output.name, shape)
                arrays[output.name] = self._arrays[output.name] = crossing
            outputs[output.name] = arrays[output.name]
        inputs = {value.name: arrays[value.name] for value in part.get_inputs()}
        return _Step(
            session=part,
            binding=bound(part, inputs, outputs),
            total=what if "partial" in outputs else None,
        )
