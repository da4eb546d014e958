"""Taps are found by what they are for, in graphs and in parts, whatever values are called."""

from collections.abc import Iterable

import onnx_ir as ir
import pytest

from export_grok.engines.cut import SUM, cut
from export_grok.engines.probe import TAPS
from export_grok.engines.taps import PREFIX, tapped, taps_of
from tests.bundles import traced
from tests.conftest import TemplateOf, load_golden


def layer(template_of: TemplateOf) -> ir.Model:
    return template_of("tiny", "layer", "float32").clone()


def parts_of_a_rank() -> list[ir.Model]:
    template = traced("layer", load_golden("tiny").config, "float32", "float32", 2)
    return [part.model for part in cut(template)]


def computed(model: ir.Model) -> list[ir.Value]:
    """Return the values that nodes of a graph give."""
    return [value for node in model.graph for value in node.outputs]


def renamed(model: ir.Model) -> dict[str, str]:
    """Call all values that are computed otherwise; return their names by the ones before."""
    names = {}
    for number, value in enumerate(computed(model)):
        names[str(value.name)] = f"value {number}"
        value.name = f"value {number}"
    return names


def names_of(model: ir.Model) -> dict[str, str]:
    return {tap: str(value.name) for tap, value in taps_of(model).items()}


def producer(model: ir.Model, tap: str) -> str:
    node = taps_of(model)[tap].producer()
    assert node is not None
    return node.op_type


def test_a_layer_has_all_taps_each_another_value(template_of: TemplateOf) -> None:
    found = names_of(layer(template_of))
    assert found.keys() == {*TAPS}
    assert len(set(found.values())) == len(TAPS)


def test_each_is_what_makes_it_and_what_takes_it(template_of: TemplateOf) -> None:
    model = layer(template_of)
    taps = taps_of(model)
    assert producer(model, "attention") == "GrokInt8Linear"
    assert producer(model, "moe") == "GrokMoeExperts"
    assert producer(model, "probabilities") == "Softmax"
    (linear,) = [node for node, _ in taps["heads"].uses() if node.op_type == "GrokInt8Linear"]
    assert linear.outputs[0] is taps["attention"]
    (experts,) = [node for node, _ in taps["gates"].uses() if node.op_type == "GrokMoeExperts"]
    assert experts.outputs[0] is taps["moe"]
    assert taps["experts"] in experts.inputs
    kinds = [taps[tap].dtype for tap in ("gates", "experts")]
    assert kinds == [ir.DataType.FLOAT, ir.DataType.INT64]


def test_they_are_found_whatever_an_exporter_calls_its_values(template_of: TemplateOf) -> None:
    model = layer(template_of)
    before = names_of(model)
    names = renamed(model)
    assert names_of(model) == {tap: names[name] for tap, name in before.items()}


@pytest.mark.parametrize("kind", ["embedding", "head", "head_all"])
def test_other_graphs_have_none(kind: str, template_of: TemplateOf) -> None:
    assert taps_of(template_of("tiny", kind, "float32")) == {}  # type: ignore[arg-type]


# ---- as outputs


def test_with_taps_a_graph_gives_them_after_its_own_outputs(template_of: TemplateOf) -> None:
    model = layer(template_of)
    own = [value.name for value in model.graph.outputs]
    count = len(model.graph)
    more = tapped(model, names_of(model))
    assert [value.name for value in more.graph.outputs] == [
        *own,
        *(f"{PREFIX}{t}" for t in names_of(model)),
    ]
    assert [value.name for value in model.graph.outputs] == own
    assert len(model.graph) == count
    for tap, value in taps_of(model).items():
        (output,) = [one for one in more.graph.outputs if one.name == f"{PREFIX}{tap}"]
        node = output.producer()
        assert node is not None
        assert node.inputs[0] is not None
        assert node.inputs[0].name == value.name
        assert (output.type, output.shape) == (value.type, value.shape)


def test_a_value_that_is_called_like_a_tap_is_no_tap(template_of: TemplateOf) -> None:
    model = layer(template_of)
    before = names_of(model)
    others = [value for value in computed(model) if value.name not in before.values()]
    others[0].name = "moe"
    assert names_of(model) == before
    names = [value.name for value in tapped(model, before).graph.outputs]
    assert len(names) == len(set(names))


def test_values_that_a_graph_does_not_hold_are_left_out(template_of: TemplateOf) -> None:
    model = layer(template_of)
    names = names_of(model) | {"heads": "of another graph"}
    found = [value.name for value in tapped(model, names).graph.outputs]
    assert f"{PREFIX}heads" not in found
    assert len(found) == 3 + len(TAPS) - 1


# ---- parts


def only(model: ir.Model, kept: Iterable[str]) -> ir.Model:
    """Return the graph with the nodes of these types only."""
    graph = model.graph
    for node in reversed(list(graph)):
        if node.op_type not in kept:
            for value in node.outputs:
                for user, number in list(value.uses()):
                    user.replace_input_with(number, None)
                if value in graph.outputs:
                    graph.outputs.remove(value)
            graph.remove(node)
    return model


@pytest.mark.parametrize(
    ("kept", "taps"),
    [
        (["GrokMoeExperts"], {"moe"}),
        (["TopK"], set()),
        (["GrokInt8Linear"], {"attention"}),
        ([], set()),
    ],
)
def test_what_is_missing_gives_no_tap_and_no_error(
    kept: list[str], taps: set[str], template_of: TemplateOf
) -> None:
    assert names_of(only(layer(template_of), kept)).keys() == taps


def test_the_parts_of_a_rank_have_all_taps_together_and_sums_where_ranks_add() -> None:
    own = [names_of(model) for model in parts_of_a_rank()]
    assert len(own) == 3
    assert {tap for names in own for tap in names} == {*TAPS}
    assert all(names.keys() < {*TAPS} for names in own)
    # A later part tells what all ranks have.
    together = {tap: name for names in own for tap, name in names.items()}
    assert together["attention"] == together["moe"] == SUM


def test_parts_have_the_same_taps_whatever_their_values_are_called() -> None:
    for model in parts_of_a_rank():
        before = names_of(model)
        renamed(model)
        assert names_of(model).keys() == before.keys()
