"""One thing made wrong in an ONNX graph: where its weights lie, its nodes, what is in and out."""

from random import Random
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from scripts.fuzzing.edits import edited_bytes

__all__ = ["edited_graph"]

# Where a tensor's bytes might be looked for; the first three are known to be there.
PLACES = ("{outside}", "../outside", "weights/way_out", "/etc/passwd", "../../etc/passwd", "..")
MORE_PLACES = (
    "",
    ".",
    "/dev/zero",
    "/proc/self/mem",
    "nowhere",
    "a\0b",
    "~",
    "file:///etc/passwd",
)
NUMBERS = (
    "-1",
    "0",
    "1",
    "4096",
    "9223372036854775807",
    "18446744073709551616",
    "x",
    "",
    "1e9",
    "0x10",
)
DIMS = (-1, 0, 1, 2, 3, 7, 8, 4096, 2**31, 2**62)
OPS = ("Identity", "Cast", "Reshape", "Expand", "Transpose", "MatMul", "Add", "If", "Loop", "Scan")
OPS += (
    "Gather",
    "Slice",
    "TensorScatter",
    "Tile",
    "ConstantOfShape",
    "GrokInt8Linear",
    "Nonsense",
)
OPS += ("GrokMoeExperts", "GrokSoftcapAttention", "Softmax", "RMSNormalization", "TopK")
DOMAINS = ("", "grok1", "com.microsoft", "ai.onnx.ml", "evil", "ai.onnx.preview.training")


def edited_graph(content: bytes, random: Random, outside: str) -> bytes:
    """Return the content of a graph's file with one thing changed.

    Args:
        content: of the file.
        random: decides what.
        outside: path of a file that is not of the bundle.
    """
    if random.randrange(6) == 0:
        return edited_bytes(content, random)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        return edited_bytes(content, random)
    edits = (
        _place,
        _place,
        _place,
        _tensor,
        _node,
        _node,
        _node,
        _attribute,
        _port,
        _model,
        _name,
    )
    random.choice(edits)(model, random, outside)
    return model.SerializeToString()


def _pick(items: Any, random: Random) -> Any:
    return items[random.randrange(len(items))] if len(items) else None


def _place(model: onnx.ModelProto, random: Random, outside: str) -> None:
    """Let a tensor lie elsewhere."""
    tensor = _pick([t for t in model.graph.initializer if t.external_data], random)
    if tensor is None:
        return
    entries = {entry.key: entry for entry in tensor.external_data}
    match random.randrange(8):
        case 0 | 1 | 2 if "location" in entries:
            places = PLACES if random.randrange(3) else MORE_PLACES
            entries["location"].value = random.choice(places).format(outside=outside)
        case 3 if "location" in entries:
            old = entries["location"].value
            entries["location"].value = random.choice(
                (f"./{old}", f"x/../{old}", f"/{old}", f"{old}/")
            )
        case 4:
            other = _pick([t for t in model.graph.initializer if t.external_data], random)
            del tensor.external_data[:]
            tensor.external_data.extend(other.external_data)
        case 5:
            extra = tensor.external_data.add()
            extra.key, extra.value = random.choice(("location", "offset", "x")), outside
        case 6:
            del tensor.external_data[random.randrange(len(tensor.external_data))]
        case _:
            entry = _pick(tensor.external_data, random)
            entry.value = random.choice(NUMBERS)


def _tensor(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Change an initialiser's shape, dtype or kind."""
    tensor = _pick(model.graph.initializer, random)
    if tensor is None:
        return
    match random.randrange(7):
        case 0 | 1 if tensor.dims:
            tensor.dims[random.randrange(len(tensor.dims))] = random.choice(DIMS)
        case 2:
            tensor.dims.append(random.choice(DIMS))
        case 3:
            tensor.data_type = random.randrange(24)
        case 4:
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = random.randbytes(random.choice((0, 1, 64)))
        case 5:
            model.graph.initializer.remove(tensor)
        case _:
            model.graph.initializer.append(tensor)


def _node(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Change a node, of the graph or of a function."""
    graphs = [model.graph, model.graph, *model.functions]
    nodes = _pick(graphs, random).node
    node = _pick(nodes, random)
    if node is None:
        return
    names = [name for other in nodes for name in (*other.input, *other.output)]
    match random.randrange(9):
        case 0:
            nodes.remove(node)
        case 1:
            nodes.append(node)
        case 2:
            node.op_type = random.choice((*OPS, _pick(nodes, random).op_type))
        case 3:
            node.domain = random.choice(DOMAINS)
        case 4 | 5 if node.input:
            node.input[random.randrange(len(node.input))] = random.choice((*names, "", "none"))
        case 6 if node.output:
            node.output[random.randrange(len(node.output))] = random.choice((*names, ""))
        case 7 if node.input:
            del node.input[random.randrange(len(node.input))]
        case _:
            node.input.append(random.choice((*names, "", "none")))


def _attribute(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Change an attribute, or the value of a constant."""
    nodes = [node for graph in (model.graph, *model.functions) for node in graph.node]
    node = _pick([node for node in nodes if node.attribute], random)
    if node is None:
        return
    attribute = _pick(node.attribute, random)
    match random.randrange(6):
        case 0:
            node.attribute.remove(attribute)
        case 1:
            attribute.i = random.choice((-1, 0, 1, 2, 3, 16, 2**31, 2**63 - 1))
        case 2:
            attribute.type = random.randrange(15)
        case 3:
            attribute.name = random.choice(("axis", "to", "x", "value", "groups", "perm"))
        case 4 if attribute.t.dims or attribute.t.raw_data:
            attribute.t.raw_data = edited_bytes(attribute.t.raw_data, random)
        case _:
            attribute.f = random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))


def _port(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Change what goes in or comes out."""
    ports = random.choice((model.graph.input, model.graph.output))
    port = _pick(ports, random)
    if port is None:
        return
    tensor = port.type.tensor_type
    match random.randrange(7):
        case 0:
            ports.remove(port)
        case 1:
            ports.append(port)
        case 2:
            port.name = random.choice(("x", "", "h", "logits", "k_out", "v_out", "start"))
        case 3:
            tensor.elem_type = random.randrange(24)
        case 4:
            tensor.ClearField("shape")
        case 5 if tensor.shape.dim:
            _pick(tensor.shape.dim, random).dim_value = random.choice(DIMS)
        case _:
            tensor.shape.dim.add().dim_param = random.choice(("B", "S", "T", "x"))


def _model(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Change versions, domains or functions."""
    match random.randrange(6):
        case 0:
            model.ir_version = random.choice((0, 1, 3, 10, 99, 2**40))
        case 1 if model.opset_import:
            _pick(model.opset_import, random).version = random.choice(
                (0, 1, 9, 18, 25, 999, 2**40)
            )
        case 2 if model.opset_import:
            model.opset_import.remove(_pick(model.opset_import, random))
        case 3 if model.functions:
            model.functions.remove(_pick(model.functions, random))
        case 4 if model.functions:
            function = _pick(model.functions, random)
            # It calls itself, or another that calls it.
            called = _pick(model.functions, random)
            node = function.node.add()
            node.op_type, node.domain = called.name, called.domain
            node.input.extend(called.input)
            node.output.extend(f"{name}_again" for name in called.output)
        case _:
            model.functions.extend([_pick(model.functions, random)] if model.functions else [])


def _name(model: onnx.ModelProto, random: Random, _outside: str) -> None:
    """Give something a name that is another's, none, or no text."""
    graph = model.graph
    thing = _pick([*graph.node, *graph.initializer, *graph.value_info, *model.functions], random)
    if thing is not None:
        thing.name = random.choice(("", "h", "start", "x" * 10_000, "../x", "a\0b", "\n"))
