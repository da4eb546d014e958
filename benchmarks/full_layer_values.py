"""Hold the ops of full-size layers to float64, on sampled columns.

    python benchmarks/full_layer_values.py DIR/engine [--columns 64] [--tokens 1 --tokens 16]

Each int8 linear and each layer's experts are cut out of the exported graph and run by the native
kernels on random activations; numpy computes the same columns in float64 from the stored weights.
Prints the largest error of each op, relative to the root mean square of its float64 result.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import graph_file, open_bundle
from export_grok.export.graphs import write_graph
from export_grok.plugins.kernels import native_kernels

Array = NDArray[Any]
Doubles = NDArray[np.float64]


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--columns", default=64, show_default=True, help="Sampled of each matrix.")
@click.option("--tokens", multiple=True, default=(1, 16), show_default=True)
def main(engine: Path, columns: int, tokens: tuple[int, ...]) -> None:
    """Check the ops of ENGINE's layers."""
    bundle = open_bundle(engine)
    random = np.random.default_rng(0)
    print(f"kernels: {native_kernels().isa}")
    for layer in range(bundle.config.num_layers):
        model = ir.load(bundle.folder / graph_file("layer", layer))
        for node in model.graph:
            if node.op_type not in ("GrokInt8Linear", "GrokMoeExperts"):
                continue
            stored = [
                array_of(value.const_value, bundle.weights_root)
                for value in node.inputs
                if value is not None and isinstance(value.const_value, ir.ExternalTensor)
            ]
            weights = list(zip(stored[::2], stored[1::2], strict=True))
            for count in tokens:
                inputs, wanted, sampled = example(node, weights, count, columns, random)
                found = run(node, inputs, bundle.weights_root)[..., sampled]
                error = np.abs(found - wanted).max() / np.sqrt(np.mean(wanted**2))
                name = next(value.name for value in node.inputs if value and value.const_value)
                print(f"layer {layer} {node.op_type:15} {name:22} T={count:<3} {error:.1e}")


def array_of(tensor: ir.ExternalTensor, root: Path) -> Array:
    """Return a stored weight as it lies in its file."""
    return np.memmap(
        root / tensor.location,
        dtype=tensor.dtype.numpy(),
        mode="r",
        offset=int(tensor.offset or 0),
        shape=tuple(tensor.shape.numpy()),
    )


def example(
    node: ir.Node,
    weights: list[tuple[Array, Array]],
    tokens: int,
    columns: int,
    random: np.random.Generator,
) -> tuple[dict[str, Array], Doubles, NDArray[np.int64]]:
    """Return activations of an op, its float64 result on sampled columns, and which those are.

    Args:
        node: an int8 linear, or experts.
        weights: codes and scales of its matrices.
        tokens: of activations.
        columns: to sample.
        random: draws both.
    """
    (first, _), (last, last_scales) = weights[0], weights[-1]
    sampled = np.sort(random.choice(last.shape[-1], min(columns, last.shape[-1]), replace=False))
    x = random.standard_normal((1, tokens, first.shape[-2])).astype(np.float32)
    names = [value.name for value in node.inputs if value is not None]
    if node.op_type == "GrokInt8Linear":
        return {str(names[0]): x}, product(x[0], last, last_scales, sampled)[None], sampled
    experts = np.stack([random.permutation(first.shape[0])[:2] for _ in range(tokens)])[None]
    gates = random.random((1, tokens, 2)).astype(np.float32)
    wanted = np.zeros((1, tokens, len(sampled)))
    for expert in np.unique(experts):
        rows, choices = np.nonzero(experts[0] == expert)
        g, u = (
            product(x[0, rows], codes[expert], scales[expert], None)
            for codes, scales in weights[:2]
        )
        bent = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
        down = product(0.5 * g * (1 + bent) * u, last[expert], last_scales[expert], sampled)
        wanted[0, rows] += gates[0, rows, choices, None] * down
    return dict(zip(map(str, names[:3]), (x, gates, experts), strict=True)), wanted, sampled


def product(x: Array, codes: Array, scales: Array, columns: NDArray[np.int64] | None) -> Doubles:
    """Return x times the columns of codes [K, N] with scales [R, N], block by block of rows."""
    chosen = slice(None) if columns is None else columns
    height = codes.shape[0] // scales.shape[0]
    y = np.zeros((len(x), codes.shape[1] if columns is None else len(columns)))
    for group, scale in enumerate(scales):
        for first in range(group * height, (group + 1) * height, 512):
            end = min(first + 512, (group + 1) * height)
            block = np.asarray(codes[first:end])[:, chosen].astype(np.float64)
            y += x[:, first:end].astype(np.float64) @ block * scale[chosen].astype(np.float64)
    return y


def run(node: ir.Node, inputs: dict[str, Array], root: Path) -> NDArray[np.float32]:
    """Return the node's result by the native kernels."""
    library = native_kernels().library
    if library is None:
        raise SystemExit(native_kernels().reason)
    operands = []
    for value in node.inputs:
        if value is None:
            raise SystemExit(f"{node.op_type} lacks an operand")
        operand = ir.Value(name=value.name, type=value.type, const_value=value.const_value)
        operand.shape = (
            value.shape if value.const_value else ir.Shape(inputs[str(value.name)].shape)
        )
        operands.append(operand)
    stored = [operand for operand in operands if operand.const_value is not None]
    copy = ir.Node(node.domain, node.op_type, operands, num_outputs=1)
    y = copy.outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [operand for operand in operands if operand.const_value is None],
        [y],
        nodes=[copy],
        initializers=stored,
        opset_imports={"": 24, node.domain: 1},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "op.onnx")
        write_graph(ir.Model(graph, ir_version=11), path)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(root)
        )
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        found: NDArray[np.float32] = session.run(None, inputs)[0]
    return found


if __name__ == "__main__":
    main()
