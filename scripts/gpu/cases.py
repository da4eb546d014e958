"""Calls of the plugin nodes: odd ones that reach every edge, and those of Grok-1's layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from export_grok.config import GROK_1, Dtype
from export_grok.engines.trt.record import Sizes
from export_grok.plugins.int8_linear.trt_plugin import product_parts
from export_grok.plugins.moe_experts.trt_plugin import down_parts
from export_grok.plugins.plugin_node import Call, PluginNode, Shape, StoredScale
from export_grok.plugins.registry import plugin_nodes
from export_grok.plugins.softcap_attention.trt_plugin import attention_parts

__all__ = [
    "BATCHES",
    "TENSOR_PARALLEL",
    "Case",
    "Matrix",
    "all_sizes",
    "decode_cases",
    "matrices",
    "odd_cases",
    "prefill_cases",
]

TENSOR_PARALLEL = (1, 8)
BATCHES = (1, 4, 8)


# Numbers of `onnx.TensorProto.DataType`: values of attribute `to`.
ONNX_NUMBERS: dict[Dtype, int] = {"float32": 1, "float16": 10, "bfloat16": 16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one plugin node.

    Attributes:
        op_type: of the node.
        use: what it is called for.
        call: with what.
    """

    op_type: str
    use: str
    call: Call

    @property
    def node(self) -> PluginNode:
        """The node."""
        return plugin_nodes()[self.op_type]

    @property
    def name(self) -> str:
        """Node, use and dtype."""
        return f"{self.op_type} {self.use}, {self.call.dtype}"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """An int8 matrix of K rows and N columns, with R groups of scales; or E of them."""

    rows: int
    columns: int
    groups: int = 1
    experts: int | None = None
    scales: StoredScale = "bfloat16"

    def shapes(self, weight: str = "weight", scales: str = "scales") -> dict[str, Shape]:
        """Return the shapes of both tensors by the names they have in a node."""
        lead = () if self.experts is None else (self.experts,)
        return {
            weight: (*lead, self.rows, self.columns),
            scales: (*lead, self.groups, self.columns),
        }


def product(use: str, dtype: Dtype, n: int, matrix: Matrix, parts: int) -> Case:
    """Return a product of n tokens."""
    shapes = {"x": (n, matrix.rows), **matrix.shapes()}
    call = Call(shapes=shapes, attributes={"parts": parts}, dtype=dtype, scales=matrix.scales)
    return Case(op_type="GrokInt8Product", use=use, call=call)


def dequantised(use: str, dtype: Dtype, matrix: Matrix) -> Case:
    """Return the making of a matrix, of the last expert if there are several."""
    attributes = {"expert": (matrix.experts or 1) - 1, "to": ONNX_NUMBERS[dtype]}
    call = Call(shapes=matrix.shapes(), attributes=attributes, dtype=dtype, scales=matrix.scales)
    return Case(op_type="GrokInt8Matrix", use=use, call=call)


def gate_up(use: str, dtype: Dtype, chosen: tuple[int, int], matrix: Matrix) -> Case:
    """Return gate and up of the chosen experts [n, C]."""
    shapes = {
        "x": (chosen[0], matrix.rows),
        "experts": chosen,
        **matrix.shapes("gate_weight", "gate_scales"),
        **matrix.shapes("up_weight", "up_scales"),
    }
    call = Call(shapes=shapes, dtype=dtype, scales=matrix.scales)
    return Case(op_type="GrokMoeGateUp", use=use, call=call)


def down(use: str, dtype: Dtype, chosen: tuple[int, int], matrix: Matrix, parts: int) -> Case:
    """Return down of the chosen experts [n, C]."""
    shapes = {
        "hidden": (*chosen, matrix.rows),
        "gates": chosen,
        "experts": chosen,
        **matrix.shapes("down_weight", "down_scales"),
    }
    call = Call(shapes=shapes, attributes={"parts": parts}, dtype=dtype, scales=matrix.scales)
    return Case(op_type="GrokMoeDown", use=use, call=call)


def split(
    use: str, dtype: Dtype, cache: tuple[int, int, int, int], group: int, parts: int, scale: float
) -> Case:
    """Return the attention of one token a row over caches [B, Hkv, T, D]."""
    batch, heads, _, size = cache
    shapes = {
        "query": (batch, 1, heads * group * size),
        "k_cache": cache,
        "v_cache": cache,
        "start": (batch,),
    }
    attributes = {"parts": parts, "scale": scale, "cap": GROK_1.attn_logit_cap}
    return Case(
        op_type="GrokAttentionSplit",
        use=use,
        call=Call(shapes=shapes, attributes=attributes, dtype=dtype),
    )


def combine(use: str, dtype: Dtype, sums: tuple[int, int, int, int, int]) -> Case:
    """Return the sum of parts [B, Hkv, P, G, D]."""
    shapes = {"sums": sums, "stats": (*sums[:-1], 2)}
    call = Call(shapes=shapes, attributes={"to": ONNX_NUMBERS[dtype]}, dtype=dtype)
    return Case(op_type="GrokAttentionCombine", use=use, call=call)


def odd_cases(dtype: Dtype) -> Iterator[Case]:
    """Yield small calls whose sizes are multiples of nothing, by each way of each kernel."""
    products: tuple[tuple[int, int, int, int, int, StoredScale], ...] = (
        (1, 1, 1, 1, 1, "float32"),
        (1, 300, 67, 1, 3, "bfloat16"),
        (2, 1544, 31, 8, 4, "float16"),
        (3, 65, 300, 5, 1, "bfloat16"),
        (8, 1544, 260, 8, 2, "bfloat16"),
        (19, 96, 130, 3, 1, "float32"),
        (64, 130, 33, 1, 2, "float16"),
    )
    for n, rows, columns, groups, parts, scales in products:
        matrix = Matrix(rows=rows, columns=columns, groups=groups, scales=scales)
        yield product(f"[{n},{rows}] x {columns}, R {groups}, P {parts}", dtype, n, matrix, parts)
    for rows, columns, groups, experts in ((65, 300, 5, None), (24, 130, 1, 3), (300, 31, 4, 8)):
        matrix = Matrix(rows=rows, columns=columns, groups=groups, experts=experts)
        yield dequantised(f"{experts or 1} x [{rows},{columns}], R {groups}", dtype, matrix)
    for n, choices, model, width, groups, experts in (
        (1, 1, 65, 31, 1, 1),
        (1, 2, 300, 132, 1, 8),
        (2, 2, 40, 67, 4, 4),
        (3, 2, 65, 300, 5, 8),
        (19, 2, 24, 130, 1, 4),
        (33, 1, 130, 40, 2, 3),
    ):
        use = f"[{n},{choices}] of {experts} x [{model},{width}], R {groups}"
        chosen = (n, choices)
        matrix = Matrix(rows=model, columns=width, groups=groups, experts=experts)
        yield gate_up(use, dtype, chosen, matrix)
        for parts in (1, 5) if model % 5 == 0 else (1,):
            yield down(f"{use}, P {parts}", dtype, chosen, matrix, parts)
    for cache, group, parts in (
        ((1, 1, 1, 16), 1, 1),
        ((3, 2, 133, 24), 5, 3),
        ((2, 1, 729, 128), 6, 7),
        ((8, 1, 81, 80), 6, 2),
        ((1, 2, 700, 64), 20, 16),
    ):
        use = f"cache {list(cache)}, G {group}, P {parts}"
        yield split(use, dtype, cache, group, parts, scale=0.3)
        batch, heads, _, size = cache
        yield combine(f"{use}, sums", dtype, (batch, heads, parts, group, size))


def matrices(ranks: int) -> dict[str, Matrix]:
    """Return the int8 matrices of one of so many ranks of Grok-1, by name."""
    rank, experts = GROK_1.for_rank(ranks), GROK_1.num_experts
    model, groups = GROK_1.emb_size, rank.row_parallel_scale_groups
    return {
        "query": Matrix(rows=model, columns=rank.q_size),
        "key, value": Matrix(rows=model, columns=rank.kv_size),
        "out": Matrix(rows=rank.q_size, columns=model, groups=groups),
        "head": Matrix(rows=model, columns=rank.vocab_size, scales="float32"),
        "gate, up": Matrix(rows=model, columns=rank.ffn_size, experts=experts),
        "down": Matrix(rows=rank.ffn_size, columns=model, groups=groups, experts=experts),
    }


def decode_cases(dtype: Dtype, ranks: int, batch: int, sizes: Sizes | None = None) -> list[Case]:
    """Return the calls of a decode step of Grok-1 on one of so many ranks, each once.

    Args:
        dtype: of the graphs.
        ranks: that share the model.
        batch: rows.
        sizes: give the slots of the cache; those that are built by default.
    """
    rank, found = GROK_1.for_rank(ranks), matrices(ranks)
    slots = (sizes or Sizes()).slots
    at = f"TP {ranks}, B {batch}"
    cases = [
        product(
            f"{name}, {at}",
            dtype,
            batch,
            matrix,
            product_parts(matrix.rows, matrix.columns, batch),
        )
        for name, matrix in found.items()
        if matrix.experts is None
    ]
    chosen = (batch, GROK_1.num_selected_experts)
    last = found["down"]
    parts = down_parts(last.rows, last.columns, chosen[0] * chosen[1])
    cases.append(gate_up(at, dtype, chosen, found["gate, up"]))
    cases.append(down(at, dtype, chosen, last, parts))
    heads, size = rank.num_kv_heads, GROK_1.key_size
    group, parts = rank.num_q_heads // heads, attention_parts(slots, batch, heads)
    scale = GROK_1.attn_output_multiplier
    cases.append(split(at, dtype, (batch, heads, slots, size), group, parts, scale))
    cases.append(combine(at, dtype, (batch, heads, parts, group, size)))
    return cases


def prefill_cases(dtype: Dtype, ranks: int) -> list[Case]:
    """Return the matrices that prefill of Grok-1 makes on one of so many ranks, each once."""
    # Of hidden values in float32, the last product is taken in float32.
    return [
        dequantised(f"{name}, TP {ranks}", "float32" if name == "down" else dtype, matrix)
        for name, matrix in matrices(ranks).items()
    ]


def all_sizes(dtype: Dtype) -> Iterator[Case]:
    """Yield all calls of graphs of a dtype: odd ones, then Grok-1's, on one rank and one of 8."""
    yield from odd_cases(dtype)
    for ranks in TENSOR_PARALLEL:
        yield from prefill_cases(dtype, ranks)
        for batch in BATCHES:
            yield from decode_cases(dtype, ranks, batch)
