"""The kernels of int8_linear, in Triton's interpreter, held to the formula in float64.

Products of T with int8 are exact in float32, where T has at most 16 bits, and sums are float32: so
whatever T is, a product of K rows is held to the bound of a float32 sum,

    (4 + 2 sqrt(K)) 2^-24 (sum of |x| |w|)        below 1e-5 of that sum up to K = 6800

A matrix is held to u |w| + 2^-24 |w|: it is a float32 product, rounded once to T, u being 2^-24,
2^-11 and 2^-8 in float32, float16 and bfloat16.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export_grok.errors import BuildError
from export_grok.plugins.int8_linear.reference import dequantise
from export_grok.plugins.int8_linear.trt_plugin import (
    MATRIX,
    PRODUCT,
    PROGRAMS,
    dividing_parts,
    product_parts,
)
from tests.plugins.formulas import Array, Within, matrix_of, product
from tests.plugins.interpreted import call_of, interpreted

DTYPES = ["float32", "float16", "bfloat16"]
ONNX = {"float32": 1, "float16": 10, "bfloat16": 16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

IN_FLOAT32 = {"WIDTH": 128, "DEPTH": 16, "TERMS": 0, "PACKED": 1}
ON_TENSOR_CORES = {"TOKENS": 16, "WIDTH": 128, "DEPTH": 32, "AHEAD": 1, "TERMS": 3}

Inputs = dict[str, Tensor]


def inputs_of(
    n: int, rows: int, columns: int, groups: int = 1, dtype: str = "float32", **kinds: Any
) -> Inputs:
    """Return activations with outliers, a matrix with the extremes of int8, and its scales."""
    random = torch.Generator().manual_seed(n * rows + columns + groups)
    x = torch.randn(n, rows, generator=random)
    x *= 10 ** torch.randint(-2, 3, (1, rows), generator=random)
    weight = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
    weight[0], weight[-1] = -128, 127
    scales = torch.rand(groups, columns, generator=random) * 0.02 + 0.01
    return {
        "x": x.to(getattr(torch, dtype)),
        "weight": weight,
        "scales": scales.to(getattr(torch, kinds.get("scales", "bfloat16"))),
    }


def numbers(tensor: Tensor) -> Array:
    """Return a tensor as an array of the same numbers."""
    array: Array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array


def parts_of(inputs: Inputs, parts: int) -> Within:
    """Return what GrokInt8Product has to be: the product of each part of the rows, [P, n, N]."""
    x, weight, scales = (numbers(tensor) for tensor in inputs.values())
    rows = len(weight)
    every_row = np.repeat(scales, rows // len(scales), axis=0)  # parts cut through groups
    each = [
        product(x[:, part], weight[part], every_row[part], isa="")
        for part in (slice(p * rows // parts, (p + 1) * rows // parts) for p in range(parts))
    ]
    value = np.stack([one.value for one in each])
    return Within(value=value, bound=np.stack([one.bound for one in each]))


def excess(
    inputs: Inputs,
    parts: int = 1,
    dtype: str = "float32",
    constants: Mapping[str, int] | None = None,
) -> float:
    """Return the largest error of GrokInt8Product as a part of its bound."""
    (partial,) = interpreted(PRODUCT, inputs, dtype=dtype, constants=constants, parts=parts)
    assert partial.dtype == torch.float32
    return parts_of(inputs, parts).excess(numbers(partial))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_the_product_is_that_of_the_formula(n: int, dtype: str) -> None:
    inputs = inputs_of(n, 80, 132, groups=8, dtype=dtype)
    assert excess(inputs, parts=2, dtype=dtype) <= 1


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 33, 65])
def test_any_number_of_tokens_is_right(n: int) -> None:
    assert excess(inputs_of(n, 80, 20, groups=2)) <= 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("rows", "columns", "groups", "parts"),
    [
        (1, 1, 1, 1),
        (7, 3, 7, 1),
        (45, 129, 5, 9),  # groups of 9 rows, parts of 5
        (97, 64, 1, 1),
        (96, 66, 8, 4),  # four columns, but not all of them, in a word
        (600, 16, 8, 3),  # more rows than threads have on their way; borders at 75 and 200
    ],
)
def test_any_sizes_are_right(n: int, rows: int, columns: int, groups: int, parts: int) -> None:
    assert excess(inputs_of(n, rows, columns, groups), parts) <= 1


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_each_part_has_its_rows_and_their_groups(n: int, parts: int, groups: int) -> None:
    assert excess(inputs_of(n, 240, 20, groups), parts) <= 1


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_call_is_right(data: st.DataObject) -> None:
    parts, groups = (data.draw(st.integers(1, 6)) for _ in range(2))
    rows = parts * groups * data.draw(st.integers(1, 20))
    n, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 140))
    dtype = data.draw(st.sampled_from(DTYPES))
    assert excess(inputs_of(n, rows, columns, groups, dtype), parts, dtype) <= 1


@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_product_in_float32_is_right_with_any_tiles_on_their_way(n: int, ahead: int) -> None:
    constants = {**IN_FLOAT32, "TOKENS": n, "AHEAD": ahead}
    assert excess(inputs_of(n, 297, 36, 3), 3, constants=constants) <= 1


@pytest.mark.parametrize("packed", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 4, 17])
def test_a_product_on_tensor_cores_is_right_with_words_and_with_bytes(n: int, packed: int) -> None:
    constants = {**ON_TENSOR_CORES, "PACKED": packed}
    assert excess(inputs_of(n, 297, 36, 3), 3, constants=constants) <= 1


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("n", [1, 3])
def test_scales_may_be_of_any_dtype(n: int, scales: str) -> None:
    assert excess(inputs_of(n, 64, 32, 2, scales=scales)) <= 1


@pytest.mark.parametrize("terms", [2, 3])
def test_terms_of_bfloat16_are_what_an_activation_is(terms: int) -> None:
    x = inputs_of(16, 1, 1)["x"] * 10.0 ** torch.arange(-20, 12).repeat(16, 1)
    one_by_one = torch.eye(32, dtype=torch.int8)
    inputs = {"x": x, "weight": one_by_one, "scales": torch.ones(1, 32)}
    constants = {**ON_TENSOR_CORES, "TERMS": terms, "PACKED": 4}
    (y,) = interpreted(PRODUCT, inputs, dtype="float32", constants=constants, parts=1)
    left_out = ((y[0] - x) / x).abs().max()
    assert left_out == 0 if terms == 3 else 2**-20 < left_out <= 2**-17


def shifted(inputs: Inputs) -> Inputs:
    return {**inputs, "scales": inputs["scales"].roll(1, 0)}


def row_left_out(inputs: Inputs) -> Inputs:
    x = inputs["x"].clone()
    x[:, len(inputs["weight"]) // 2] = 0
    return {**inputs, "x": x}


def columns_of_a_word_exchanged(inputs: Inputs) -> Inputs:
    columns = inputs["weight"].shape[1]
    order = torch.arange(columns).view(-1, 4)[:, [0, 2, 1, 3]].flatten()
    return {**inputs, "weight": inputs["weight"][:, order]}


def unsigned(inputs: Inputs) -> Inputs:
    return {**inputs, "weight": inputs["weight"].clamp(min=0)}


def rounded_matrix(inputs: Inputs) -> Inputs:
    matrix = dequantise(inputs["weight"], inputs["scales"], torch.bfloat16)
    every_row = inputs["scales"].float().repeat_interleave(30, 0)
    return {**inputs, "weight": matrix.float() / every_row, "scales": every_row}


MISTAKES = [shifted, row_left_out, columns_of_a_word_exchanged, unsigned, rounded_matrix]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(n: int, mistake: Callable[[Inputs], Inputs]) -> None:
    inputs = inputs_of(n, 240, 20, groups=8, dtype="bfloat16")
    (partial,) = interpreted(PRODUCT, inputs, dtype="bfloat16", parts=4)
    assert parts_of(inputs, 4).excess(numbers(partial)) <= 1
    assert parts_of(mistake(inputs), 4).excess(numbers(partial)) > 10


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("scalar", ["rows", "columns", "tokens"])
def test_an_access_beyond_a_tensor_is_noticed(n: int, scalar: str) -> None:
    def one_more(call: Any) -> Any:
        launch = PRODUCT.launch(call)
        more = {**launch.scalars, scalar: launch.scalars[scalar] + 4}
        return dataclasses.replace(launch, scalars=more)

    node = dataclasses.replace(PRODUCT, launch=one_more)
    inputs = inputs_of(n, 36, 20)
    constants = {"TOKENS": 16} if n > 2 else {"TOKENS": 8, "WIDTH": 128, "DEPTH": 16}
    with pytest.raises(Exception, match="beyond its"):
        interpreted(node, inputs, dtype="float32", constants=constants, parts=1)


def test_an_element_that_is_not_written_is_noticed() -> None:
    def one_less(call: Any) -> Any:
        launch = PRODUCT.launch(call)
        return dataclasses.replace(launch, scalars={**launch.scalars, "tokens": 2})

    node = dataclasses.replace(PRODUCT, launch=one_less)
    with pytest.raises(AssertionError, match="written"):
        interpreted(node, inputs_of(3, 36, 20), dtype="float32", parts=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 1), 1), ((45, 33), 5), ((300, 144), 1), ((264, 130), 8), ((3, 96, 48), 8)],
)
def test_the_matrix_is_that_of_the_formula(
    shape: tuple[int, ...], groups: int, dtype: str
) -> None:
    rows, columns = shape[-2:]
    count = shape[0] if len(shape) == 3 else 1
    each = [inputs_of(1 + e, rows, columns, groups) for e in range(count)]
    weight = torch.stack([inputs["weight"] for inputs in each]).view(shape)
    scales = torch.stack([inputs["scales"] for inputs in each]).view(*shape[:-2], groups, columns)
    for expert, inputs in enumerate(each):
        (matrix,) = interpreted(
            MATRIX,
            {"weight": weight, "scales": scales},
            dtype=dtype,
            expert=expert,
            to=ONNX[dtype],
        )
        value = matrix_of(numbers(inputs["weight"]), numbers(inputs["scales"]))
        bound = (UNIT[dtype] + 2.0**-24) * np.abs(value) + SMALLEST[dtype]
        assert matrix.dtype == getattr(torch, dtype)
        assert Within(value=value, bound=bound).excess(numbers(matrix)) <= 1
        assert matrix.equal(dequantise(inputs["weight"], inputs["scales"], matrix.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_int8_is_itself(dtype: str) -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8).view(16, 16)
    inputs = {"weight": weight, "scales": torch.ones(1, 16)}
    (matrix,) = interpreted(MATRIX, inputs, dtype=dtype, expert=0, to=ONNX[dtype])
    assert matrix.equal(weight.to(matrix.dtype))


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 64))
def test_parts_divide_the_rows_and_are_not_short(rows: int, columns: int, n: int) -> None:
    parts = product_parts(rows, columns, n)
    assert rows % parts == 0
    assert parts == 1 or rows // parts >= max(256, 64 * n)
    assert rows % 16 or rows // parts % 16 == 0


@pytest.mark.parametrize(
    ("rows", "columns", "parts"), [(6144, 6144, 12), (6144, 1024, 24), (768, 6144, 3)]
)
def test_matrices_of_the_released_model_have_the_programs_they_can(
    rows: int, columns: int, parts: int
) -> None:
    assert product_parts(rows, columns, 1) == parts
    enough = -(-columns // 128) * parts >= PROGRAMS
    assert enough or rows // parts == 256


def test_no_divisor_is_passed_over() -> None:
    assert dividing_parts(48, wanted=1, least=1) == 1
    assert dividing_parts(48, wanted=3, least=1) == 3
    assert dividing_parts(49, wanted=3, least=1) == 7
    assert dividing_parts(49, wanted=3, least=20) == 1


@pytest.mark.parametrize(("groups", "parts", "named"), [(1, 3, "3 parts"), (3, 1, "3 groups")])
def test_what_does_not_divide_the_rows_is_refused(groups: int, parts: int, named: str) -> None:
    call = call_of(PRODUCT, inputs_of(1, 64, 8, groups), "float32", parts=parts)
    with pytest.raises(BuildError, match=f"{named}.*64 rows"):
        PRODUCT.launch(call)
