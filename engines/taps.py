"""Find the values of a layer's graph that a comparison wants to see, and make outputs of them."""

from collections.abc import Mapping

import onnx_ir as ir

__all__ = ["PREFIX", "tapped", "taps_of"]

# Of the names of further outputs: a value of the graph may be called as a tap is.
PREFIX = "tap."


def taps_of(model: ir.Model) -> dict[str, ir.Value]:
    """Return the values behind `engines.probe.TAPS`, as far as the graph holds them.

    They are found by what they are for, not by the names that an exporter gave: the output of
    attention is what its output matrix multiplies, and so on. In a lowered graph these nodes are
    gone, but the values keep their names.

    Args:
        model: a stamped layer, or a part of one.
    """
    found: dict[str, ir.Value | None] = {}
    for node in model.graph:
        inputs = node.inputs
        if node.op_type == "GrokInt8Linear" and _name(inputs[1]) == "attention.out.weight":
            found["heads"] = inputs[0]
            found.setdefault("attention", node.outputs[0])
        elif node.op_type == "GrokMoeExperts":
            found["gates"], found["experts"] = inputs[1], inputs[2]
            found.setdefault("moe", node.outputs[0])
        elif node.op_type == "TopK":
            found["probabilities"] = inputs[0]
        elif node.op_type == "RMSNormalization" and _name(inputs[1]) == "post_attn_norm.scale":
            found["attention"] = inputs[0]
        elif node.op_type == "RMSNormalization" and _name(inputs[1]) == "post_moe_norm.scale":
            found["moe"] = inputs[0]
    return {tap: value for tap, value in found.items() if value is not None}


def tapped(model: ir.Model, names: Mapping[str, str]) -> ir.Model:
    """Return a copy of the graph with values as further outputs, called by their taps.

    Args:
        model: a graph, stamped or lowered from a stamped one.
        names: of the values, by tap. Those that the graph does not hold are left out.
    """
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    for tap, name in names.items():
        value = values.get(name)
        if value is None:
            continue
        output = ir.Value(name=f"{PREFIX}{tap}", type=value.type, shape=value.shape)
        copy.graph.append(ir.node("Identity", [value], outputs=[output]))
        copy.graph.outputs.append(output)
    return copy


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name
