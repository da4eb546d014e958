"""The calls of all plugin nodes in the graphs of Grok-1, at full size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from export_grok.config import GROK_1, Dtype
from export_grok.plugins.plugin_node import Call, StoredScale
from export_grok.plugins.ptx.compiler import kernel_hash
from export_grok.plugins.ptx.source import TARGETS
from export_grok.plugins.registry import part, plugin_nodes

__all__ = ["SLOTS", "TENSOR_PARALLEL", "Case", "distinct", "matrices"]

TENSOR_PARALLEL = (1, 8)
BATCHES = (1, 8)
SLOTS = GROK_1.sequence_len
ONNX_NUMBERS = {"float32": 1, "float16": 10, "bfloat16": 16}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """An int8 matrix of one rank.

    Attributes:
        rows: K.
        columns: N.
        groups: R.
        scales: their dtype.
        experts: E; None if there is one matrix only.
    """

    rows: int
    columns: int
    groups: int = 1
    scales: StoredScale = "bfloat16"
    experts: int | None = None

    def shapes(self, name: str, scales: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of both tensors by the names they have in a node."""
        lead = () if self.experts is None else (self.experts,)
        return {
            name: (*lead, self.rows, self.columns),
            scales: (*lead, self.groups, self.columns),
        }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one plugin node.

    Attributes:
        op_type: of the node.
        graph: where it is called, e.g. "TP 8, B 1".
        matrix: it is called for; None if the node is called once in a layer.
        call: what it is called with.
    """

    op_type: str
    graph: str
    matrix: str | None = None
    call: Call


def matrices(tensor_parallel: int) -> dict[str, Matrix]:
    """Return the int8 matrices of a rank by name."""
    rank = GROK_1.for_rank(tensor_parallel)
    model, groups = GROK_1.emb_size, rank.row_parallel_scale_groups
    experts = GROK_1.num_experts
    return {
        "query": Matrix(rows=model, columns=rank.q_size),
        "key/value": Matrix(rows=model, columns=rank.kv_size),
        "out": Matrix(rows=rank.q_size, columns=model, groups=groups),
        "gate/up": Matrix(rows=model, columns=rank.ffn_size, experts=experts),
        "down": Matrix(rows=rank.ffn_size, columns=model, groups=groups, experts=experts),
        "head": Matrix(rows=model, columns=rank.vocab_size, scales="float32"),
    }


def cases(dtype: Dtype) -> Iterator[Case]:
    """Return the calls of all plugin nodes in a graph of `dtype`."""
    for ranks in TENSOR_PARALLEL:
        for name, matrix in matrices(ranks).items():
            to = "float32" if name == "down" else dtype  # as the lowering of prefill has it
            yield Case(
                op_type="GrokInt8Matrix",
                graph=f"TP {ranks}, prefill",
                matrix=name,
                call=Call(
                    shapes=matrix.shapes("weight", "scales"),
                    attributes={"expert": 0, "to": ONNX_NUMBERS[to]},
                    dtype=to,
                    scales=matrix.scales,
                ),
            )
        for batch in BATCHES:
            for op_type, matrix_name, call in _decode(dtype, ranks, batch):
                graph = f"TP {ranks}, B {batch}"
                yield Case(op_type=op_type, graph=graph, matrix=matrix_name, call=call)


def _decode(dtype: Dtype, ranks: int, batch: int) -> Iterator[tuple[str, str | None, Call]]:
    rank, found = GROK_1.for_rank(ranks), matrices(ranks)
    for name, matrix in found.items():
        if matrix.experts is None:
            parts = part("int8_linear", "trt_plugin").product_parts(
                matrix.rows, matrix.columns, batch
            )
            shapes = {"x": (batch, matrix.rows), **matrix.shapes("weight", "scales")}
            yield (
                "GrokInt8Product",
                name,
                Call(
                    shapes=shapes,
                    attributes={"parts": parts},
                    dtype=dtype,
                    scales=matrix.scales,
                ),
            )

    gate, down = found["gate/up"], found["down"]
    chosen = (batch, GROK_1.num_selected_experts)
    shapes = {
        "x": (batch, gate.rows),
        "experts": chosen,
        **gate.shapes("gate_weight", "gate_scales"),
        **gate.shapes("up_weight", "up_scales"),
    }
    yield "GrokMoeGateUp", None, Call(shapes=shapes, dtype=dtype)
    shapes = {
        "hidden": (*chosen, down.rows),
        "gates": chosen,
        "experts": chosen,
        **down.shapes("down_weight", "down_scales"),
    }
    parts = part("moe_experts", "trt_plugin").down_parts(
        down.rows, down.columns, chosen[0] * chosen[1]
    )
    yield "GrokMoeDown", None, Call(shapes=shapes, attributes={"parts": parts}, dtype=dtype)

    heads, size = rank.num_kv_heads, GROK_1.key_size
    parts = part("softcap_attention", "trt_plugin").attention_parts(SLOTS, batch, heads)
    cache = (batch, heads, SLOTS, size)
    yield (
        "GrokAttentionSplit",
        None,
        Call(
            shapes={
                "query": (batch, 1, rank.q_size),
                "k_cache": cache,
                "v_cache": cache,
                "start": (batch,),
            },
            attributes={
                "parts": parts,
                "scale": GROK_1.attn_output_multiplier,
                "cap": GROK_1.attn_logit_cap,
            },
            dtype=dtype,
        ),
    )
    sums = (batch, heads, parts, rank.num_q_heads // heads, size)
    yield (
        "GrokAttentionCombine",
        None,
        Call(
            shapes={"sums": sums, "stats": (*sums[:-1], 2)},
            attributes={"to": ONNX_NUMBERS[dtype]},
            dtype=dtype,
        ),
    )


def distinct(dtypes: Sequence[Dtype]) -> dict[str, list[Case]]:
    """Return the calls by the kernel they share, named by a hash.

    Raises:
        ClickException: a plugin node is not called.
    """
    nodes = plugin_nodes()
    found: dict[str, list[Case]] = {}
    for dtype in dtypes:
        for case in cases(dtype):
            key = kernel_hash(nodes[case.op_type], case.call, next(iter(TARGETS)))
            group = found.setdefault(key, [])
            group += [case] if case not in group else []
    called = {case.op_type for group in found.values() for case in group}
    if called != set(nodes):
        raise click.ClickException(f"no call is known of {', '.join(set(nodes) - called)}")
    return found
