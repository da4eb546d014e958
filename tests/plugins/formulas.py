"""The ops in float64, each with how far a float32 result may be from that.

A sum of n float32 products is off by a rounding, ULP, of each partial sum. Roundings of either
sign add up as their number's root: a sum is held to

    (4 + 2 sqrt(n)) ULP * (sum of |x| |w|)

which is relative to what is added and not to what comes out: a sum may cancel, and a term that is
left out may be small. The native kernels of `avx512_vnni` write more than STREAM_ROWS rows of
activations as three bytes each, relative to the largest of a block: a few ULP of that more.

Matrices are multiplied without BLAS, whose threads wait for processors that others have.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_ROWS",
    "STREAM_ROWS",
    "Array",
    "Call",
    "Doubles",
    "Within",
    "assert_right",
    "assert_same_bits",
    "formula",
    "y_shape",
]

Array = NDArray[Any]
Doubles = NDArray[np.float64]

ULP = 2.0**-24
LEAST = 2.0**-126  # below it float32 has fewer digits
STREAM_ROWS = 8  # kStreamRows and kBlockRows of plugins/native/kernels.h
BLOCK_ROWS = 256
BY_BYTES = "avx512_vnni"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An op with its arguments, by the names of its spec."""

    op: str
    inputs: dict[str, Array]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **inputs: Array) -> "Call":
        """Return the call with other arguments."""
        return dataclasses.replace(self, inputs={**self.inputs, **inputs})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Within:
    """A result in float64, and how far from it a result may be. A bound of 0 is: the same bits."""

    value: Array
    bound: Array

    def excess(self, found: Array) -> float:
        """Return the largest error as a part of its bound; infinite if it is no number."""
        assert found.shape == self.value.shape
        if not self.bound.any():
            return 0.0 if found.tobytes() == self.value.tobytes() else np.inf
        error = np.abs(found.astype(np.float64) - self.value) / self.bound
        return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))


def y_shape(call: Call) -> tuple[int, ...]:
    """Return the shape of the op's first output."""
    matrix = {"int8_linear": "weight", "moe_experts": "down_weight"}.get(call.op, "query")
    lead = next(iter(call.inputs.values())).shape[:-1]
    return (*lead, call.inputs[matrix].shape[-1])


def formula(call: Call, isa: str = "") -> list[Within]:
    """Return the op's outputs, as kernels of an instruction set may compute them."""
    inputs = call.inputs
    if call.op == "int8_linear":
        x, weight = inputs["x"], inputs["weight"]
        y = product(x.reshape(-1, len(weight)), weight, inputs["scales"], isa)
        shape = (*x.shape[:-1], weight.shape[1])
        return [Within(value=y.value.reshape(shape), bound=y.bound.reshape(shape))]
    if call.op == "moe_experts":
        return [moe_experts(inputs, isa)]
    return softcap_attention(inputs, **call.attributes)


def assert_right(call: Call, outputs: list[Array], isa: str) -> None:
    """Hold what kernels of an instruction set computed to the formula."""
    for expected, found in zip(formula(call, isa), outputs, strict=True):
        excess = expected.excess(found)
        assert excess <= 1, f"{call.op} by {isa}: {excess} times the bound"


def assert_same_bits(outputs: list[Array], others: list[Array]) -> None:
    """Hold two results to each other."""
    for one, other in zip(outputs, others, strict=True):
        assert one.tobytes() == other.tobytes()


def summed(terms: int) -> float:
    return float(4 + 2 * np.sqrt(terms)) * ULP


def matrix_of(weight: Array, scales: Array) -> Doubles:
    rows, columns = weight.shape
    grouped = weight.astype(np.float64).reshape(len(scales), -1, columns)
    matrix: Doubles = (grouped * scales.astype(np.float64)[:, None]).reshape(rows, columns)
    return matrix


def largest_of_block(x: Doubles, groups: int) -> Doubles:
    """Return for each activation the largest size of its block."""
    largest = np.abs(x)
    width = x.shape[-1] // groups
    for begin in range(0, x.shape[-1], width):
        for block in range(begin, begin + width, BLOCK_ROWS):
            place = slice(block, min(block + BLOCK_ROWS, begin + width))
            largest[:, place] = largest[:, place].max(-1, keepdims=True)
    return largest


def times(a: Doubles, b: Doubles) -> Doubles:
    """Return a @ b."""
    y: Doubles = np.einsum("tk,kn->tn", a, b)
    return y


def product(x: Array, weight: Array, scales: Array, isa: str) -> Within:
    """Return x [T, K] @ W [K, N]."""
    x, matrix = x.astype(np.float64), matrix_of(weight, scales)
    sizes = np.abs(matrix)
    bound = summed(len(weight)) * times(np.abs(x), sizes) + LEAST
    if isa == BY_BYTES and len(x) > STREAM_ROWS:
        bound += 4 * ULP * times(largest_of_block(x, len(scales)), sizes)
    return Within(value=times(x, matrix), bound=bound)


def gelu(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def moe_experts(inputs: dict[str, Array], isa: str) -> Within:
    """Return the sum of what each chosen expert makes of a token, times its gate.

    An error of the gate's product grows by the slope of gelu, below 1.13, and by the other factor;
    one of the hidden values by the sizes of the last matrix.
    """
    lead, width = inputs["x"].shape[:-1], inputs["x"].shape[-1]
    x = inputs["x"].reshape(-1, width)
    chosen = inputs["experts"].reshape(len(x), -1)
    gates = inputs["gates"].reshape(chosen.shape).astype(np.float64)
    columns = inputs["down_weight"].shape[-1]
    value, bound = np.zeros((len(x), columns)), np.full((len(x), columns), LEAST)
    for expert in np.unique(chosen):
        tokens, choices = np.nonzero(chosen == expert)
        matrices = {
            name: (inputs[f"{name}_weight"][expert], inputs[f"{name}_scales"][expert])
            for name in ("gate", "up", "down")
        }
        gate = product(x[tokens], *matrices["gate"], isa)
        up = product(x[tokens], *matrices["up"], isa)
        hidden = gelu(gate.value) * up.value
        off = np.abs(gelu(gate.value)) * up.bound + 4 * ULP * np.abs(hidden)
        off += np.abs(up.value) * (1.13 * gate.bound + 16 * ULP * np.abs(gate.value))
        down = product(hidden, *matrices["down"], isa)
        off = down.bound + times(off, np.abs(matrix_of(*matrices["down"])))
        factor = gates[tokens, choices][:, None]
        rounded = 2 * chosen.shape[1] * ULP * np.abs(down.value)
        np.add.at(value, tokens, factor * down.value)
        np.add.at(bound, tokens, np.abs(factor) * (off + rounded))
    return Within(value=value.reshape(*lead, -1), bound=bound.reshape(*lead, -1))


def softcap_attention(
    inputs: dict[str, Array], *, num_heads: int, kv_heads: int, scale: float, cap: float
) -> list[Within]:
    """Return the mean of values by exp(cap tanh(scale q.k / cap)), and the caches after.

    An error of a logit is one of its weight, relative. That of tanh is relative to the logit, and
    so is that of exp, whose argument is the distance from the largest logit.
    """
    batch, tokens, width = inputs["query"].shape
    size, group = width // num_heads, num_heads // kv_heads
    query = inputs["query"].reshape(batch, tokens, kv_heads, group, size).astype(np.float64)
    caches = {name: inputs[f"{name}_cache"].copy() for name in ("k", "v")}
    value, bound = np.zeros_like(query), np.zeros_like(query)
    for row, start in enumerate(inputs["start"]):
        end = start + tokens
        for name, new in (("k", "key"), ("v", "value")):
            heads = inputs[new][row].reshape(tokens, kv_heads, size).swapaxes(0, 1)
            caches[name][row, :, start:end] = heads
        for token, head in np.ndindex(tokens, kv_heads):
            seen = (row, head, slice(0, start + token + 1))
            keys, values = (caches[name][seen].astype(np.float64) for name in ("k", "v"))
            q = query[row, token, head]
            logits = cap * np.tanh(times(q, keys.T) * (scale / cap))
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            off = summed(size) * scale * times(np.abs(q), np.abs(keys).T)
            off += (8 + 8 * np.abs(logits) + 4 * np.abs(logits).max(-1, keepdims=True)) * ULP
            off += (weights * off).sum(-1, keepdims=True) + 2 * summed(len(keys))
            value[row, token, head] = times(weights, values)
            bound[row, token, head] = times(weights * off, np.abs(values)) + LEAST
    shape = (batch, tokens, width)
    exact = [Within(value=found, bound=np.zeros(1)) for found in caches.values()]
    return [Within(value=value.reshape(shape), bound=bound.reshape(shape)), *exact]
