"""The kernels of moe_experts, in Triton's interpreter, held to the formula in float64.

A product of K rows is held to the bound of a float32 sum whatever T is, see `test_triton_int8`,
and what is made of it to what those bounds become:

    gate, up    + u |v|, u = 2^-11 in float16, 2^-8 in bfloat16, 0 in float32: they are rounded
                to T, and 2^-25 where float16 is subnormal
    hidden      an error of the gate grows by the slope of gelu, below 1.13, and by up; its exp,
                quotient and products are off by 16 2^-24 |gate|; an error of up grows by gelu
    down        + 2^-17 (sum of |hidden| |w|) where two numbers of bfloat16 stand for hidden
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from export_grok.plugins.moe_experts import trt_plugin
from export_grok.plugins.moe_experts.trt_plugin import DOWN, GATE_UP, down_parts
from tests.plugins.formulas import LEAST, ULP, Call, Doubles, Within, formula, gelu, product
from tests.plugins.interpreted import call_of, interpreted
from tests.plugins.test_triton_int8 import numbers, parts_of

Inputs = dict[str, Tensor]

# exp overflows where gelu is 0
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DTYPES = ["float32", "float16", "bfloat16"]
EXPERTS = 8
UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TINY = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
GATE_UP_INPUTS = [operand.name for operand in GATE_UP.inputs]
DOWN_INPUTS = [operand.name for operand in DOWN.inputs]


@pytest.fixture(params=["by pair", "by expert"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs take pairs, then experts, however many pairs there are."""
    monkeypatch.setattr(trt_plugin, "FEW_PAIRS", 1000 if request.param == "by pair" else 0)


def inputs_of(
    chosen: list[list[int]],
    model: int = 48,
    width: int = 72,
    groups: int = 1,
    dtype: str = "float32",
) -> Inputs:
    """Return the inputs of both nodes for tokens that chose experts; `hidden` is any.

    The scales of an expert that nobody chose are no numbers.
    """
    random = torch.Generator().manual_seed(len(chosen) * model + width + groups)
    kind, experts = getattr(torch, dtype), torch.tensor(chosen)
    nobody = [expert for expert in range(EXPERTS) if expert not in experts]
    inputs = {
        "x": torch.randn(len(chosen), model, generator=random).to(kind),
        "experts": experts,
        "gates": torch.rand(experts.shape, generator=random).to(kind),
        "hidden": torch.randn(*experts.shape, width, generator=random),
    }
    sizes = {"gate": (model, width), "up": (model, width), "down": (width, model)}
    for name, (rows, columns) in sizes.items():
        shape = (EXPERTS, rows, columns)
        weight = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        scales = torch.rand(EXPERTS, groups, columns, generator=random) * 0.003 + 0.001
        scales[nobody] = float("nan")
        inputs |= {f"{name}_weight": weight, f"{name}_scales": scales.to(torch.bfloat16)}
    return inputs


def choices(n: int, count: int = 2, experts: int = EXPERTS) -> list[list[int]]:
    """Return for each token experts that differ, unevenly spread."""
    return [[(t * t + c) % experts for c in range(count)] for t in range(n)]


def gate_up(inputs: Inputs, dtype: str = "float32", **constants: Any) -> Tensor:
    """Return the hidden values that the kernel computes."""
    taken = {name: inputs[name] for name in GATE_UP_INPUTS}
    (hidden,) = interpreted(GATE_UP, taken, dtype=dtype, constants=constants)
    return hidden


def down(inputs: Inputs, parts: int = 1, dtype: str = "float32", **constants: Any) -> Tensor:
    """Return the sums that the kernel computes."""
    taken = {name: inputs[name] for name in DOWN_INPUTS}
    (partial,) = interpreted(DOWN, taken, dtype=dtype, constants=constants, parts=parts)
    return partial


def expected_hidden(
    inputs: Inputs, dtype: str = "float32", bend: Callable[[Doubles], Doubles] = gelu
) -> Within:
    """Return what GrokMoeGateUp has to be."""
    experts, x = inputs["experts"], numbers(inputs["x"])
    width = inputs["gate_weight"].shape[-1]
    value, bound = np.zeros((2, *experts.shape, width))
    for (token, choice), expert in np.ndenumerate(experts.numpy()):
        gate, up = (
            product(
                x[token : token + 1],
                numbers(inputs[f"{name}_weight"][expert]),
                numbers(inputs[f"{name}_scales"][expert]),
                isa="",
            )
            for name in ("gate", "up")
        )
        off = [
            one.bound + UNIT[dtype] * (np.abs(one.value) + one.bound) + TINY[dtype]
            for one in (gate, up)
        ]
        bent = bend(gate.value)
        error = 1.13 * off[0] + 16 * ULP * np.abs(gate.value)
        value[token, choice] = bent * up.value
        bound[token, choice] = (
            (np.abs(bent) + error) * off[1] + np.abs(up.value) * error + LEAST
        )[0]
    return Within(value=value, bound=bound)


def expected_down(inputs: Inputs, parts: int = 1, dtype: str = "float32") -> Within:
    """Return what GrokMoeDown has to be."""
    experts, gates = inputs["experts"], numbers(inputs["gates"]).astype(np.float64)
    shape = (parts, *experts.shape, inputs["down_weight"].shape[-1])
    value, bound = np.zeros((2, *shape))
    left_out = 0.0 if dtype == "float32" else 2.0**-17
    for (token, choice), expert in np.ndenumerate(experts.numpy()):
        matrix = {
            "x": inputs["hidden"][token, choice][None],
            "weight": inputs["down_weight"][expert],
            "scales": inputs["down_scales"][expert],
        }
        sizes = {
            "x": matrix["x"].abs(),
            "weight": matrix["weight"].short().abs(),
            "scales": matrix["scales"],
        }
        sums, gate = parts_of(matrix, parts), gates[token, choice]
        off = sums.bound + left_out * parts_of(sizes, parts).value + ULP * np.abs(sums.value)
        value[:, token, choice] = gate * sums.value[:, 0]
        bound[:, token, choice] = np.abs(gate) * off[:, 0] + LEAST
    return Within(value=value, bound=bound)


def assert_right(inputs: Inputs, parts: int = 1, dtype: str = "float32") -> None:
    """Hold both kernels to the formula."""
    assert expected_hidden(inputs, dtype).excess(numbers(gate_up(inputs, dtype))) <= 1
    assert expected_down(inputs, parts, dtype).excess(numbers(down(inputs, parts, dtype))) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_both_nodes_are_those_of_the_formula(n: int, dtype: str) -> None:
    groups = 8 if n < 3 else 1
    assert_right(inputs_of(choices(n), groups=groups, dtype=dtype), parts=2, dtype=dtype)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("expert", range(EXPERTS))
def test_each_expert_alone_is_right(expert: int) -> None:
    assert_right(inputs_of([[expert]]))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("chosen", [[[5, 5]], [[3, 3], [3, 6], [6, 3]], [[0, 7, 0]]])
def test_an_expert_may_be_chosen_twice(chosen: list[list[int]]) -> None:
    assert_right(inputs_of(chosen))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("parts", "groups"), [(1, 8), (2, 3), (4, 1), (4, 6), (8, 3), (8, 8)])
def test_each_part_has_its_rows_and_their_groups(parts: int, groups: int) -> None:
    assert_right(inputs_of(choices(1), groups=groups), parts)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("model", "width", "groups"), [(1, 1, 1), (7, 21, 7), (45, 33, 3), (130, 66, 2)]
)
def test_any_sizes_are_right(model: int, width: int, groups: int) -> None:
    assert_right(inputs_of(choices(3), model, width, groups), parts=3 if width % 3 == 0 else 1)


def test_more_tokens_than_tensor_cores_take_at_once_are_right() -> None:
    assert_right(inputs_of(choices(41, experts=3), model=16, width=16))


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
@pytest.mark.usefixtures("programs")
def test_any_call_is_right(data: st.DataObject) -> None:
    count, groups, parts = (data.draw(st.integers(1, 3)) for _ in range(3))
    expert = st.integers(0, EXPERTS - 1)
    chosen = st.lists(st.lists(expert, min_size=count, max_size=count), min_size=1, max_size=5)
    model, width = (groups * parts * data.draw(st.integers(1, 7)) for _ in range(2))
    dtype = data.draw(st.sampled_from(DTYPES))
    inputs = inputs_of(data.draw(chosen), model, width, groups, dtype)
    assert_right(inputs, parts, dtype)


@pytest.mark.parametrize("n", [2, 9])
def test_both_nodes_together_are_the_op(n: int) -> None:
    inputs = inputs_of(choices(n), groups=2)
    hidden = gate_up(inputs)
    y = down({**inputs, "hidden": hidden}, parts=4).sum((0, 2))
    arguments = {name: numbers(inputs[name]) for name in inputs if name != "hidden"}
    (expected,) = formula(Call(op="moe_experts", inputs=arguments))
    assert expected.excess(y.numpy()) <= 1
    assert np.abs(y.numpy() - expected.value).max() < 1e-5 * np.abs(expected.value).max()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounded", ["gate", "up"])
def test_gate_and_up_are_rounded_to_the_dtype_of_the_graph(rounded: str, dtype: str) -> None:
    inputs = inputs_of(choices(2), dtype=dtype)
    # 16 for the gate makes gelu(16) = 16, for the other 16 as well
    constant = {"gate": "up", "up": "gate"}[rounded]
    inputs["x"][:, 0] = 1
    for name in ("gate", "up"):
        inputs[f"{name}_weight"][:, 0] = 16 if name == constant else 127
        inputs[f"{name}_scales"][:] = 1
    inputs[f"{constant}_weight"][:, 1:] = 0
    inputs[f"{rounded}_weight"][:, 1:] = inputs[f"{rounded}_weight"][:, 1:].clamp(-3, 3)
    found = gate_up(inputs, dtype) / 16
    assert found.equal(found.to(getattr(torch, dtype)).float())
    exact = numbers(gate_up({**inputs, "x": inputs["x"].float()}, "float32")) / 16
    assert np.abs(exact).min() > 16 or rounded == "up"
    assert (numbers(found) != exact).any()


def test_gelu_keeps_its_digits_at_either_end() -> None:
    sizes = 10.0 ** np.arange(-6, 31, 3)
    gate = np.concatenate([sizes, -sizes, np.linspace(-12, 12, 97)]).astype(np.float32)
    inputs = inputs_of([[0]], model=1, width=len(gate))
    inputs["x"][:] = 1
    for name, scales in (("gate", torch.from_numpy(gate)), ("up", torch.ones(len(gate)))):
        inputs[f"{name}_weight"][:] = 1
        inputs[f"{name}_scales"] = scales.expand(EXPERTS, 1, -1).contiguous()
    found = numbers(gate_up(inputs))[0, 0]
    expected = gelu(gate.astype(np.float64))
    assert (np.abs(found - expected) <= 4 * ULP * np.abs(gate)).all()


def wrong_expert(inputs: Inputs) -> Inputs:
    return {**inputs, "experts": inputs["experts"].roll(1, 1)}


def wrong_group(inputs: Inputs) -> Inputs:
    names = ("gate_scales", "down_scales")
    return inputs | {name: inputs[name].roll(1, 1) for name in names}


def exchanged(inputs: Inputs) -> Inputs:
    names = {"gate_weight": "up_weight", "gate_scales": "up_scales"}
    both = names | {value: key for key, value in names.items()}
    return {
        **inputs,
        **{name: inputs[other] for name, other in both.items()},
        "gates": inputs["gates"].roll(1, 1),
    }


def renormalised(inputs: Inputs) -> Inputs:
    gates = inputs["gates"].float()
    return {**inputs, "gates": gates / gates.sum(1, keepdim=True), "x": -inputs["x"]}


def row_left_out(inputs: Inputs) -> Inputs:
    x, hidden = inputs["x"].clone(), inputs["hidden"].clone()
    x[:, -1], hidden[..., -1] = 0, 0
    return {**inputs, "x": x, "hidden": hidden}


@pytest.mark.usefixtures("programs")
def test_mistakes_are_noticed() -> None:
    inputs = inputs_of(choices(2), groups=3)
    hidden, partial = numbers(gate_up(inputs)), numbers(down(inputs, 4))
    for mistake in (wrong_expert, wrong_group, exchanged, renormalised, row_left_out):
        mistaken = mistake(inputs)
        assert expected_hidden(mistaken).excess(hidden) > 10, mistake
        assert expected_down(mistaken, 4).excess(partial) > 10, mistake


def test_the_other_gelu_is_noticed() -> None:
    def by_erf(x: Doubles) -> Doubles:
        bent: Doubles = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
        return bent

    inputs = inputs_of(choices(3))
    assert expected_hidden(inputs, bend=by_erf).excess(numbers(gate_up(inputs))) > 10


def test_an_expert_nobody_chose_is_not_read() -> None:
    inputs = inputs_of([[2, 5]] * 3)
    for name in ("gate", "up", "down"):
        for kind in ("weight", "scales"):
            # behind expert 5 there is no memory of this tensor
            inputs[f"{name}_{kind}"] = inputs[f"{name}_{kind}"][:6].clone()
    assert_right(inputs)


def test_many_pairs_have_programs_for_experts_and_few_have_their_own() -> None:
    grids = {}
    for n in (1, 2, 3, 16, 17):
        taken = {name: inputs_of(choices(n))[name] for name in GATE_UP_INPUTS}
        grids[n] = GATE_UP.launch(call_of(GATE_UP, taken, "bfloat16")).grid[0]
    assert grids == {1: 2, 2: 4, 3: EXPERTS, 16: 2 * EXPERTS, 17: 3 * EXPERTS}


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 128))
def test_parts_divide_the_rows_and_are_not_short(rows: int, columns: int, pairs: int) -> None:
    parts = down_parts(rows, columns, pairs)
    assert rows % parts == 0
    assert parts == 1 or rows // parts >= max(256, 16 * pairs)
