"""The plugin nodes in float64, each with how far a kernel's result may be from that.

A sum of n float32 products is off by a rounding, ULP, of each partial sum. Roundings of either
sign add up as their number's root: a sum is held to

    (4 + 2 sqrt(n)) ULP * (sum of |x| |w|)

which is relative to what is added, not to what comes out: a sum may cancel. What a kernel rounds
to T on the way is u of that value, u = 2^-24, 2^-11 or 2^-8 for float32, float16 and bfloat16.
What is written down here is the nodes' definition, taken from no kernel.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.plugins.plugin_node import Call

__all__ = ["Doubles", "Within", "reference", "sampled"]

Array = NDArray[Any]
Doubles = NDArray[np.float64]
Columns = NDArray[np.int64] | slice

ULP = 2.0**-24
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Half the distance of the numbers next to 0: float16 is coarse there.
TINY = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
LEAST = 2.0**-126  # below it float32 has fewer digits
# Relative error of exp(x) for |x| up to 60: the GPU's instruction takes x / log(2) in float32.
EXP = 2.0**-17
# Of a tanh that is made of such an exp, absolute.
TANH = 2.0**-22
# Activations in float32 go to tensor cores as several numbers of bfloat16; hidden values of half
# precision as two of them.
TWO_TERMS = 2.0**-17


@dataclass(frozen=True, kw_only=True)
class Within:
    """A result, and how far from it a kernel's may be. Where the bound is 0: the same number."""

    value: Doubles
    bound: Doubles

    def errors(self, found: Array) -> Doubles:
        """Return each error as a part of its bound; infinite where there is no number."""
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.abs(found.astype(np.float64) - self.value) / self.bound
        same = found == self.value  # -inf, and what is exact
        parts: Doubles = np.nan_to_num(np.where(same, 0.0, error), nan=np.inf)
        return parts

    def excess(self, found: Array) -> float:
        """Return the largest error as a part of its bound."""
        return float(self.errors(found).max(initial=0.0))


def reference(
    op_type: str, call: Call, inputs: Mapping[str, Array], columns: Columns = slice(None)
) -> list[Within]:
    """Return the outputs of a call, where they are matrices at some columns only."""
    return _FORMULAS[op_type](call, inputs, columns)


def sampled(op_type: str) -> bool:
    """Return whether `reference` takes columns."""
    return not op_type.startswith("GrokAttention")


def _summed(terms: int) -> float:
    return float(4 + 2 * np.sqrt(terms)) * ULP


def _matrix(weight: Array, scales: Array, columns: Columns) -> Doubles:
    """Return columns of int8 [K, N] times scales [R, N]; row k has those of group k // (K / R)."""
    some, factors = (array[:, columns].astype(np.float64) for array in (weight, scales))
    matrix: Doubles = some * np.repeat(factors, len(weight) // len(scales), 0)
    return matrix


def _products(x: Array, matrix: Doubles, parts: int = 1) -> Within:
    """Return x [n, K] @ matrix [K, N] as sums over parts of K: [P, n, N]."""
    height = len(matrix) // parts
    rows = x.astype(np.float64).reshape(len(x), parts, height).transpose(1, 0, 2)
    cut = matrix.reshape(parts, height, -1)
    # Three terms of each activation at the most.
    bound = _summed(3 * height) * (np.abs(rows) @ np.abs(cut)) + LEAST
    return Within(value=rows @ cut, bound=bound)


def _int8_product(call: Call, inputs: Mapping[str, Array], columns: Columns) -> list[Within]:
    matrix = _matrix(inputs["weight"], inputs["scales"], columns)
    return [_products(inputs["x"], matrix, int(call.attributes["parts"]))]


def _int8_matrix(call: Call, inputs: Mapping[str, Array], columns: Columns) -> list[Within]:
    weight, scales = (
        array[int(call.attributes["expert"])] if array.ndim == 3 else array
        for array in (inputs["weight"], inputs["scales"])
    )
    value = _matrix(weight, scales, columns)
    # The product is float32 first.
    relative = UNIT[call.dtype] * (1 + 2 * ULP) + (call.dtype != "float32") * ULP
    return [Within(value=value, bound=relative * np.abs(value) + TINY[call.dtype])]


def _gelu(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def _gate_up(call: Call, inputs: Mapping[str, Array], columns: Columns) -> list[Within]:
    """An error of the gate's product grows by the slope of gelu, below 1.13."""
    experts, unit = inputs["experts"], UNIT[call.dtype]
    value: Doubles | None = None
    bound: Doubles | None = None
    for expert in np.unique(experts):
        token, choice = np.nonzero(experts == expert)
        made = []
        for name in ("gate", "up"):
            matrix = _matrix(
                inputs[f"{name}_weight"][expert], inputs[f"{name}_scales"][expert], columns
            )
            found = _products(inputs["x"][token], matrix)
            exact, off = found.value[0], found.bound[0]
            made.append((exact, off + unit * (np.abs(exact) + off) + TINY[call.dtype]))
        (gate, gate_off), (up, up_off) = made
        if value is None or bound is None:
            value, bound = (np.zeros((*experts.shape, gate.shape[1])) for _ in range(2))
        bent = _gelu(gate)
        own = 8 * ULP * (np.abs(bent * up)) + TANH * np.abs(gate * up)
        value[token, choice] = bent * up
        off = 1.13 * gate_off * (np.abs(up) + up_off) + np.abs(bent) * up_off
        bound[token, choice] = off + own + LEAST
    assert value is not None and bound is not None
    return [Within(value=value, bound=bound)]


def _down(call: Call, inputs: Mapping[str, Array], columns: Columns) -> list[Within]:
    experts, parts = inputs["experts"], int(call.attributes["parts"])
    value: Doubles | None = None
    bound: Doubles | None = None
    for expert in np.unique(experts):
        token, choice = np.nonzero(experts == expert)
        matrix = _matrix(inputs["down_weight"][expert], inputs["down_scales"][expert], columns)
        hidden = inputs["hidden"][token, choice]
        found = _products(hidden, matrix, parts)
        if value is None or bound is None:
            value, bound = (np.zeros((parts, *experts.shape, matrix.shape[1])) for _ in range(2))
        gate = np.abs(inputs["gates"][token, choice].astype(np.float64))[:, None]
        off = found.bound + 2 * ULP * np.abs(found.value)
        if call.dtype != "float32":
            off += TWO_TERMS * _products(np.abs(hidden), np.abs(matrix), parts).value
        value[:, token, choice] = gate * found.value
        bound[:, token, choice] = gate * off + LEAST
    assert value is not None and bound is not None
    return [Within(value=value, bound=bound)]


def _attention_split(call: Call, inputs: Mapping[str, Array], _columns: Columns) -> list[Within]:
    batch, heads, slots, size = call.shapes["k_cache"]
    parts = int(call.attributes["parts"])
    scale, cap = call.attributes["scale"], call.attributes["cap"]
    length = 16 * math.ceil(math.ceil(slots / parts) / 16)  # of a part
    query = inputs["query"].astype(np.float64).reshape(batch, heads, -1, size)
    group = query.shape[2]
    sums, sums_off = (np.zeros((batch, heads, parts, group, size)) for _ in range(2))
    stats, stats_off = (np.zeros((batch, heads, parts, group, 2)) for _ in range(2))
    stats[..., 0] = -np.inf
    for row, head, part in np.ndindex(batch, heads, parts):
        end = min((part + 1) * length, int(inputs["start"][row]) + 1)
        place, visible = (row, head, part), slice(part * length, end)
        if visible.stop <= visible.start:
            continue
        keys, values = (
            inputs[name][row, head, visible].astype(np.float64) for name in ("k_cache", "v_cache")
        )
        logits = cap * np.tanh(scale / cap * (query[row, head] @ keys.T))
        added = np.abs(query[row, head]) @ np.abs(keys).T
        off = (_summed(size) * abs(scale) * added + cap * TANH).max(1, keepdims=True)
        largest = logits.max(1, keepdims=True)
        weights = np.exp(logits - largest)
        sizes = weights @ np.abs(values)
        relative = 2 * off + EXP + _summed(end)
        rounding = UNIT[call.dtype] * sizes + TINY[call.dtype] * np.abs(values).sum(0)
        sums[place], sums_off[place] = weights @ values, relative * sizes + rounding + LEAST
        stats[place] = np.concatenate([largest, weights.sum(1, keepdims=True)], 1)
        stats_off[place] = np.concatenate([off, relative * weights.sum(1, keepdims=True)], 1)
    return [Within(value=sums, bound=sums_off), Within(value=stats, bound=stats_off)]


def _attention_combine(call: Call, inputs: Mapping[str, Array], _columns: Columns) -> list[Within]:
    sums, stats = (inputs[name].astype(np.float64) for name in ("sums", "stats"))
    batch, _, parts, *_ = sums.shape
    factors = np.exp(stats[..., :1] - stats[..., :1].max(2, keepdims=True))
    total = (stats[..., 1:] * factors).sum(2)
    y, sizes = ((found * factors).sum(2) / total for found in (sums, np.abs(sums)))
    bound = 2 * (EXP + _summed(parts)) * sizes + UNIT[call.dtype] * np.abs(y) + TINY[call.dtype]
    shape = (batch, 1, -1)
    return [Within(value=y.reshape(shape), bound=(bound + LEAST).reshape(shape))]


_FORMULAS: dict[str, Callable[[Call, Mapping[str, Array], Columns], list[Within]]] = {
    "GrokInt8Product": _int8_product,
    "GrokInt8Matrix": _int8_matrix,
    "GrokMoeGateUp": _gate_up,
    "GrokMoeDown": _down,
    "GrokAttentionSplit": _attention_split,
    "GrokAttentionCombine": _attention_combine,
}
