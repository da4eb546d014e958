"""moe_experts as two TensorRT plugin nodes: gate and up of the chosen experts, then down.

Programs are sized as in `int8_linear.trt_plugin`. A program of gate and up reads both matrices one
after the other.
"""

from export_grok.plugins.int8_linear.trt_plugin import (
    LEAST_ROWS,
    PROGRAMS,
    TERMS,
    WIDE,
    Multiplication,
    dividing_parts,
    multiplication,
)
from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Call, Launch, PluginNode, Shape

__all__ = ["DOWN", "FEW_PAIRS", "GATE_UP", "NODES", "down_parts"]

# Up to here a program takes one pair of a token and an expert: hardly any two share the expert.
FEW_PAIRS = 4
# Hidden values are float32 in every graph. In half precision two numbers of bfloat16 stand for
# each, which leave out at most 2^-17 of it. TF32, JAX's default on GPUs, leaves out 2^-11.
HIDDEN_TERMS = {"float32": 3, "float16": 2, "bfloat16": 2}


def down_parts(rows: int, columns: int, pairs: int) -> int:
    """Return P: into how many parts the rows of a matrix are cut for GrokMoeDown.

    What parts write, and their sum reads, stays below an eighth of four matrices.

    Args:
        rows: F.
        columns: M.
        pairs: choices of all tokens, n * C.
    """
    wanted = -(-PROGRAMS // (-(-columns // WIDE) * _experts_read(pairs)))
    return dividing_parts(rows, wanted=wanted, least=max(LEAST_ROWS, 16 * pairs))


def _experts_read(pairs: int) -> int:
    """Return about how many experts, and at least how many programs, share columns and part."""
    return min(pairs, FEW_PAIRS)


def _multiplication(call: Call, matrix: str, *, parts: int, terms: int) -> Multiplication:
    pairs = _pairs(call)
    _, rows, columns = call.shapes[f"{matrix}_weight"]
    return multiplication(
        tokens=1 if pairs <= FEW_PAIRS else pairs,
        rows=rows,
        columns=columns,
        groups=call.shapes[f"{matrix}_scales"][1],
        parts=parts,
        beside=_experts_read(pairs),
        terms=terms,
    )


def _launch(call: Call, matrix: str, how: Multiplication, *, parts: int, **scalars: int) -> Launch:
    experts, rows, columns = call.shapes[f"{matrix}_weight"]
    pairs = _pairs(call)
    by_pair = pairs <= FEW_PAIRS
    blocks, blocks_of_columns = how.blocks(pairs, columns)
    return Launch(
        grid=(pairs if by_pair else experts * blocks, blocks_of_columns, parts),
        scalars={
            "pairs": pairs,
            **scalars,
            "rows": rows,
            "columns": columns,
            "groups": call.shapes[f"{matrix}_scales"][1],
        },
        constants={"BY_PAIR": by_pair, **how.constants},
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )


def _pairs(call: Call) -> int:
    n, choices = call.shapes["experts"]
    return n * choices


def _gate_up_shapes(call: Call) -> tuple[Shape, ...]:
    return ((*call.shapes["experts"], call.shapes["gate_weight"][2]),)


def _gate_up_launch(call: Call) -> Launch:
    how = _multiplication(call, "gate", parts=1, terms=TERMS[call.dtype])
    return _launch(call, "gate", how, parts=1, choices=call.shapes["experts"][1])


def _down_shapes(call: Call) -> tuple[Shape, ...]:
    parts, columns = int(call.attributes["parts"]), call.shapes["down_weight"][2]
    return ((parts, *call.shapes["experts"], columns),)


def _down_launch(call: Call) -> Launch:
    parts = int(call.attributes["parts"])
    how = _multiplication(call, "down", parts=parts, terms=HIDDEN_TERMS[call.dtype])
    return _launch(call, "down", how, parts=parts)


GATE_UP = PluginNode(
    op="moe_experts",
    op_type="GrokMoeGateUp",
    kernel="moe_gate_up",
    inputs=(
        Operand(name="x", shape="n M"),
        Operand(name="experts", shape="n C", dtype="int64"),
        Operand(name="gate_weight", shape="E M F", dtype="int8"),
        Operand(name="gate_scales", shape="E R F", dtype="scale"),
        Operand(name="up_weight", shape="E M F", dtype="int8"),
        Operand(name="up_scales", shape="E R F", dtype="scale"),
    ),
    outputs=(Operand(name="hidden", shape="n C F", dtype="float32"),),
    output_shapes=_gate_up_shapes,
    launch=_gate_up_launch,
)
DOWN = PluginNode(
    op="moe_experts",
    op_type="GrokMoeDown",
    kernel="moe_down",
    inputs=(
        Operand(name="hidden", shape="n C F", dtype="float32"),
        Operand(name="gates", shape="n C"),
        Operand(name="experts", shape="n C", dtype="int64"),
        Operand(name="down_weight", shape="E F M", dtype="int8"),
        Operand(name="down_scales", shape="E R M", dtype="scale"),
    ),
    outputs=(Operand(name="partial", shape="P n C M", dtype="float32"),),
    attributes={"parts": int},
    output_shapes=_down_shapes,
    launch=_down_launch,
)
NODES = (GATE_UP, DOWN)
