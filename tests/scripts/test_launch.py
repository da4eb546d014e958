"""What kernels are launched with is what they were compiled to take, in their order."""

import re

import numpy as np
import pytest

from export_grok.plugins.ptx.compiler import compiled
from export_grok.plugins.ptx.ptxas import assembled
from export_grok.plugins.ptx.source import TARGETS, kernel_source
from export_grok.plugins.registry import plugin_nodes
from scripts.gpu.cases import Case, all_sizes
from scripts.gpu.launch import Argument, arguments
from scripts.gpu.reader import reader
from tests.scripts.fake_gpu import uncompiled

pytest.importorskip("triton")


def passed_kinds(case: Case) -> list[tuple[str, Argument]]:
    """Return name and value of each argument, addresses being numbers from 2^32 on."""
    made = uncompiled(case)
    names = [row.name for row in case.node.inputs]
    out_names = [row.name for row in case.node.outputs]
    address = {name: (1 << 32) + number for number, name in enumerate(names + out_names)}
    found = arguments(made, address, [address[name] for name in out_names])
    by_value = {value: name for name, value in address.items()}
    scalars = iter(made.launch.scalars)
    return [
        (next(scalars) if isinstance(value, np.int32) else by_value[value], value)
        for value in found
    ]


@pytest.mark.parametrize("op_type", plugin_nodes())
def test_arguments_are_those_that_the_kernel_is_compiled_with(op_type: str) -> None:
    for case in all_sizes("bfloat16"):
        if case.op_type != op_type:
            continue
        source = kernel_source(case.node, case.call, 90)
        found = passed_kinds(case)
        assert [name for name, _ in found] == [name for name, _ in source.arguments]
        for (_, value), (_, kind) in zip(found, source.arguments, strict=True):
            assert isinstance(value, np.int32) == (kind == "i32")


def test_ptx_takes_so_many_bits_for_each_argument() -> None:
    """Of one kernel, compiled: cuda.core passes an int in 64 bits, numpy's int32 in 32."""
    case = next(case for case in all_sizes("float32") if case.op_type == "GrokAttentionCombine")
    kernel = compiled(case.node, case.call, 80)
    bits = [int(width) for width in re.findall(r"\.param \.[usb](\d+)", kernel.ptx)]
    found = [32 if isinstance(value, np.int32) else 64 for _, value in passed_kinds(case)]
    assert found == bits
    assert kernel.parameters == len(found)


@pytest.mark.parametrize("sm", TARGETS)
def test_the_reader_assembles(sm: int) -> None:
    made = reader(1 << 20, multiprocessors=2)
    needs = assembled(made.kernel.ptx, made.kernel.name, TARGETS[sm].name)
    assert needs.spills == 0
    assert re.search(r"\.visible \.entry (\w+)\(", made.kernel.ptx)[1] == made.kernel.name  # type: ignore[index]
    assert made.kernel.ptx.count(".param") == 3 + 3  # declared, and read
