"""The inputs and outputs of every graph: the one table that stages, engines and users rely on.

T is the graph's dtype (float32, float16 or bfloat16); letters are the legend of `export.model`.

| graph     | name    | in/out | shape          | dtype   | meaning                               |
|-----------|---------|--------|----------------|---------|---------------------------------------|
| embedding | tokens  | in     | [B, S]         | int64   | new tokens                            |
|           | first   | in     | [1]            | int64   | ranks only: token id of the first row |
|           | h       | out    | [B, S, M]      | T       | residual stream                       |
| layer     | h       | in     | [B, S, M]      | T       | residual stream                       |
|           | start   | in     | [B]            | int64   | tokens of the row already in the cache|
|           | k_cache | in     | [B, Hkv, T, D] | T       | keys; slot p holds position p         |
|           | v_cache | in     | [B, Hkv, T, D] | T       | values                                |
|           | h_out   | out    | [B, S, M]      | T       | residual stream after the layer       |
|           | k_out   | out    | [B, Hkv, T, D] | T       | **aliases k_cache**: bind one memory  |
|           | v_out   | out    | [B, Hkv, T, D] | T       | **aliases v_cache**: bind one memory  |
| head      | h       | in     | [B, S, M]      | T       | residual stream                       |
|          | last   | in    | [B]           | int64  | which of the S tokens to give logits for |
|           | logits  | out    | [B, V]         | float32 | logits of that token                  |
| head_all  | h       | in     | [B, S, M]      | T       | residual stream                       |
|           | logits  | out    | [B, S, V]      | float32 | logits of every token                 |

B, S and the cache's T are dynamic, and start + S <= T in every row. One of several ranks has its
share of the heads Hkv, and of the vocabulary V in the logits. In a template the weights are
further inputs, named as in `export.parameters` less the prefix `layers.N.` or `embedding.`; in a
stamped graph they are initialisers that point into the weight files. The weights of an int8 head
are those of `head_parameters` and lie in a file of their own, beside the graphs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import BuildError

# NOTE: no onnx_ir at the top; sessions that run plans need none.
if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "CACHE_OF",
    "GRAPH_KINDS",
    "GraphKind",
    "Port",
    "check_contract",
    "ports",
    "weight_prefix",
]

GraphKind = Literal["embedding", "layer", "head", "head_all"]
GRAPH_KINDS: tuple[GraphKind, ...] = get_args(GraphKind)

# The input whose memory an output of a layer is.
CACHE_OF = {"k_out": "k_cache", "v_out": "v_cache"}


@dataclass(frozen=True, kw_only=True)
class Port:
    """One row of the table.

    Attributes:
        shape: numbers of the config, and the letters B, S and T for what is dynamic.
        aliases: for an output, the input that shares its memory.
    """

    name: str
    direction: Literal["in", "out"]
    shape: tuple[int | str, ...]
    dtype: str
    aliases: str | None = None


def ports(
    kind: GraphKind, config: GrokConfig, dtype: Dtype, tensor_parallel: int = 1
) -> tuple[Port, ...]:
    """Return the rows of one graph kind, with the config's numbers for the fixed axes."""
    rank = config.for_rank(tensor_parallel)
    hidden = ("B", "S", config.emb_size)
    cache = ("B", rank.num_kv_heads, "T", config.key_size)

    def input_(name: str, shape: tuple[int | str, ...], kind: str = dtype) -> Port:
        return Port(name=name, direction="in", shape=shape, dtype=kind)

    def output(
        name: str, shape: tuple[int | str, ...], kind: str = dtype, aliases: str | None = None
    ) -> Port:
        return Port(name=name, direction="out", shape=shape, dtype=kind, aliases=aliases)

    table: dict[GraphKind, tuple[Port, ...]] = {
        "embedding": (
            input_("tokens", ("B", "S"), "int64"),
            *((input_("first", (1,), "int64"),) if tensor_parallel > 1 else ()),
            output("h", hidden),
        ),
        "layer": (
            input_("h", hidden),
            input_("start", ("B",), "int64"),
            input_("k_cache", cache),
            input_("v_cache", cache),
            output("h_out", hidden),
            *(output(name, cache, aliases=aliased) for name, aliased in CACHE_OF.items()),
        ),
        "head": (
            input_("h", hidden),
            input_("last", ("B",), "int64"),
            output("logits", ("B", rank.vocab_size), "float32"),
        ),
        "head_all": (
            input_("h", hidden),
            output("logits", ("B", "S", rank.vocab_size), "float32"),
        ),
    }
    return table[kind]


def weight_prefix(kind: GraphKind, layer: int | None = None) -> str:
    """Return what a weight's name in the index has before its name in a graph of this kind."""
    return {"embedding": "embedding.", "layer": f"layers.{layer}."}.get(kind, "")


def check_contract(
    model: "ir.Model",
    kind: GraphKind,
    config: GrokConfig,
    dtype: Dtype,
    *,
    weights: bool,
    tensor_parallel: int = 1,
) -> None:
    """Hold a graph to the table.

    Args:
        model: the graph; its first inputs are those of the table, in order.
        kind: which rows.
        config: gives the fixed axes.
        dtype: of the graph.
        weights: whether weights may follow as further inputs (a template).
        tensor_parallel: ranks that share the graph.

    Raises:
        BuildError: a name, shape, dtype or order differs; all differences are named.
    """
    rows = ports(kind, config, dtype, tensor_parallel)
    faults = []
    for direction, values in (("in", model.graph.inputs), ("out", model.graph.outputs)):
        wanted = [row for row in rows if row.direction == direction]
        found = (
            list(values) if not (weights and direction == "in") else list(values)[: len(wanted)]
        )
        if [value.name for value in found] != [row.name for row in wanted]:
            faults.append(
                f"{direction}puts are {[value.name for value in found]}, "
                f"must be {[row.name for row in wanted]}"
            )
            continue
        for row, value in zip(wanted, found, strict=True):
            shape = tuple(
                axis if isinstance(axis, int) else axis.value for axis in value.shape or ()
            )
            # A traced output may name a dynamic axis by a formula, but not fix it to a number.
            same = len(shape) == len(row.shape) and all(
                not isinstance(have, int) if isinstance(want, str) else have == want
                for want, have in zip(row.shape, shape, strict=True)
            )
            kind_found = str(value.dtype).lower().replace("bfloat16", "bf16")
            kind_wanted = row.dtype.replace("bfloat16", "bf16")
            names = {"float": "float32"}
            if not same:
                faults.append(f"{row.name} has shape {shape}, must be {row.shape}")
            if names.get(kind_found, kind_found) != kind_wanted:
                faults.append(f"{row.name} is {kind_found}, must be {row.dtype}")
    if faults:
        raise BuildError(f"graph {kind!r} breaks its contract: " + "; ".join(faults))
