"""Lowered graphs of the fixture models, with their weights, run on a CPU.

No plugin is here: the function bodies run, in ONNX Runtime or, for narrow dtypes that it has no
kernels for, in the evaluator of onnx. Nor are there other ranks: every rank's graph is cut where
ranks are summed, and the sums are taken here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from export_grok.config import Dtype, GrokConfig, HeadDtype
from export_grok.engines.trt.bindings import bindings_of
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.record import Binding, Phase, Sizes
from export_grok.export.contract import GraphKind, weight_prefix
from export_grok.export.head import quantised
from export_grok.weights import NUMPY_DTYPES, WeightReader
from tests.bundles import traced
from tests.conftest import Golden, load_golden

__all__ = [
    "FEW",
    "MANY",
    "Array",
    "Arrays",
    "Chain",
    "Lowered",
    "bindings",
    "content",
    "largest",
    "lowered",
    "normal",
    "part",
    "run",
    "run_by",
    "run_changed",
    "stored",
    "weights",
]

Array = NDArray[Any]
Arrays = dict[str, Array]

# Chunks around the number of rows up to which a plugin multiplies: each is lowered its own way.
FEW, MANY = 64, 65

CACHES = ("k_cache", "v_cache")


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """Which graph: all that it depends on."""

    config: GrokConfig
    kind: GraphKind
    phase: Phase
    sizes: Sizes
    dtype: Dtype = "float32"
    head: HeadDtype = "float32"


@functools.cache
def lowered(graph: Lowered) -> ir.Model:
    """Return the graph. It is shared: clone it to change it."""
    ranks = graph.sizes.tensor_parallel
    found = traced(graph.kind, graph.config, graph.dtype, graph.head, ranks)
    return lower_template(found, graph.kind, graph.dtype, graph.sizes, graph.phase)


def content(model: ir.Model) -> bytes:
    """Return the bytes of its file."""
    found: bytes = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
    return found


def bindings(graph: Lowered) -> tuple[Binding, ...]:
    """Return what is bound to the graph."""
    ranks = graph.sizes.tensor_parallel
    return bindings_of(lowered(graph).graph, graph.kind, graph.config, graph.dtype, ranks)


@functools.cache
def stored(name: str) -> Arrays:
    """Return all weights of a fixture by name, and those of its head as int8."""
    index = load_golden(name).index
    reader = WeightReader(index.root)
    arrays = {weight.name: reader.read(weight) for weight in index}
    codes, scales = quantised(arrays["embedding.weight"])
    return {**arrays, "unembedding.weight": codes, "unembedding.scales": scales[None]}


def part(array: Array, cut: int | None, ranks: int, rank: int) -> Array:
    """Return the rank-th of so many even parts along an axis; all if there is no axis."""
    return array if cut is None else np.split(array, ranks, cut)[rank]


def weights(graph: Lowered, arrays: Mapping[str, Array], rank: int, layer: int = 0) -> Arrays:
    """Return what the weights of a graph are bound to on a rank, by the names of its inputs."""
    prefix, ranks = weight_prefix(graph.kind, layer), graph.sizes.tensor_parallel
    return {
        row.name: part(arrays[f"{prefix}{row.weight}"], row.cut, ranks, rank).astype(
            NUMPY_DTYPES.get(row.dtype, row.dtype)  # type: ignore[call-overload]
        )
        for row in bindings(graph)
        if row.weight is not None
    }


def run(graph: Lowered, feeds: Sequence[Mapping[str, Array]]) -> list[Arrays]:
    """Run the graph on every rank.

    Args:
        graph: of any rank.
        feeds: all inputs of each rank, weights too.

    Returns:
        The outputs of each rank. A layer has two more, `k_rows` and `v_rows`: what it has to write
        into its caches.
    """
    runs, sums = _runner(graph)
    totals = dict(sums)
    found = [runs({**rank, **totals}) for rank in feeds]
    for name in sums:  # a later part depends on the sums before it
        totals[name] = functools.reduce(np.add, [rank[f"{name}.part"] for rank in found])
        found = [runs({**rank, **totals}) for rank in feeds]
    return found


def run_changed(graph: Lowered, change: Callable[[ir.Model], None], feeds: Arrays) -> Arrays:
    """Run the graph of one rank with a fault planted in it."""
    model = lowered(graph).clone()
    change(model)
    return run_by(model, graph.dtype)(feeds)


@functools.cache
def _runner(graph: Lowered) -> tuple[Callable[[Arrays], Arrays], Arrays]:
    """Return what runs the graph of a rank, cut where ranks are summed, and a 0 for each sum."""
    model = lowered(graph).clone()
    sums: Arrays = {}
    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        if node.op_type == "DistCollective" and x is not None and x.shape is not None:
            name = f"sum_{len(sums)}"
            sums[name] = np.zeros(x.shape.numpy(), NUMPY_DTYPES[graph.dtype])
            total = ir.Value(name=name, shape=x.shape, type=x.type)
            model.graph.inputs.append(total)
            node.replace_input_with(0, total)
            x.name = f"{name}.part"
            model.graph.outputs.append(x)
        elif node.op_type == "TensorScatter":
            cache, rows = node.inputs[:2]
            assert cache is not None and rows is not None
            rows.name = str(cache.name).replace("cache", "rows")
            rows.type = cache.type
            model.graph.outputs.append(rows)
    return run_by(model, graph.dtype), sums


def run_by(model: ir.Model, dtype: Dtype) -> Callable[[Arrays], Arrays]:
    """Return what runs a graph of a dtype: its outputs by name of its inputs by name."""
    names = [str(value.name) for value in model.graph.outputs]
    if dtype != "float32":
        evaluator = ReferenceEvaluator(ir.serde.serialize_model(model))
        return lambda feeds: dict(zip(names, evaluator.run(names, feeds), strict=True))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(content(model), options, providers=["CPUExecutionProvider"])

    def outputs(feeds: Arrays) -> Arrays:
        values = {name: _ort_value(array) for name, array in feeds.items()}
        found = session.run_with_ort_values(names, values)
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}

    return outputs


def _ort_value(array: Array) -> ort.OrtValue:
    """Return the array for ONNX Runtime, which does not know the bfloat16 of numpy."""
    array = np.ascontiguousarray(array)
    if array.dtype != ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(array)
    bits = array.view(np.int16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(ir.DataType.BFLOAT16))


def normal(*shape: int) -> Array:
    """Return normal numbers, the same each time."""
    return np.random.default_rng(shape[-1]).normal(size=shape).astype(np.float32)


def largest(found: Array, expected: Array) -> float:
    """Return the largest difference; infinite if there is no number somewhere."""
    distance = np.abs(found.astype(np.float64) - expected)
    return float(np.nan_to_num(distance, nan=np.inf).max())


class Chain:
    """Embedding, layers and head of a fixture on all ranks, with a cache for each.

    Attributes:
        caches: rank -> layer -> the two caches by name, [B, Hkv, T, D].
    """

    def __init__(self, golden: Golden, sizes: Sizes, dtype: Dtype = "float32") -> None:
        """Take caches that hold no number anywhere."""
        self._golden, self._sizes, self._dtype = golden, sizes, dtype
        config, ranks = golden.config, sizes.tensor_parallel
        shape = (sizes.batch, config.num_kv_heads // ranks, sizes.slots, config.key_size)
        self.caches = [
            [
                {name: np.full(shape, np.nan, NUMPY_DTYPES[dtype]) for name in CACHES}
                for _ in range(config.num_layers)
            ]
            for _ in range(ranks)
        ]

    def prefill(self, row: int, tokens: Array, first: int = 0) -> Array:
        """Write the tokens [S] of one row from slot `first` on; return their logits [S, V]."""
        chunk, found = self._sizes.chunk, []
        for at in range(0, len(tokens), chunk):
            some = tokens[at : at + chunk]
            padded = np.pad(some, (0, chunk - len(some)))[None]
            logits = self._logits("prefill", slice(row, row + 1), padded, np.array([first + at]))
            found.append(logits[0, : len(some)])
        return np.concatenate(found)

    def decode(self, tokens: Array, start: Array) -> Array:
        """Write a token of every row [B] to slot start[b]; return its logits [B, V]."""
        return self._logits("decode", slice(None), tokens[:, None], start)[:, 0]

    def _logits(self, phase: Phase, rows: slice, tokens: Array, start: Array) -> Array:
        config, ranks = self._golden.config, range(self._sizes.tensor_parallel)
        inputs: list[Arrays] = [{"tokens": tokens.astype(np.int64)} for _ in ranks]
        if len(ranks) > 1:
            for rank in ranks:
                inputs[rank]["first"] = np.array([rank * config.vocab_size // len(ranks)])
        h = [found["h"] for found in self._run(phase, "embedding", inputs)]
        for layer in range(config.num_layers):
            caches = [self.caches[rank][layer] for rank in ranks]
            inputs = [
                {
                    "h": h[rank],
                    "start": start.astype(np.int64),
                    **{name: cache[rows] for name, cache in caches[rank].items()},
                }
                for rank in ranks
            ]
            found = self._run(phase, "layer", inputs, layer)
            for cache, outputs in zip(caches, found, strict=True):
                for name, array in cache.items():
                    array[rows] = outputs[name.replace("cache", "out")]
            h = [outputs["h_out"] for outputs in found]
        parts = self._run(phase, "head_all", [{"h": h[rank]} for rank in ranks])
        return np.concatenate([outputs["logits"] for outputs in parts], axis=-1)

    def _run(
        self, phase: Phase, kind: GraphKind, inputs: list[Arrays], layer: int = 0
    ) -> list[Arrays]:
        golden = self._golden
        graph = Lowered(
            config=golden.config, kind=kind, phase=phase, sizes=self._sizes, dtype=self._dtype
        )
        return run(
            graph,
            [
                {**own, **_weights_of(graph, golden.name, rank, layer)}
                for rank, own in enumerate(inputs)
            ],
        )


@functools.cache
def _weights_of(graph: Lowered, name: str, rank: int, layer: int) -> Arrays:
    return weights(graph, stored(name), rank, layer)
