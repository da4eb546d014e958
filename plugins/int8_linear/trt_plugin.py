"""int8_linear as two TensorRT plugin nodes: the product of few rows, and the matrix itself.

Sizes of programs follow from the memory of an H100. Each of its 132 multiprocessors takes 25 bytes
a nanosecond and waits some 700 ns for each: 18 KiB have to be on their way, and 32 KiB leave room
for what waits elsewhere. A load is of 16 bytes, and neighbouring threads read 64 or 128 bytes of a
row. That is reasoning: no GPU has run it yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from export_grok.errors import BuildError
from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Call, Launch, PluginNode, Shape

__all__ = [
    "FEW_TOKENS",
    "LEAST_ROWS",
    "MATRIX",
    "NODES",
    "PRODUCT",
    "PROGRAMS",
    "TERMS",
    "WIDE",
    "Multiplication",
    "dividing_parts",
    "multiplication",
    "product_parts",
]

# Up to here, sums in float32 cost no more instructions than tensor cores.
FEW_TOKENS = 2
# The fewest rows that tensor cores multiply. Converting the matrix is most of the work, and
# programs for the next 16 tokens find it in the second-level cache.
TENSOR_CORE_TOKENS = 16
# Four of 8 KiB for each multiprocessor.
PROGRAMS = 528
WIDE, NARROW = 128, 64
# A part of fewer rows costs more to begin and to end than it saves.
LEAST_ROWS = 256
MATRIX_ROWS = 128
TERMS = {"float32": 3, "float16": 1, "bfloat16": 1}


@dataclass(frozen=True, kw_only=True)
class Multiplication:
    """How a kernel multiplies: what `int8_linear.triton_kernel.rows_times_matrix` is told.

    Attributes:
        constants: its constexpr arguments.
        num_warps: as in `Launch`.
        num_stages: likewise.
    """

    constants: Mapping[str, int | bool]
    num_warps: int
    num_stages: int

    def blocks(self, tokens: int, columns: int) -> tuple[int, int]:
        """Return how many blocks of tokens and of columns there are."""
        return _ceil(tokens, self.constants["TOKENS"]), _ceil(columns, self.constants["WIDTH"])


def multiplication(
    *, tokens: int, rows: int, columns: int, groups: int, parts: int, beside: int, terms: int
) -> Multiplication:
    """Return how some tokens are multiplied with a matrix.

    Args:
        tokens: that are multiplied together, as far as they go.
        rows: K.
        columns: N.
        groups: R.
        parts: of K, P.
        beside: programs that have the same columns and part, for other tokens or experts.
        terms: numbers of bfloat16 for an activation on tensor cores, or 1: it is half precision.

    Raises:
        BuildError: parts or groups do not divide the rows.
    """
    height = _share(rows, parts, "parts")
    lengths = (rows, height, _share(rows, groups, "groups of scales"))
    aligned = all(length % 16 == 0 for length in lengths)
    if tokens > FEW_TOKENS:
        return _on_tensor_cores(columns, terms, aligned=aligned)
    many = _ceil(columns, WIDE) * parts * beside >= PROGRAMS
    return _in_float32(tokens, height, columns, many=many, aligned=aligned)


def _on_tensor_cores(columns: int, terms: int, *, aligned: bool) -> Multiplication:
    """Have four of five tiles of 4 KiB on their way.

    Larger tiles take more registers than there are. With fewer columns, several warps would
    convert the same numbers.
    """
    constants = {
        "TOKENS": TENSOR_CORE_TOKENS,
        "WIDTH": WIDE,
        "DEPTH": 32,
        "AHEAD": 1,
        "TERMS": terms,
        "PACKED": 4 if columns % 4 == 0 else 1,
        "ALIGNED": aligned,
    }
    return Multiplication(constants=constants, num_warps=4, num_stages=5)


def _in_float32(
    tokens: int, height: int, columns: int, *, many: bool, aligned: bool
) -> Multiplication:
    """Have 8 KiB of each of many programs on their way, or 32 KiB of each of few."""
    width, warps, ahead = (WIDE, 4, 4) if many else (NARROW, 8, 8)
    depth = warps * 32 * 16 // width
    if columns % 16:
        ahead = 1  # a load of its own for every byte: more would take too many registers
    while ahead > 1 and ahead * depth > height:
        ahead //= 2
    constants = {
        "TOKENS": tokens,
        "WIDTH": width,
        "DEPTH": depth,
        "AHEAD": ahead,
        "TERMS": 0,
        "PACKED": 1,
        "ALIGNED": aligned,
    }
    return Multiplication(constants=constants, num_warps=warps, num_stages=1)


def product_parts(rows: int, columns: int, n: int) -> int:
    """Return P: into how many parts the rows of a matrix are cut for GrokInt8Product.

    What parts write, and their sum reads, stays below an eighth of the matrix.

    Args:
        rows: K.
        columns: N.
        n: tokens.
    """
    blocks = 1 if n <= FEW_TOKENS else _ceil(n, TENSOR_CORE_TOKENS)
    programs = _ceil(columns, WIDE) * blocks
    return dividing_parts(rows, wanted=_ceil(PROGRAMS, programs), least=max(LEAST_ROWS, 64 * n))


def dividing_parts(rows: int, *, wanted: int, least: int = LEAST_ROWS) -> int:
    """Return P, a divisor of `rows`: `wanted` or more, as far as parts keep `least` rows.

    Rows divisible by 16 are cut into parts that are, too.
    """
    unit = 16 if rows % 16 == 0 else 1
    most = max(1, min(rows // least, rows // unit))
    found = [parts for parts in range(1, most + 1) if rows // unit % parts == 0]
    return next((parts for parts in found if parts >= wanted), found[-1])


def _share(rows: int, count: int, name: str) -> int:
    if count < 1 or rows % count:
        raise BuildError(f"{count} {name}: the number must divide the {rows} rows of the matrix")
    return rows // count


def _product_shapes(call: Call) -> tuple[Shape, ...]:
    (n, _), (_, columns) = call.shapes["x"], call.shapes["weight"]
    return ((int(call.attributes["parts"]), n, columns),)


def _product_launch(call: Call) -> Launch:
    (n, rows), columns = call.shapes["x"], call.shapes["weight"][1]
    groups, parts = call.shapes["scales"][0], int(call.attributes["parts"])
    how = multiplication(
        tokens=n,
        rows=rows,
        columns=columns,
        groups=groups,
        parts=parts,
        beside=1 if n <= FEW_TOKENS else _ceil(n, TENSOR_CORE_TOKENS),
        terms=TERMS[call.dtype],
    )
    return Launch(
        grid=(*how.blocks(n, columns), parts),
        scalars={"tokens": n, "rows": rows, "columns": columns, "groups": groups},
        constants=how.constants,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )


def _matrix_shapes(call: Call) -> tuple[Shape, ...]:
    return (call.shapes["weight"][-2:],)


def _matrix_launch(call: Call) -> Launch:
    """Launch a program for 128 columns of 128 rows; a thread has 32 numbers at a time."""
    *experts, rows, columns = call.shapes["weight"]
    expert, most = int(call.attributes["expert"]), (experts or [1])[0]
    if not 0 <= expert < most:
        raise BuildError(f"expert is {expert}; there are {most}, the first is 0")
    groups = call.shapes["scales"][-2]
    _share(rows, groups, "groups of scales")
    depth = 16 if columns % 16 else 32
    return Launch(
        grid=(_ceil(columns, WIDE), _ceil(rows, MATRIX_ROWS), 1),
        scalars={
            "expert": expert,
            "rows": rows,
            "columns": columns,
            "groups": groups,
        },
        constants={"WIDTH": WIDE, "DEPTH": depth, "TILES": MATRIX_ROWS // depth},
    )


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


PRODUCT = PluginNode(
    op="int8_linear",
    op_type="GrokInt8Product",
    kernel="int8_product",
    inputs=(
        Operand(name="x", shape="n K"),
        Operand(name="weight", shape="K N", dtype="int8"),
        Operand(name="scales", shape="R N", dtype="scale"),
    ),
    outputs=(Operand(name="partial", shape="P n N", dtype="float32"),),
    attributes={"parts": int},
    output_shapes=_product_shapes,
    launch=_product_launch,
)
MATRIX = PluginNode(
    op="int8_linear",
    op_type="GrokInt8Matrix",
    kernel="int8_matrix",
    inputs=(
        Operand(name="weight", shape="... K N", dtype="int8"),
        Operand(name="scales", shape="... R N", dtype="scale"),
    ),
    outputs=(Operand(name="matrix", shape="K N"),),
    attributes={"expert": int, "to": int},
    output_shapes=_matrix_shapes,
    launch=_matrix_launch,
)
NODES = (PRODUCT, MATRIX)
