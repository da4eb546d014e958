"""What TensorRT is told of a plugin node follows from the node, and no kernel is mistaken.

`tensorrt` needs its libraries, so the functions that talk to it are tested with records that have
the attributes it gives, and what is said of every real node is checked without it. Registering
itself is tested where `tensorrt` is installed.
"""

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import keyword
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import onnx
import onnx.defs
import pytest

import export_grok.plugins
from export_grok.config import DTYPES, GROK_1
from export_grok.errors import BuildError, MissingDependencyError
from export_grok.plugins.op import DOMAIN, Operand
from export_grok.plugins.plugin_node import Attributes, Call, Launch, PluginNode, Shape
from export_grok.plugins.registry import op_names, part, plugin_nodes, specs
from export_grok.plugins.tensorrt_plugins import (
    DATA_TYPES,
    ONNX_DTYPES,
    call_of,
    launch_numbers,
    output_dtypes,
    register_plugins,
    scalar_numbers,
    shapes_of,
    signature_of,
)

NODES = plugin_nodes()

# Names that TensorRT or its parser keep for themselves. Source: _validate.py of tensorrt.plugin
# 11.4, and what the parser reads from a node.
KEPT = {"outputs", "stream", "tactic", "aot", "plugin_namespace", "plugin_version", "plugin_id"}


# A node with a bit of everything, and one that learns T by a number.
TOY = PluginNode(
    op="toy",
    op_type="GrokToy",
    kernel="toy",
    inputs=(
        Operand(name="x", shape="n K"),
        Operand(name="weight", shape="K N", dtype="int8"),
        Operand(name="scales", shape="R N", dtype="scale"),
        Operand(name="bias", shape="N"),
    ),
    outputs=(
        Operand(name="partial", shape="P n N", dtype="float32"),
        Operand(name="y", shape="n N"),
        Operand(name="largest", shape="R", dtype="scale"),
    ),
    attributes={"parts": int, "cap": float},
    output_shapes=lambda call: (
        (int(call.attributes["parts"]), call.shapes["x"][0], call.shapes["weight"][1]),
        (call.shapes["x"][0], call.shapes["weight"][1]),
        (call.shapes["scales"][0],),
    ),
    launch=lambda call: Launch(
        grid=(call.shapes["x"][0], 1, int(call.attributes["parts"])),
        scalars={"rows": call.shapes["weight"][0], "columns": call.shapes["weight"][1]},
        constants={"CAP": call.attributes["cap"], "BLOCK": 64},
    ),
)
CAST = dataclasses.replace(
    TOY,
    op_type="GrokToyCast",
    inputs=(Operand(name="weight", shape="K N", dtype="int8"),),
    outputs=(Operand(name="y", shape="K N"),),
    attributes={"to": int},
    output_shapes=lambda call: (call.shapes["weight"],),
)
TOY_SHAPES: tuple[Shape, ...] = ((3, 32), (32, 48), (4, 48), (48,))
TOY_DTYPES = ("HALF", "INT8", "BF16", "HALF")
TOY_ATTRIBUTES = {"parts": 2, "cap": 30.0}


@dataclass
class Size:
    """A size as TensorRT has it while it asks for outputs: None is not fixed."""

    value: int | None = None
    is_fake: bool = False

    @property
    def is_constant(self) -> bool:
        assert not self.is_fake  # TensorRT raises
        return self.value is not None

    def constant_value(self) -> int:
        assert self.value is not None
        return self.value


@dataclass
class Desc:
    """A tensor as TensorRT describes it."""

    dtype: Any
    shape_expr: Sequence[Size]
    sizes: Sequence[int] | None = None

    @property
    def has_shape(self) -> bool:
        return self.sizes is not None

    @property
    def shape(self) -> Iterator[int]:
        assert self.sizes is not None  # TensorRT raises
        return iter(self.sizes)


Stage = Callable[[str, Sequence[int | None]], Desc]


def ranks(dtype: str, shape: Sequence[int | None]) -> Desc:
    return Desc(SimpleNamespace(name=dtype), [Size(is_fake=True) for _ in shape])


def expressions(dtype: str, shape: Sequence[int | None]) -> Desc:
    return Desc(SimpleNamespace(name=dtype), [Size(size) for size in shape])


def numbers(dtype: str, shape: Sequence[int | None]) -> Desc:
    # The expressions are of a question that is over: nobody may look at them.
    return Desc(SimpleNamespace(name=dtype), [], [-1 if size is None else size for size in shape])


STAGES = [expressions, numbers]


def descs(
    stage: Stage,
    shapes: Sequence[Sequence[int | None]] = TOY_SHAPES,
    dtypes: Sequence[str] = TOY_DTYPES,
) -> list[Any]:
    return list(map(stage, dtypes, shapes))


def test_dtypes_have_the_names_that_tensorrt_gives_them() -> None:
    data_type = pytest.importorskip("tensorrt_rtx").DataType
    assert {name: getattr(data_type, theirs).name for name, theirs in DATA_TYPES.items()} == (
        DATA_TYPES
    )
    rows = {row.dtype for node in NODES.values() for row in (*node.inputs, *node.outputs)}
    assert rows - {"T", "scale"} <= DATA_TYPES.keys()
    assert set(DTYPES) <= DATA_TYPES.keys()


def test_numbers_of_onnx_dtypes_are_those_of_onnx() -> None:
    kinds = onnx.TensorProto
    numbers = {"float32": kinds.FLOAT, "float16": kinds.FLOAT16, "bfloat16": kinds.BFLOAT16}
    assert {number: dtype for dtype, number in numbers.items()} == ONNX_DTYPES


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_is_what_the_tensors_and_attributes_are(stage: Stage) -> None:
    call = call_of(TOY, descs(stage), TOY_ATTRIBUTES)
    assert call == Call(
        shapes=dict(zip(("x", "weight", "scales", "bias"), TOY_SHAPES, strict=True)),
        attributes=TOY_ATTRIBUTES,
        dtype="float16",
        scales="bfloat16",
    )
    assert output_dtypes(TOY, call) == ("float32", "float16", "bfloat16")


def test_output_dtypes_are_known_while_shapes_are_not() -> None:
    for t, scale in itertools.product(("FLOAT", "HALF", "BF16"), repeat=2):
        dtypes = (t, "INT8", scale, t)
        early = call_of(TOY, descs(ranks, dtypes=dtypes), TOY_ATTRIBUTES)
        late = call_of(TOY, descs(numbers, dtypes=dtypes), TOY_ATTRIBUTES)
        assert early == dataclasses.replace(late, shapes={})
        assert output_dtypes(TOY, early) == output_dtypes(TOY, late)


@pytest.mark.parametrize("number", ONNX_DTYPES)
def test_where_no_input_has_the_graphs_dtype_an_attribute_names_it(number: int) -> None:
    call = call_of(CAST, descs(ranks, [(8, 8)], ["INT8"]), {"to": number})
    assert output_dtypes(CAST, call) == (ONNX_DTYPES[number],)


def test_an_attribute_that_names_no_float_is_refused() -> None:
    with pytest.raises(BuildError, match=r"attribute to is 7; it must be .*16 for bfloat16"):
        call_of(CAST, descs(ranks, [(8, 8)], ["INT8"]), {"to": 7})


@pytest.mark.parametrize("stage", STAGES)
def test_a_size_that_is_not_fixed_is_refused_by_its_place(stage: Stage) -> None:
    shapes: list[Sequence[int | None]] = [*TOY_SHAPES]
    shapes[1] = (32, None)
    with pytest.raises(BuildError, match="GrokToy: axis 1 of input weight has no fixed size"):
        shapes_of(TOY, descs(stage, shapes))


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("HALF", "HALF", "BF16", "HALF"), "input weight is float16; it must be int8"),
        (("HALF", "FP8", "BF16", "HALF"), "input weight is FP8; it must be int8"),
        (("HALF", "INT8", "BF16", "FLOAT"), "of x, bias are float16, float32; .* the same"),
        (("INT64", "INT8", "BF16", "INT64"), "of x, bias are int64, int64; they must be one of"),
        (("HALF", "INT8", "INT8", "HALF"), "of scales are int8; they must be one of float32"),
    ],
)
def test_a_dtype_that_the_kernel_does_not_read_is_refused(
    dtypes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        call_of(TOY, descs(ranks, dtypes=dtypes), TOY_ATTRIBUTES)


@pytest.mark.parametrize(
    "attributes",
    [{"cap": 30.0, "parts": 2}, {"parts": 2}, {}, {**TOY_ATTRIBUTES, "more": 1}],
)
def test_attributes_that_could_be_mistaken_for_one_another_are_refused(
    attributes: Attributes,
) -> None:
    with pytest.raises(BuildError, match="it must get parts, cap, in this order"):
        call_of(TOY, descs(ranks), attributes)


def test_a_signature_names_inputs_then_attributes_then_what_tensorrt_adds() -> None:
    behind = {"outputs": tuple[Desc, Desc, Desc], "tactic": int}
    signature = signature_of(TOY, Desc, behind=behind, returns=[str, Desc])
    assert {name: p.annotation for name, p in signature.parameters.items()} == {
        "x": Desc,
        "weight": Desc,
        "scales": Desc,
        "bias": Desc,
        "parts": int,
        "cap": float,
        **behind,
    }
    assert list(signature.parameters)[-4:] == ["parts", "cap", "outputs", "tactic"]
    assert all(p.default is inspect.Parameter.empty for p in signature.parameters.values())
    assert get_origin(signature.return_annotation) is tuple
    assert get_args(signature.return_annotation) == (str, Desc)


def test_a_launch_keeps_its_numbers() -> None:
    launch = TOY.launch(call_of(TOY, descs(numbers), TOY_ATTRIBUTES))
    assert launch_numbers(launch, 8, 1024) == {
        "grid_x": 3,
        "grid_y": 1,
        "grid_z": 2,
        "block_x": 256,
        "shared_mem": 1024,
    }
    assert scalar_numbers(TOY, launch) == (32, 48)


def test_a_number_beyond_32_bits_is_refused() -> None:
    for value in (2**31 - 1, -(2**31)):
        launch = Launch(grid=(1, 1, 1), scalars={"rows": value}, constants={})
        assert scalar_numbers(TOY, launch) == (value,)
    for value in (2**31, -(2**31) - 1):
        launch = Launch(grid=(1, 1, 1), scalars={"rows": value}, constants={})
        with pytest.raises(BuildError, match=f"GrokToy: rows is {value}; a kernel takes int32"):
            scalar_numbers(TOY, launch)


def test_without_tensorrt_the_extra_is_named() -> None:
    if importlib.util.find_spec("tensorrt"):
        pytest.skip("tensorrt is installed")
    with pytest.raises(MissingDependencyError, match=r"tensorrt cannot .*export-grok\[gpu\]"):
        register_plugins(90)


@pytest.mark.gpu
def test_tensorrt_knows_all_plugins_once_they_are_registered() -> None:
    trt = pytest.importorskip("tensorrt")
    register_plugins(80)
    register_plugins(90, trt)
    creators = trt.get_plugin_registry()
    for node in NODES.values():
        creator = creators.get_creator(node.op_type, "1", DOMAIN)
        assert [field.name for field in creator.field_names] == list(node.attributes)


# What follows is said of every real node.

# Axis letters of `export.model`, and n rows in parts P: the released model with its widest matrix,
# the head's; and one whose sizes can hardly be mistaken for each other. Where a node takes the
# matrices of all experts or just one matrix, it has all in the one model and one in the other.
RELEASED: Mapping[str, int] = {
    "B": 8,
    "S": 1,
    "n": 64,
    "T": GROK_1.sequence_len + 1023,
    "Hq": GROK_1.num_q_heads,
    "Hkv": GROK_1.num_kv_heads,
    "G": GROK_1.num_q_heads // GROK_1.num_kv_heads,
    "D": GROK_1.key_size,
    "M": GROK_1.emb_size,
    "F": GROK_1.ffn_size,
    "E": GROK_1.num_experts,
    "C": GROK_1.num_selected_experts,
    "R": GROK_1.row_parallel_scale_groups,
    "K": GROK_1.emb_size,
    "N": GROK_1.vocab_size,
    "P": 8,
    "...": GROK_1.num_experts,
}
SMALL: Mapping[str, int] = dict(
    zip(RELEASED, (5, 1, 7, 80, 6, 2, 3, 16, 24, 48, 9, 2, 4, 40, 11, 4, 0), strict=True)
)
VALUES = {"scale": 0.088388346, "cap": 30.0, "to": 16}

# In x, y and z. Source: CUDA C++ Programming Guide, technical specifications.
GRID_LIMITS = (2**31 - 1, 65535, 65535)


def shape_of(row: Operand, sizes: Mapping[str, int]) -> Shape:
    return tuple(
        math.prod(sizes.get(factor) or int(factor) for factor in axis.split("*"))
        for axis in row.shape.split()
        if axis != "..." or sizes["..."]
    )


def real_call(node: PluginNode, sizes: Mapping[str, int], dtype: str = "BF16") -> Call:
    kinds = {"T": dtype, "scale": "BF16", **DATA_TYPES}
    shapes = [shape_of(row, sizes) for row in node.inputs]
    inputs = descs(numbers, shapes, [kinds[row.dtype] for row in node.inputs])
    values = {**VALUES, "parts": sizes["P"], "expert": max(0, sizes["..."] - 1)}
    return call_of(node, inputs, {name: values[name] for name in node.attributes})


def kernel_of(node: PluginNode) -> ast.FunctionDef:
    path = Path(export_grok.plugins.__path__[0], node.op, "triton_kernel.py")
    (found,) = (
        function
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and function.name == node.kernel
    )
    return found


def signature_faults(node: PluginNode, launch: Launch, kernel: ast.FunctionDef) -> list[str]:
    """Return where a kernel's arguments are others than those that it is launched with."""
    numbers = {*launch.scalars, *launch.constants}
    names = [a.arg if a.arg in numbers else a.arg.lower() for a in kernel.args.args]
    launched = [
        *(row.name for row in node.inputs),
        *launch.scalars,
        *(row.name for row in node.outputs),
        *launch.constants,
    ]
    faults = [
        f"argument {i} is {name}, launched is {other}"
        for i, (name, other) in enumerate(itertools.zip_longest(names, launched))
        if name != other
    ]
    for argument in kernel.args.args:
        constant = "constexpr" in ast.unparse(argument.annotation or ast.Constant(None))
        if constant != (argument.arg in launch.constants):
            faults.append(f"{argument.arg} is " + ("constexpr" if constant else "no constexpr"))
    if kernel.args.defaults or kernel.args.kwonlyargs or kernel.args.vararg or kernel.args.kwarg:
        faults.append("an argument has a default, a star or only a keyword")
    if [ast.unparse(decorator) for decorator in kernel.decorator_list] != ["triton.jit"]:
        faults.append("it is no triton.jit function")
    return faults


TOY_KERNEL = """
@triton.jit
def toy(X, WEIGHT, SCALES, BIAS, rows, columns, PARTIAL, Y, LARGEST,
        CAP: tl.constexpr, BLOCK: tl.constexpr):
    pass
"""


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("X, WEIGHT", "WEIGHT, X", "argument 0 is weight, launched is x"),
        ("rows, columns", "columns, rows", "argument 4 is columns, launched is rows"),
        ("BIAS, rows", "rows, BIAS", "argument 3 is rows, launched is bias"),
        ("Y, LARGEST", "LARGEST, Y", "argument 7 is largest, launched is y"),
        ("LARGEST,", "LARGEST, hidden,", "argument 9 is hidden, launched is CAP"),
        (", BLOCK: tl.constexpr", "", "argument 10 is None, launched is BLOCK"),
        ("CAP: tl.constexpr", "CAP", "CAP is no constexpr"),
        ("rows,", "rows: tl.constexpr,", "rows is constexpr"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 64", "an argument has a default"),
        ("@triton.jit", "", "it is no triton.jit function"),
    ],
)
def test_a_kernel_with_other_arguments_is_found_out(right: str, wrong: str, fault: str) -> None:
    def faults(source: str) -> list[str]:
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        launch = TOY.launch(call_of(TOY, descs(numbers), TOY_ATTRIBUTES))
        return signature_faults(TOY, launch, function)

    assert not faults(TOY_KERNEL)
    assert any(found.startswith(fault) for found in faults(TOY_KERNEL.replace(right, wrong)))


def test_plugin_names_are_taken_by_nothing_else() -> None:
    names = [
        node.op_type
        for op in op_names()
        if importlib.util.find_spec(f"export_grok.plugins.{op}.trt_plugin")
        for node in part(op, "trt_plugin").NODES
    ]
    assert sorted(names) == sorted(NODES)  # none twice
    # The parser looks for a native op by the type alone, whatever the domain is.
    assert not NODES.keys() & {schema.name for schema in onnx.defs.get_all_schemas()}
    assert not NODES.keys() & specs().keys()
    assert not [name for name in (DOMAIN, *names) if "." in name]


every_node = pytest.mark.parametrize("node", NODES.values(), ids=NODES)
both_sizes = pytest.mark.parametrize("sizes", [RELEASED, SMALL], ids=["released", "small"])
every_dtype = pytest.mark.parametrize("dtype", ["FLOAT", "HALF", "BF16"])


@every_node
def test_names_can_be_told_apart(node: PluginNode) -> None:
    names = [row.name for row in (*node.inputs, *node.outputs)]
    names += node.attributes
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    assert not KEPT & {*names}
    assert {*node.attributes.values()} <= {int, float}


@every_node
def test_the_dtype_of_the_graph_can_be_known(node: PluginNode) -> None:
    assert any(row.dtype == "T" for row in node.inputs) or "to" in node.attributes


@every_node
@both_sizes
def test_shapes_are_what_the_letters_say(node: PluginNode, sizes: Mapping[str, int]) -> None:
    shapes = node.output_shapes(real_call(node, sizes))
    assert list(shapes) == [shape_of(row, sizes) for row in node.outputs]
    assert {type(size) for shape in shapes for size in shape} == {int}  # no numpy's


@every_node
@every_dtype
@both_sizes
def test_a_launch_is_within_limits(node: PluginNode, sizes: Mapping[str, int], dtype: str) -> None:
    launch = node.launch(real_call(node, sizes, dtype))
    assert {type(n) for n in (*launch.grid, *launch.scalars.values())} == {int}
    assert all(0 < n <= most for n, most in zip(launch.grid, GRID_LIMITS, strict=True))
    assert launch.num_warps in {1, 2, 4, 8, 16, 32}  # 1024 threads
    assert all(value >= 0 for value in scalar_numbers(node, launch))


@every_node
@every_dtype
@both_sizes
def test_the_kernel_takes_what_it_is_launched_with(
    node: PluginNode, sizes: Mapping[str, int], dtype: str
) -> None:
    launch = node.launch(real_call(node, sizes, dtype))
    assert not signature_faults(node, launch, kernel_of(node))
