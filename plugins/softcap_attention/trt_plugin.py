"""The decode attention as two TensorRT plugin nodes: shapes, parts and launches."""

from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Call, Launch, PluginNode, Shape

__all__ = ["COMBINE", "NODES", "PART_STEP", "SPLIT", "attention_parts", "part_slots"]

# Slots of a part are a multiple of the fewest that tensor cores take.
PART_STEP = 16
# A part of fewer slots costs more in sums written and read again than it saves.
LEAST_SLOTS = 64
# Four for each of the 132 multiprocessors of an H100: rows are of different lengths, and the
# parts beyond a row's length have nothing to do.
PROGRAMS = 528
# The combining kernel holds all parts of a column in registers.
MOST_PARTS = 256
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def attention_parts(slots: int, rows: int, kv_heads: int) -> int:
    """Return P: into how many parts a cache of `slots` slots is cut.

    Args:
        slots: T.
        rows: B.
        kv_heads: Hkv of this rank.
    """
    wanted = min(_ceil(PROGRAMS, rows * kv_heads), _ceil(slots, LEAST_SLOTS), MOST_PARTS)
    return _ceil(slots, part_slots(slots, wanted))


def part_slots(slots: int, parts: int) -> int:
    """Return how many slots each of `parts` parts has; together they have at least `slots`."""
    return _ceil(_ceil(slots, parts), PART_STEP) * PART_STEP


def _split_shapes(call: Call) -> tuple[Shape, ...]:
    batch, heads, _, size = call.shapes["k_cache"]
    lead = (batch, heads, int(call.attributes["parts"]), _group(call))
    return (*lead, size), (*lead, 2)


def _split_launch(call: Call) -> Launch:
    """Launch a program for each key/value head, row and part.

    A program has two tiles of 16 KiB on their way at a time, keys and values, in loads of 16
    bytes; each multiprocessor of an H100 needs 15 KiB or so for its share of the bandwidth, and
    five programs fit on one. Little is computed: 16 rows suit the smallest tensor core
    instruction, and 4 warps share the columns. That is reasoning: no GPU has run it yet.
    """
    batch, heads, slots, size = call.shapes["k_cache"]
    parts = int(call.attributes["parts"])
    width = max(16, _power_of_two(size))
    tile = 16 * 1024 // (width * ITEMSIZE[call.dtype])
    return Launch(
        grid=(heads, batch, parts),
        scalars={"slots": slots, "part_slots": part_slots(slots, parts)},
        constants={
            "GROUP": _group(call),
            "SIZE": size,
            "ROWS": max(16, _power_of_two(_group(call))),
            "WIDTH": width,
            "BLOCK": max(16, min(64, tile)),
            "SCALE": call.attributes["scale"],
            "CAP": call.attributes["cap"],
            "OPERAND": call.dtype,
        },
        num_warps=4,
        num_stages=2,
    )


def _combine_shapes(call: Call) -> tuple[Shape, ...]:
    batch, heads, _, group, size = call.shapes["sums"]
    return ((batch, 1, heads * group * size),)


def _combine_launch(call: Call) -> Launch:
    """Launch a program for each query head and 32 columns of it.

    It is bound by latency, so all that a program reads is on its way at once, up to 64 registers a
    thread. One key/value head of the released model has 0.4 MB of sums, in the second-level cache.
    That is reasoning: no GPU has run it yet.
    """
    batch, heads, parts, group, size = call.shapes["sums"]
    columns = 32
    return Launch(
        grid=(batch * heads, group, _ceil(size, columns)),
        scalars={"parts": parts},
        constants={
            "GROUP": group,
            "SIZE": size,
            "PARTS": _power_of_two(parts),
            "COLUMNS": columns,
        },
        num_warps=4,
        num_stages=1,
    )


def _group(call: Call) -> int:
    _, heads, _, size = call.shapes["k_cache"]
    return call.shapes["query"][2] // (heads * size)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


SPLIT = PluginNode(
    op="softcap_attention",
    op_type="GrokAttentionSplit",
    kernel="attention_split",
    inputs=(
        Operand(name="query", shape="B 1 Hq*D"),
        Operand(name="k_cache", shape="B Hkv T D"),
        Operand(name="v_cache", shape="B Hkv T D"),
        Operand(name="start", shape="B", dtype="int64"),
    ),
    outputs=(
        Operand(name="sums", shape="B Hkv P G D", dtype="float32"),
        Operand(name="stats", shape="B Hkv P G 2", dtype="float32"),
    ),
    attributes={"parts": int, "scale": float, "cap": float},
    output_shapes=_split_shapes,
    launch=_split_launch,
)
COMBINE = PluginNode(
    op="softcap_attention",
    op_type="GrokAttentionCombine",
    kernel="attention_combine",
    inputs=(
        Operand(name="sums", shape="B Hkv P G D", dtype="float32"),
        Operand(name="stats", shape="B Hkv P G 2", dtype="float32"),
    ),
    outputs=(Operand(name="y", shape="B 1 Hq*D"),),
    attributes={"to": int},
    output_shapes=_combine_shapes,
    launch=_combine_launch,
)
NODES = (SPLIT, COMBINE)
