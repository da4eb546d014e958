"""all_reduce sums over processes, and elsewhere means one rank alone."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.tape import Tape
from torch import distributed

from export_grok.errors import ConfigError
from export_grok.export.load import layer_from_index, tensor_from_array
from export_grok.export.model import DecoderLayer
from export_grok.export.partition import cut_axis
from export_grok.plugins.all_reduce.onnx_function import FUNCTIONS
from export_grok.plugins.all_reduce.reference import all_reduce
from export_grok.plugins.all_reduce.trt_lowering import lower
from export_grok.weights import WeightReader
from tests.conftest import load_golden

Array = NDArray[Any]

RANKS = 2


def joined(
    rank: int, file: Path, work: Callable[[int], Array], answers: "multiprocessing.Queue[Any]"
) -> None:
    """Join the group and answer what the work comes to on this rank."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS
    )
    with torch.no_grad():
        answers.put((rank, work(rank)))
    distributed.destroy_process_group()


def on_ranks(work: Callable[[int], Array], folder: Path) -> list[Array]:
    """Return what the work comes to in each of two processes."""
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[Any] = context.Queue()
    processes = [
        context.Process(
            target=joined, args=(rank, folder / "rendezvous", work, answers), daemon=True
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(RANKS)]


def summed(rank: int) -> Array:
    x = torch.arange(6.0).reshape(1, 2, 3) * 10**rank
    total: torch.Tensor = all_reduce(x, RANKS)
    assert x[0, 1, 2] == 5 * 10**rank  # what it was given is as it was
    return total.numpy()


def layer_of(rank: int) -> Array:
    """Return what a layer comes to whose weights are this rank's parts."""
    golden = load_golden("tiny8")
    config, reader = golden.config, WeightReader(golden.index.root)
    module = DecoderLayer(config, RANKS)
    parts = {}
    for name, weight in golden.index.below("layers.0.").items():
        whole, axis = reader.read(weight), cut_axis(name, weight.shape, config.for_rank(RANKS))
        part = whole if axis is None else np.split(whole, RANKS, axis)[rank]
        parts[name] = tensor_from_array(np.ascontiguousarray(part))
    module.load_state_dict(parts, assign=True)
    h, start, k_cache, v_cache = layer_inputs(config.num_kv_heads // RANKS, config.key_size)
    found: torch.Tensor = module(h, start, k_cache, v_cache)[0]
    return found.numpy()


def layer_inputs(heads: int, size: int) -> tuple[torch.Tensor, ...]:
    h = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 5, 128)).astype(np.float32))
    return h, torch.tensor([0, 0]), torch.zeros(2, heads, 9, size), torch.zeros(2, heads, 9, size)


def both(rank: int) -> Array:
    return np.concatenate([summed(rank).ravel(), layer_of(rank).ravel()])


def test_two_processes_sum_and_compute_a_layer_together(tmp_path: Path) -> None:
    """Processes take seconds to start, so they do both."""
    found = on_ranks(both, tmp_path)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0][:6], np.arange(6) * 11)
    golden = load_golden("tiny8")
    inputs = layer_inputs(golden.config.num_kv_heads, golden.config.key_size)
    whole = layer_from_index(golden.config, golden.index, 0)(*inputs)[0]
    np.testing.assert_allclose(found[0][6:], whole.numpy().ravel(), rtol=0, atol=1e-4)


def test_one_rank_has_its_own_sum_in_new_memory() -> None:
    x = torch.arange(3.0)
    total = all_reduce(x, 1)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()


def test_more_ranks_than_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"over 8 ranks and this process is one of 1; start 8"):
        all_reduce(torch.zeros(3), 8)


def test_the_function_gives_a_rank_what_it_has() -> None:
    (function,) = FUNCTIONS
    node = onnx.helper.make_node("GrokAllReduce", ["x"], ["y"], domain="grok1", ranks=8)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], "sum", [value("x", 1, [2, 3])], [value("y", 1, [2, 3])])
    imports = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("grok1", 1)]
    model = onnx.helper.make_model(
        graph, opset_imports=imports, functions=[function.to_function_proto()], ir_version=11
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], x)


def test_tensorrt_gets_its_own_collective_node() -> None:
    x = ir.Value(name="x", shape=ir.Shape([1, 2, 3]), type=ir.TensorType(ir.DataType.BFLOAT16))
    node = ir.Node("grok1", "GrokAllReduce", [x], [ir.AttrInt64("ranks", 4)])
    (y,) = lower(node, ir.Graph([x], [], nodes=[node]), Tape())
    made = y.producer()
    assert made is not None
    assert (made.domain, made.op_type) == ("trt", "DistCollective")
    assert made.attributes["nb_rank"].value == 4
    assert made.attributes["reduce_op"].value == "sum"
    assert list(made.inputs) == [x]
