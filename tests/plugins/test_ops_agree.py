"""One op, three ways: PyTorch reference, ONNX function body and ONNX Runtime lowering agree.

Each is also held to the op's formula, written here in float64 and plain numpy.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from torch import Tensor

from export_grok.config import Dtype
from export_grok.engines.lowering import LoweringReport, lower_ops
from export_grok.errors import BuildError
from export_grok.export.graphs import write_graph
from export_grok.export.load import tensor_from_array
from export_grok.plugins.onnx_schema import attach_functions
from export_grok.plugins.op import DOMAIN, VERSION
from export_grok.plugins.registry import part, spec
from export_grok.weights import NUMPY_DTYPES
from tests.conftest import TemplateOf

Array = NDArray[Any]
Doubles = NDArray[np.float64]

IR_DTYPES = {
    np.dtype(np.float32): ir.DataType.FLOAT,
    np.dtype(np.float16): ir.DataType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): ir.DataType.BFLOAT16,
    np.dtype(np.int8): ir.DataType.INT8,
    np.dtype(np.int64): ir.DataType.INT64,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An op with its arguments.

    Attributes:
        inputs: by the names of the spec. int8 matrices and their scales are stored weights.
    """

    op: str
    inputs: dict[str, Array]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **inputs: Array) -> "Call":
        return dataclasses.replace(self, inputs={**self.inputs, **inputs})

    def in_dtype(self, dtype: Dtype) -> "Call":
        """Return the call with activations of another dtype."""
        names = [operand.name for operand in spec(self.op).inputs if operand.dtype == "T"]
        return self.but(**{name: self.inputs[name].astype(NUMPY_DTYPES[dtype]) for name in names})


def by_reference(call: Call) -> list[Tensor]:
    part(call.op, "reference")
    tensors = [tensor_from_array(array) for array in call.inputs.values()]
    outputs = getattr(getattr(torch.ops, DOMAIN), call.op)(*tensors, *call.attributes.values())
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def as_float32(tensors: list[Tensor]) -> list[Array]:
    return [tensor.float().numpy() for tensor in tensors]


def graph_of(call: Call, folder: Path) -> ir.Model:
    """Return a graph of the one node, with a function body beside it; weights lie in a file.

    Activations that ONNX Runtime cannot take from numpy go in and out as float32.
    """
    found = spec(call.op)
    tape = Tape()
    stored = bytearray(b"\x07" * 13)  # nothing is aligned in released files
    inputs, weights, operands = [], [], []
    for operand in found.inputs:
        array = call.inputs[operand.name]
        kind = ir.TensorType(IR_DTYPES[array.dtype])
        value = ir.Value(name=operand.name, shape=ir.Shape(array.shape), type=kind)
        if operand.dtype in ("int8", "scale"):
            value.const_value = ir.ExternalTensor(
                "weights.bin",
                len(stored),
                array.nbytes,
                kind.dtype,
                shape=ir.Shape(array.shape),
                name=operand.name,
                base_dir=folder,
            )
            stored += array.tobytes()
            weights.append(value)
        else:
            inputs.append(value)
            if array.dtype.kind not in "iu" and array.dtype != np.float32:
                value.type = ir.TensorType(ir.DataType.FLOAT)
                value = tape.op("Cast", [value], {"to": kind.dtype})
                value.type, value.shape = kind, ir.Shape(array.shape)
        operands.append(value)
    (folder / "weights.bin").write_bytes(stored)

    outputs = tape.op_multi_out(
        found.op_type, operands, call.attributes, num_outputs=len(found.outputs), domain=DOMAIN
    )
    results = []
    for operand, value, tensor in zip(found.outputs, outputs, by_reference(call), strict=True):
        result = value
        if tensor.dtype != torch.float32:
            result = tape.op("Cast", [value], {"to": ir.DataType.FLOAT})
        result.name = operand.name
        result.type = ir.TensorType(ir.DataType.FLOAT)
        result.shape = ir.Shape(tensor.shape)
        results.append(result)
    graph = ir.Graph(
        inputs,
        results,
        nodes=tape.nodes,
        initializers=weights,
        opset_imports={"": 24, DOMAIN: VERSION},
        name=call.op,
    )
    model = ir.Model(graph, ir_version=11)
    attach_functions(model)
    return model


def run(model: ir.Model, call: Call, folder: Path, threads: int = 1) -> list[Array]:
    """Run the graph as the product does: an output that aliases an input has its memory."""
    path = folder / "graph.onnx"
    write_graph(model, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    memory = {}
    binding = session.io_binding()
    for entry in session.get_inputs():
        array = call.inputs[entry.name]
        plain = array if array.dtype.kind in "iu" else array.astype(np.float32)
        memory[entry.name] = ort.OrtValue.ortvalue_from_numpy(np.array(plain))
        binding.bind_ortvalue_input(entry.name, memory[entry.name])
    aliases = spec(call.op).aliases
    for entry in session.get_outputs():
        source = aliases.get(entry.name)
        if source in memory:
            binding.bind_ortvalue_output(entry.name, memory[source])
        else:
            binding.bind_output(entry.name)
    session.run_with_iobinding(binding)
    return [np.array(value.numpy()) for value in binding.get_outputs()]


def by_function(call: Call, folder: Path) -> list[Array]:
    return run(graph_of(call, folder), call, folder)


def lowered(call: Call, folder: Path) -> tuple[ir.Model, LoweringReport]:
    model = graph_of(call, folder)
    return model, lower_ops(model, "ort")


def by_lowering(call: Call, folder: Path) -> list[Array]:
    model, report = lowered(call, folder)
    assert report.lowered == {spec(call.op).op_type: 1}, report.reasons
    assert not model.functions
    assert all(node.domain != DOMAIN for node in model.graph.all_nodes())
    return run(model, call, folder)


def as_declared(array: Array, dtype: Dtype = "bfloat16") -> Array:
    """Return the numbers in the dtype that a scale or an activation has."""
    return array.astype(NUMPY_DTYPES[dtype])


def assert_within(actual: Array, expected: Doubles, bound: Doubles) -> None:
    assert actual.shape == expected.shape
    excess = np.abs(actual.astype(np.float64) - expected) / bound
    assert not np.isnan(excess).any()
    assert excess.max() <= 1, f"{excess.max()} times the bound"


# ---- int8_linear

# One float32 rounding, and the many of a sum.
ULP = 2.0**-24
# What three seven-bit terms leave out of an activation, as a part of its group's largest.
LEFT_OUT = 5e-7


def matrix_of(call: Call, prefix: str = "") -> Doubles:
    """Return the matrix or matrices in float64."""
    weight, scales = call.inputs[f"{prefix}weight"], call.inputs[f"{prefix}scales"]
    rows, groups = weight.shape[-2], scales.shape[-2]
    group_of_row = np.arange(rows) // (rows // groups)
    matrix: Doubles = weight.astype(np.float64) * scales.astype(np.float64)[..., group_of_row, :]
    return matrix


def stored_matrix(
    random: np.random.Generator, *lead: int, rows: int, columns: int, groups: int
) -> tuple[Array, Array]:
    """Return an int8 matrix that has every code, and scales of both signs."""
    weight = random.integers(-128, 128, (*lead, rows, columns), dtype=np.int8)
    weight[..., ::3, 0] = -128
    weight[..., 1::3, 0] = 127
    scales = random.normal(size=(*lead, groups, columns)) / 128
    return weight, as_declared(scales)


def linear_call(
    rows: int, columns: int, groups: int, *lead: int, outlier: float = 1.0, seed: int = 0
) -> Call:
    random = np.random.default_rng(seed)
    x = random.normal(size=(*lead, rows)).astype(np.float32)
    x[..., rows // 2] *= outlier
    weight, scales = stored_matrix(random, rows=rows, columns=columns, groups=groups)
    return Call(op="int8_linear", inputs={"x": x, "weight": weight, "scales": scales})


LINEAR = [
    pytest.param(linear_call(rows, columns, groups, *lead, outlier=outlier), id=name)
    for rows, columns, groups, lead, outlier, name in (
        (37, 29, 1, (1, 1), 1.0, "one-token"),
        (37, 29, 1, (1, 9), 1.0, "nine-tokens"),
        (37, 29, 1, (3, 27), 1.0, "three-rows-of-27"),
        (37, 1, 1, (2, 1), 1.0, "one-column"),
        (1, 29, 1, (1, 9), 1.0, "one-row"),
        (8, 29, 8, (1, 9), 1.0, "groups-of-one"),
        (104, 51, 8, (1, 1), 1.0, "eight-groups-one-token"),
        (104, 51, 8, (1, 9), 1.0, "eight-groups"),
        (104, 51, 8, (1, 81), 1.0, "eight-groups-81-tokens"),
        (104, 51, 1, (1, 9), 1e3, "outlier"),
        (104, 51, 8, (1, 9), 1e3, "eight-groups-outlier"),
    )
]


def linear_bounds(call: Call) -> tuple[Doubles, Doubles, Doubles]:
    """Return the product in float64, how far a float32 sum may be, and what is left out."""
    x, matrix = call.inputs["x"].astype(np.float64), matrix_of(call)
    groups = call.inputs["scales"].shape[0]
    grouped = np.abs(x).reshape(*x.shape[:-1], groups, -1)
    largest = np.repeat(grouped.max(-1), grouped.shape[-1], axis=-1)
    summed = len(matrix) * ULP * (np.abs(x) @ np.abs(matrix)) + 1e-30
    return x @ matrix, summed, LEFT_OUT * (largest @ np.abs(matrix))


@pytest.mark.parametrize("call", LINEAR)
def test_int8_linear_agrees_with_the_formula_three_ways(call: Call, tmp_path: Path) -> None:
    expected, summed, left_out = linear_bounds(call)
    assert_within(as_float32(by_reference(call))[0], expected, summed)
    assert_within(by_function(call, tmp_path)[0], expected, summed)
    assert_within(by_lowering(call, tmp_path)[0], expected, summed + left_out)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("height", [1, 2, 15, 17, 33, 64, 129])
def test_int8_linear_is_right_and_not_zero_whatever_k_and_n_are(
    height: int, groups: int, tmp_path: Path
) -> None:
    """K and N are no multiples of what a kernel takes at once, or just are."""
    for columns in (1, 16, 35):
        call = linear_call(height * groups, columns, groups, 1, 3, seed=columns)
        expected, summed, left_out = linear_bounds(call)
        assert_within(by_function(call, tmp_path)[0], expected, summed)
        y = by_lowering(call, tmp_path)[0]
        assert_within(y, expected, summed + left_out)
        assert y[expected != 0].all()


@pytest.mark.parametrize("groups", [1, 8])
def test_a_scale_times_1000_changes_its_own_column_alone(groups: int, tmp_path: Path) -> None:
    call = linear_call(104, 51, groups, 1, 9)
    scales = call.inputs["scales"].copy()
    scales[:, 7] *= 1000
    larger = call.but(scales=scales)
    expected, summed, left_out = linear_bounds(larger)
    before, after = three_ways(call, tmp_path), three_ways(larger, tmp_path)
    others = np.arange(51) != 7
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[..., others], old[..., others])
        assert_within(new, expected, summed + left_out)


def test_int8_linear_lowering_pays_for_an_outlier_only_in_its_group(tmp_path: Path) -> None:
    errors = []
    for groups, outlier in ((1, 1.0), (8, 1e3), (1, 1e3)):
        call = linear_call(104, 51, groups, 1, 81, outlier=outlier)
        expected = linear_bounds(call)[0]
        errors.append(np.abs(by_lowering(call, tmp_path)[0] - expected).max())
    assert errors[0] < errors[1] / 10 < errors[2] / 20
    assert errors[2] < 1e3 * 104 * LEFT_OUT


@pytest.mark.parametrize(
    "where",
    [
        pytest.param((1, 2), id="one-row"),
        pytest.param((..., slice(13, 26)), id="one-group"),
        pytest.param(..., id="all"),
    ],
)
def test_int8_linear_of_zeros_is_zero_and_no_nan(where: Any, tmp_path: Path) -> None:
    call = linear_call(104, 51, 8, 2, 3)
    x = call.inputs["x"].copy()
    x[where] = 0
    call = call.but(x=x)
    expected, summed, left_out = linear_bounds(call)
    *exact, y = three_ways(call, tmp_path)
    for other in exact:
        assert_within(other, expected, summed)
    assert (y[(x == 0).all(-1)] == 0).all()
    assert_within(y, expected, summed + left_out)


def test_int8_linear_rounds_the_matrix_to_the_dtype_of_x() -> None:
    weight = np.array([[127], [-128]], np.int8)
    scales = as_declared(np.array([[1.0078125]]))
    x = as_declared(np.array([[1.0, 0.0]]))
    call = Call(op="int8_linear", inputs={"x": x, "weight": weight, "scales": scales})
    assert by_reference(call)[0].item() == 128  # 127.99 in bfloat16
    assert by_reference(call.in_dtype("float32"))[0].item() == 127 * 1.0078125


# ---- moe_experts


def moe_call(
    choose: Callable[[np.random.Generator, int], Array],
    *lead: int,
    groups: int = 1,
    model: int = 27,
    width: int = 40,
    experts: int = 8,
    outlier: float = 1.0,
) -> Call:
    """Return a call; `choose` gives the experts [n, C] of n tokens."""
    random = np.random.default_rng(1)
    tokens = int(np.prod(lead))
    chosen = choose(random, tokens).astype(np.int64).reshape(*lead, -1)
    x = random.normal(size=(*lead, model)).astype(np.float32)
    x[..., 3] *= outlier
    inputs: dict[str, Array] = {
        "x": x,
        "gates": random.uniform(0.05, 0.9, chosen.shape).astype(np.float32),
        "experts": chosen,
    }
    for name, rows, columns, parts in (
        ("gate", model, width, 1),
        ("up", model, width, 1),
        ("down", width, model, groups),
    ):
        weight, scales = stored_matrix(random, experts, rows=rows, columns=columns, groups=parts)
        inputs |= {f"{name}_weight": weight, f"{name}_scales": scales}
    return Call(op="moe_experts", inputs=inputs)


def any_two(random: np.random.Generator, tokens: int) -> Array:
    return np.stack([random.permutation(8)[:2] for _ in range(tokens)])


def few_of_eight(random: np.random.Generator, tokens: int) -> Array:
    """Experts 0, 3 and 7 get no token: the first, one between and the last."""
    return np.stack([random.permutation([1, 2, 4, 5, 6])[:2] for _ in range(tokens)])


def one_for_all(random: np.random.Generator, tokens: int) -> Array:
    return np.full((tokens, 1), 5)


def the_same_two(random: np.random.Generator, tokens: int) -> Array:
    return np.tile([6, 2], (tokens, 1))


MOE = [
    pytest.param(moe_call(choose, *lead, groups=groups, outlier=outlier), id=name)
    for choose, lead, groups, outlier, name in (
        (any_two, (1, 1), 1, 1.0, "one-token"),
        (any_two, (1, 9), 8, 1.0, "eight-groups"),
        (any_two, (3, 27), 8, 1.0, "three-rows-of-27"),
        (few_of_eight, (1, 81), 1, 1.0, "experts-without-tokens"),
        (one_for_all, (2, 9), 8, 1.0, "all-tokens-on-one-expert"),
        (the_same_two, (3, 5), 1, 1.0, "all-tokens-on-the-same-two"),
        (any_two, (2, 9), 8, 1e3, "outlier"),
    )
]


def gelu_tanh(x: Doubles) -> Doubles:
    y: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def moe_formula(call: Call) -> Doubles:
    """Return the result in float64, token by token."""
    x = call.inputs["x"].astype(np.float64)
    gate, up, down = (matrix_of(call, f"{name}_") for name in ("gate", "up", "down"))
    y = np.zeros_like(x)
    for place in np.ndindex(*call.inputs["experts"].shape):
        token, expert = place[:-1], int(call.inputs["experts"][place])
        hidden = gelu_tanh(x[token] @ gate[expert]) * (x[token] @ up[expert])
        y[token] += float(call.inputs["gates"][place]) * (hidden @ down[expert])
    return y


def assert_moe(call: Call, results: tuple[Array, Array, Array]) -> None:
    """Hold reference, function body and lowering to the formula, relative to each token's largest.

    The limits are some four times the largest errors that were measured, outlier included.
    """
    expected = moe_formula(call)
    largest = np.abs(expected).max(-1, keepdims=True) * np.ones_like(expected) + 1e-30
    for y, limit in zip(results, (3e-6, 3e-6, 2e-5), strict=True):
        assert_within(y, expected, limit * largest)


def three_ways(call: Call, folder: Path) -> tuple[Array, Array, Array]:
    """Return the first output by reference, by function body and by lowering."""
    return (
        as_float32(by_reference(call))[0],
        by_function(call, folder)[0],
        by_lowering(call, folder)[0],
    )


@pytest.mark.parametrize("call", MOE)
def test_moe_experts_agrees_with_the_formula_three_ways(call: Call, tmp_path: Path) -> None:
    assert_moe(call, three_ways(call, tmp_path))


@pytest.mark.parametrize("gates", [(0.0, 0.7), (0.7, 0.0), (0.0, 0.0)])
def test_an_expert_with_a_gate_of_zero_counts_for_nothing(
    gates: tuple[float, float], tmp_path: Path
) -> None:
    call = moe_call(any_two, 2, 9, groups=8)
    call = call.but(gates=np.tile(np.array(gates, np.float32), (2, 9, 1)))
    assert_moe(call, three_ways(call, tmp_path))


def test_moe_experts_loses_no_choice_to_another_thread(tmp_path: Path) -> None:
    """Two threads that add to one token would, once in many runs: so nothing is added that way."""
    call = moe_call(any_two, 8, 256, model=192, width=8)
    model, _ = lowered(call, tmp_path)
    scattered = [node for node in model.graph.all_nodes() if node.op_type.startswith("Scatter")]
    assert scattered
    assert all("reduction" not in node.attributes for node in scattered)
    (alone,) = run(model, call, tmp_path, threads=1)
    for _ in range(5):
        (together,) = run(model, call, tmp_path, threads=4)
        np.testing.assert_array_equal(together, alone)


def test_moe_experts_takes_the_experts_of_each_row_of_a_batch(tmp_path: Path) -> None:
    call = moe_call(any_two, 3, 7)
    together = three_ways(call, tmp_path)
    for row in range(3):
        names = ("x", "gates", "experts")
        alone = call.but(**{name: call.inputs[name][row : row + 1] for name in names})
        one, two, three = (y[row : row + 1] for y in together)
        assert_moe(alone, (one, two, three))


def test_a_token_of_zeros_gives_zeros(tmp_path: Path) -> None:
    call = moe_call(any_two, 2, 3, groups=8)
    x = call.inputs["x"].copy()
    x[1, 1] = 0
    for y in three_ways(call.but(x=x), tmp_path):
        assert (y[1, 1] == 0).all()
        assert (y[0] != 0).all()


# ---- softcap_attention


def attention_call(
    start: list[int],
    tokens: int,
    slots: int,
    *,
    heads: int = 6,
    shared: int = 2,
    size: int = 16,
    loudness: float = 1.0,
) -> Call:
    """Return a call on a cache with `start` tokens in each row, and zeros beyond."""
    random = np.random.default_rng(2)
    batch = len(start)

    def normal(*shape: int) -> Array:
        return random.normal(size=shape).astype(np.float32)

    inputs: dict[str, Array] = {
        "query": np.float32(loudness) * normal(batch, tokens, heads * size),
        "key": normal(batch, tokens, shared * size),
        "value": normal(batch, tokens, shared * size),
        "k_cache": normal(batch, shared, slots, size),
        "v_cache": normal(batch, shared, slots, size),
        "start": np.array(start, np.int64),
    }
    for row, length in enumerate(start):
        for name in ("k_cache", "v_cache"):
            inputs[name][row, :, length:] = 0
    attributes = {"num_heads": heads, "kv_heads": shared, "scale": 0.3, "cap": 30.0}
    return Call(op="softcap_attention", inputs=inputs, attributes=attributes)


ATTENTION = [
    pytest.param(attention_call(start, tokens, slots, **settings), id=name)
    for start, tokens, slots, settings, name in (
        ([0], 1, 1, {}, "first-token"),
        ([0], 9, 9, {}, "prompt-fills-the-cache"),
        ([0, 0], 81, 101, {}, "long-prompts"),
        ([80], 1, 81, {}, "last-slot"),
        ([0, 4, 20], 1, 33, {}, "decode-from-mixed-starts"),
        ([0, 4, 20], 9, 33, {}, "chunk-from-mixed-starts"),
        ([7, 0], 81, 101, {}, "long-chunk-from-mixed-starts"),
        ([3, 11], 9, 33, {"loudness": 60.0}, "far-into-the-cap"),
        ([3, 11], 9, 33, {"heads": 5, "shared": 1}, "one-shared-head"),
        ([3, 11], 9, 33, {"heads": 3, "shared": 3}, "a-key-head-for-each"),
        ([3, 11], 9, 33, {"size": 8}, "head-of-8"),
        ([3, 11], 9, 33, {"size": 40}, "head-of-40"),
    )
]


def attention_formula(call: Call) -> tuple[Doubles, Array, Array]:
    """Return the output in float64, token by token and head by head, and the caches after it."""
    inputs, settings = call.inputs, call.attributes
    heads, shared = settings["num_heads"], settings["kv_heads"]
    batch, tokens, _ = inputs["query"].shape
    k_out, v_out = inputs["k_cache"].copy(), inputs["v_cache"].copy()
    query = inputs["query"].reshape(batch, tokens, heads, -1).astype(np.float64)
    y = np.zeros_like(query)
    for row, start in enumerate(inputs["start"]):
        end = start + tokens
        for cache, new in ((k_out, inputs["key"]), (v_out, inputs["value"])):
            cache[row, :, start:end] = new[row].reshape(tokens, shared, -1).swapaxes(0, 1)
        for token, head in np.ndindex(tokens, heads):
            seen = slice(0, start + token + 1)
            keys, values = (
                cache[row, head // (heads // shared), seen].astype(np.float64)
                for cache in (k_out, v_out)
            )
            logits = keys @ query[row, token, head] * settings["scale"]
            weights = np.exp(settings["cap"] * np.tanh(logits / settings["cap"]))
            y[row, token, head] = weights @ values / weights.sum()
    return y.reshape(batch, tokens, -1), k_out, v_out


def assert_attention(call: Call, outputs: list[Array]) -> None:
    y, k_out, v_out = attention_formula(call)
    np.testing.assert_allclose(outputs[0], y, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(outputs[1], k_out)
    np.testing.assert_array_equal(outputs[2], v_out)


@pytest.mark.parametrize("beyond", [0.0, 1e4, float("nan")])
@pytest.mark.parametrize("call", ATTENTION)
def test_softcap_attention_agrees_with_the_formula_three_ways(
    call: Call, beyond: float, tmp_path: Path
) -> None:
    """Whatever lies beyond a row's tokens; what lies there stays, bit for bit."""
    call = call.but(**{name: call.inputs[name].copy() for name in ("k_cache", "v_cache")})
    for row, start in enumerate(call.inputs["start"]):
        call.inputs["k_cache"][row, :, start:] = beyond
        call.inputs["v_cache"][row, :, start:] = beyond
    assert_attention(call, as_float32(by_reference(call)))
    assert_attention(call, by_function(call, tmp_path))
    assert_attention(call, by_lowering(call, tmp_path))


def test_the_loud_case_is_far_into_the_cap() -> None:
    """Without the cap the largest logits would be far apart, with it they are near each other."""
    call = next(case.values[0] for case in ATTENTION if case.id == "far-into-the-cap")
    assert isinstance(call, Call)
    uncapped = dataclasses.replace(call, attributes={**call.attributes, "cap": 1e9})
    assert np.abs(attention_formula(call)[0] - attention_formula(uncapped)[0]).max() > 0.3


def test_softcap_attention_gives_its_arguments_back_unchanged() -> None:
    call = attention_call([3, 11], 9, 33)
    before = {name: array.copy() for name, array in call.inputs.items()}
    by_reference(call)
    for name, array in before.items():
        np.testing.assert_array_equal(call.inputs[name], array)


def test_softcap_attention_in_place_writes_what_the_functional_form_returns() -> None:
    call = attention_call([3, 11], 9, 33)
    inputs = {name: tensor_from_array(array.copy()) for name, array in call.inputs.items()}
    in_place = part("softcap_attention", "reference").softcap_attention_
    y = in_place(*inputs.values(), *call.attributes.values())
    for mine, other in zip(
        (y, inputs["k_cache"], inputs["v_cache"]), by_reference(call), strict=True
    ):
        assert torch.equal(mine, other)


def test_a_head_size_that_the_kernel_lacks_is_left_to_the_function(tmp_path: Path) -> None:
    call = attention_call([3, 11], 9, 33, size=4)
    model, report = lowered(call, tmp_path)
    assert report.kept == {"GrokSoftcapAttention": 1}
    assert not report.lowered
    assert report.reasons == [
        "GrokSoftcapAttention: head_size is 4; the kernel takes a multiple of 8"
    ]
    with pytest.raises(BuildError, match="head_size is 4"):
        report.check()
    assert_attention(call, run(model, call, tmp_path))


# ---- all ops

CALLS = [
    pytest.param(linear_call(104, 51, 8, 2, 9), id="int8_linear"),
    pytest.param(moe_call(any_two, 2, 9, groups=8), id="moe_experts"),
    pytest.param(attention_call([0, 5], 9, 33), id="softcap_attention"),
]
NARROW: list[Dtype] = ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("call", CALLS)
def test_reference_and_function_round_alike_in_narrow_dtypes(
    call: Call, dtype: Dtype, tmp_path: Path
) -> None:
    call = call.in_dtype(dtype)
    outputs = by_reference(call)
    assert {tensor.dtype for tensor in outputs} == {getattr(torch, dtype)}
    wide = by_reference(call.in_dtype("float32"))
    step = 2**-10 if dtype == "float16" else 2**-7
    for mine, body, exact in zip(
        as_float32(outputs), by_function(call, tmp_path), as_float32(wide), strict=True
    ):
        size = np.abs(mine).max()
        # Another order of a sum rounds a few results the other way, by one step.
        assert np.abs(mine - body).max() <= step * size
        assert (mine != body).mean() < 0.02
        assert np.abs(mine - exact).max() <= 4 * step * size


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("call", CALLS)
def test_narrow_dtypes_are_not_lowered_and_run_all_the_same(
    call: Call, dtype: Dtype, tmp_path: Path
) -> None:
    call = call.in_dtype(dtype)
    model, report = lowered(call, tmp_path)
    assert not report.lowered
    assert len(report.reasons) == 1
    assert {"float16": " FLOAT16", "bfloat16": " BFLOAT16"}[dtype] in report.reasons[0]
    for after, before in zip(run(model, call, tmp_path), by_function(call, tmp_path), strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("call", CALLS)
def test_fake_outputs_are_shaped_as_real_ones(call: Call) -> None:
    part(call.op, "reference")
    operator = getattr(getattr(torch.ops, DOMAIN), call.op).default
    for dtype in ("float32", "bfloat16"):
        narrow = call.in_dtype("float32" if dtype == "float32" else "bfloat16")
        tensors = [tensor_from_array(array) for array in narrow.inputs.values()]
        torch.library.opcheck(
            operator,
            (*tensors, *call.attributes.values()),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_a_template_is_not_lowered_and_says_what_to_do(template_of: TemplateOf) -> None:
    model = template_of("tiny", "layer", "float32").clone()
    report = lower_ops(model, "ort")
    assert report.kept == {"GrokInt8Linear": 4, "GrokMoeExperts": 1}
    assert report.lowered == {"GrokSoftcapAttention": 1}  # it has no weights
    assert all("stamp the template first" in reason for reason in report.reasons)


def test_a_backend_without_lowerings_keeps_every_op(template_of: TemplateOf) -> None:
    model = template_of("tiny", "layer", "float32").clone()
    report = lower_ops(model, "abacus")
    assert report.kept == {"GrokInt8Linear": 4, "GrokMoeExperts": 1, "GrokSoftcapAttention": 1}
    assert set(report.reasons) == {
        f"{op}: there is no abacus lowering of it" for op in report.kept
    }
