"""The graphs of one plugin node and of one collective, and what trtexec says, without a GPU."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export_grok.engines.trt.contract import check_contract
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.record import Binding
from export_grok.export.graphs import write_graph
from scripts.gpu.cases import Case, Matrix, product
from scripts.gpu.inputs import random_inputs
from scripts.gpu.plugin import CASE, by_trtexec, model_of_node, run_node
from scripts.gpu.ranks import RANKS, SHAPE, collective_model, wait_for
from scripts.gpu.references import reference
from tests.scripts.fake_gpu import FakeGpu

FLOAT = product("alone", "float32", 3, Matrix(rows=32, columns=24, groups=4, scales="float32"), 2)


def by_onnxruntime(model: ir.Model, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    content = ir.serde.serialize_model(model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, dict(inputs))
    return found


def test_the_graph_of_a_node_means_the_node() -> None:
    inputs = random_inputs(FLOAT, np.random.default_rng(0))
    found = by_onnxruntime(model_of_node(FLOAT), inputs)
    (expected,) = reference(FLOAT.op_type, FLOAT.call, inputs)
    assert expected.excess(found[0]) <= 1


def test_tensorrt_finds_a_plugin_in_it() -> None:
    model = model_of_node(CASE)
    check_contract(model)
    (node,) = model.graph
    assert node.attributes["plugin_namespace"].value == "grok1"


class FakeEngine:
    """An engine of one node, that writes what its function body does, times a factor."""

    scratch = 0

    def __init__(self, gpu: FakeGpu, case: Case, factor: float = 1.0) -> None:
        self._gpu, self._case, self._factor = gpu, case, factor
        self._addresses: dict[str, int] = {}
        shapes = dict(case.call.shapes)
        (shapes["partial"],) = case.node.output_shapes(case.call)
        self.tensors = tuple(
            Binding(
                name=name,
                direction="out" if name == "partial" else "in",
                shape=shape,
                dtype="int8" if name == "weight" else "float32",
            )
            for name, shape in shapes.items()
        )

    def context(self, scratch: int) -> "FakeEngine":
        self._gpu.at(scratch, 1)
        return self

    def bind(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def set_communicator(self, capsule: object) -> None:
        raise AssertionError("a node of one rank")

    def enqueue(self, stream: int) -> None:
        arrays = {}
        for row in self.tensors:
            kind = np.dtype(row.dtype)
            nbytes = int(np.prod(row.shape)) * kind.itemsize
            memory = self._gpu.at(self._addresses[row.name], nbytes)
            arrays[row.name] = memory.view(kind).reshape(row.shape)
        output = arrays.pop("partial")
        assert np.isnan(output).all(), "an output is poisoned before a run"
        output[...] = by_onnxruntime(model_of_node(self._case), arrays)[0] * self._factor


def test_a_plan_s_run_is_held_to_the_formula() -> None:
    gpu, random = FakeGpu(), np.random.default_rng(0)
    assert run_node(gpu, FLOAT, FakeEngine(gpu, FLOAT), random) <= 1
    assert run_node(gpu, FLOAT, FakeEngine(gpu, FLOAT, 1.001), random) > 1


def trtexec(folder: Path, text: str, code: int) -> None:
    program = folder / "trtexec"
    program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("text", "code", "right", "said"),
    [
        ("&&&& PASSED TensorRT.trtexec", 0, True, "trtexec runs it"),
        ("&&&& FAILED no plugin", 1, False, "trtexec fails with 1: &&&& FAILED no plugin"),
        ("it has nothing to say", 0, False, "trtexec fails with 0: it has nothing to say"),
    ],
)
def test_what_trtexec_says_counts(
    text: str,
    code: int,
    right: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trtexec(tmp_path, text, code)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert by_trtexec(Path("plan")) == (said, right)


def test_without_trtexec_the_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert by_trtexec(Path("plan")) == ("trtexec is not on PATH", True)


def test_a_builder_takes_the_graph_of_a_sum(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    model = collective_model(RANKS)
    (node,) = model.graph
    assert (node.op_type, node.attributes["nb_rank"].value) == ("DistCollective", RANKS)
    assert model.graph.outputs[0].shape == ir.Shape(SHAPE)
    check_contract(model)
    write_graph(model, tmp_path / "sum.onnx")
    flavour, plan = flavour_of("trt-rtx"), tmp_path / "plan"
    assert plan_from_graph(tmp_path / "sum.onnx", plan, flavour=flavour, sm=80).bytes > 0


def test_a_rank_waits_for_a_file_and_not_for_ever(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="is not there after 0 s"):
        wait_for(tmp_path / "none", 0)
    (tmp_path / "there").touch()
    assert wait_for(tmp_path / "there", 0).exists()
