"""A decoder layer as the engine has it: lowered, with random weights, and as ONNX Runtime runs it.

The reference is the same layer in float32, run by the function bodies of its plugin nodes: no
plugin, no TensorRT, no rounding to narrower dtypes.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import GROK_1, Dtype, GrokConfig
from export_grok.engines.trt.record import GraphRecord, Phase, Sizes
from export_grok.engines.trt.tensors import CACHES, ELEMENTS
from scripts.gpu.inputs import random_codes, random_scales

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["LayerCase", "Reference", "graph_of", "layer_cases", "random_layer", "written_graph"]

Array = NDArray[Any]
Arrays = dict[str, Array]

SMALL = GrokConfig(
    num_layers=1,
    emb_size=64,
    num_q_heads=12,
    num_kv_heads=2,
    key_size=32,
    ffn_size=96,
    vocab_size=64,
    attn_output_multiplier=32**-0.5,
    embedding_multiplier_scale=8.0,
    output_multiplier_scale=0.5,
)
# A chunk above the number of rows that plugins multiply: there the matrices are written out.
SMALL_SIZES = Sizes(batch=4, chunk=80, max_length=200)
FULL_SIZES = Sizes(batch=1, chunk=256, max_length=GROK_1.sequence_len)
# Below it the router's choice may differ in another dtype: a difference of log probabilities.
TIE = 0.1
PROBABILITIES = "probabilities"


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer's graph: all that it depends on."""

    name: str
    config: GrokConfig
    sizes: Sizes
    phase: Phase
    dtype: Dtype

    @property
    def label(self) -> str:
        """In a few words."""
        return f"{self.name} {self.phase}, {self.dtype}"


def layer_cases(*, full: bool) -> list[LayerCase]:
    """Return small layers in each dtype, then one of Grok-1's size."""
    small = [
        LayerCase(name="small", config=SMALL, sizes=SMALL_SIZES, phase=phase, dtype=dtype)
        for dtype in ("float32", "float16", "bfloat16")
        for phase in ("decode", "prefill")
    ]
    grok_1 = replace(GROK_1, num_layers=1)
    large = [
        LayerCase(name="Grok-1", config=grok_1, sizes=FULL_SIZES, phase=phase, dtype="bfloat16")
        for phase in ("decode", "prefill")
    ]
    return small + (large if full else [])


@functools.cache
def model_of(case: LayerCase) -> "ir.Model":
    """Return the lowered graph."""
    from export_grok.engines.trt.lower import lower_template

    template = _template(case.config, case.dtype)
    return lower_template(template, "layer", case.dtype, case.sizes, case.phase)


@functools.cache
def _template(config: GrokConfig, dtype: Dtype) -> "ir.Model":
    from export_grok.export.trace import template_from_config

    return template_from_config("layer", config, dtype)


def graph_of(case: LayerCase) -> GraphRecord:
    """Return what is bound to the graph."""
    from export_grok.engines.trt.bindings import bindings_of

    bindings = bindings_of(model_of(case).graph, "layer", case.config, case.dtype, 1)
    return GraphRecord(kind="layer", phase=case.phase, file="", bindings=bindings, nodes={})


def written_graph(case: LayerCase, folder: Path) -> Path:
    """Return the graph's file, which is written if it is not there."""
    from export_grok.export.graphs import write_graph

    file = folder / f"layer.{case.name}.{case.phase}.{case.dtype}.onnx"
    if not file.exists():
        write_graph(model_of(case), file)
    return file


def random_layer(case: LayerCase, random: np.random.Generator) -> Arrays:
    """Return all inputs by name: weights as a checkpoint has them, caches in use.

    Behind the tokens of a row the caches hold NaN, as memory may.
    """
    bindings = {row.name: row for row in graph_of(case).bindings if row.direction == "in"}
    found: Arrays = {}
    for name, row in bindings.items():
        dtype = ELEMENTS[row.dtype]
        if row.dtype == "int8":
            found[name] = random_codes(random, row.shape)
        elif name.endswith(".scales"):
            rows = bindings[name.replace(".scales", ".weight")].shape[-2]
            found[name] = random_scales(random, row.shape, rows).astype(dtype)
        elif name.endswith("norm.scale"):
            found[name] = random.uniform(0.8, 1.2, row.shape).astype(dtype)
        elif name == "start":
            last = case.sizes.slots - case.sizes.rows(case.phase)[1]
            found[name] = random.integers(last // 2, last + 1, row.shape)
        else:
            size = row.shape[0] ** -0.5 if name == "router.weight" else 1
            found[name] = (size * random.standard_normal(row.shape, np.float32)).astype(dtype)
    for name in CACHES:
        for cache, start in zip(found[name], found["start"], strict=True):
            cache[:, start:] = np.nan
    return found


class Reference:
    """The layer in float32 in ONNX Runtime."""

    def __init__(self, case: LayerCase) -> None:
        import onnx_ir as ir
        import onnxruntime as ort

        model = model_of(replace(case, dtype="float32")).clone()
        (choice,) = [node for node in model.graph if node.op_type == "TopK"]
        probabilities = choice.inputs[0]
        assert probabilities is not None
        probabilities.name = PROBABILITIES
        model.graph.outputs.append(probabilities)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        content = ir.serde.serialize_model(model).SerializeToString()
        self._session = ort.InferenceSession(content, options, ["CPUExecutionProvider"])
        self._chosen = case.config.num_selected_experts
        self._wide = {value.name: value.dtype for value in model.graph.inputs}

    def run(self, inputs: Mapping[str, Array]) -> tuple[Arrays, NDArray[np.bool_]]:
        """Return the outputs, and of which tokens [B, S] the router's choice is clear."""
        values = {name: self._value(name, array) for name, array in inputs.items()}
        names = [output.name for output in self._session.get_outputs()]
        found = self._session.run_with_ort_values(names, values)
        outputs = {name: value.numpy() for name, value in zip(names, found, strict=True)}
        ordered = -np.sort(-outputs.pop(PROBABILITIES), -1)
        last, next_one = ordered[..., self._chosen - 1], ordered[..., self._chosen]
        return outputs, np.log(last / next_one) > TIE

    def _value(self, name: str, array: Array) -> Any:
        import onnx_ir as ir
        import onnxruntime as ort

        if self._wide[name] == ir.DataType.FLOAT:
            array = array.astype(np.float32)
        array = np.ascontiguousarray(array)
        if array.dtype != ELEMENTS["bfloat16"]:
            return ort.OrtValue.ortvalue_from_numpy(array)
        # ONNX Runtime does not know the bfloat16 of numpy.
        bits = array.view(np.int16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(ir.DataType.BFLOAT16))
