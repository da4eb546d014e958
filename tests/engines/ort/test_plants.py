"""Mistakes planted in the graphs: the check against the original's numbers must go red."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.artifacts import Bundle
from export_grok.engines.ort.session import open_engine
from tests.bundles import BundleOf, graphs_changed
from tests.conftest import load_golden
from tests.engines.ort.conftest import VARIANTS
from tests.engines.ort.logits import TOLERANCE, distance

Plant = Callable[[ir.Model], None]


def distance_of(bundle: Bundle) -> float:
    golden = load_golden("tiny8")
    session = open_engine(bundle, batch=2, max_length=golden.config.sequence_len)
    return distance(session, golden)


def node_of(model: ir.Model, op_type: str) -> ir.Node:
    (node,) = [node for node in model.graph if node.op_type == op_type]
    return node


def moved(model: ir.Model, name: str, by: int) -> None:
    """Let the initialiser `name` begin so many bytes further on."""
    value = model.graph.initializers[name]
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    value.const_value = ir.ExternalTensor(
        tensor.location,
        int(tensor.offset or 0) + by,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=name,
        base_dir=tensor.base_dir,
    )


def length_of(model: ir.Model, name: str) -> int:
    tensor = model.graph.initializers[name].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    return int(tensor.length or 0)


# In the graphs as they are stamped, which the native kernels run.


def cap_of_20(model: ir.Model) -> None:
    node_of(model, "GrokSoftcapAttention").attributes["cap"] = ir.AttrFloat32("cap", 20.0)


def scale_of_head_size_9(model: ir.Model) -> None:
    attributes = node_of(model, "GrokSoftcapAttention").attributes
    attributes["scale"] = ir.AttrFloat32("scale", attributes["scale"].as_float() * (8 / 9) ** 0.5)


def taken(model: ir.Model, name: str, order: list[int]) -> None:
    """Put the parts of an initialiser, in its first axis, in another order."""
    value = model.graph.initializers[name]
    places = ir.Value(name=f"{name}.order", const_value=ir.tensor(np.array(order)))
    model.graph.register_initializer(places)
    users = list(value.uses())
    gather = ir.node("Gather", [value, places], {"axis": 0})
    for user, index in users:
        user.replace_input_with(index, gather.outputs[0])
    model.graph.insert_before(users[0].node, gather)


def scales_of_the_next_group(model: ir.Model) -> None:
    taken(model, "attention.out.scales", [1, 2, 3, 4, 5, 6, 7, 0])


def two_experts_exchanged(model: ir.Model) -> None:
    taken(model, "experts.up.weight", [1, 0, 2, 3, 4, 5, 6, 7])


def scales_of_two_experts_exchanged(model: ir.Model) -> None:
    taken(model, "experts.down.scales", [1, 0, 2, 3, 4, 5, 6, 7])


def gate_and_up_exchanged(model: ir.Model) -> None:
    node = node_of(model, "GrokMoeExperts")
    for gate, up in ((3, 5), (4, 6)):
        first, second = node.inputs[gate], node.inputs[up]
        node.replace_input_with(gate, second)
        node.replace_input_with(up, first)


def keys_a_row_too_far(model: ir.Model) -> None:
    moved(model, "attention.key.weight", 64)


NATIVE_PLANTS = [
    cap_of_20,
    scale_of_head_size_9,
    scales_of_the_next_group,
    two_experts_exchanged,
    scales_of_two_experts_exchanged,
    gate_and_up_exchanged,
    keys_a_row_too_far,
]


# In the graphs as they are lowered to the built-in kernels.


def no_soft_cap(model: ir.Model) -> None:
    node_of(model, "GroupQueryAttention").attributes["softcap"] = ir.AttrFloat32("softcap", 0.0)


def exact_gelu(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.op_type == "Gelu":
            node.attributes["approximate"] = ir.AttrString("approximate", "none")


def one_scale_group(model: ir.Model) -> None:
    for group in range(1, 8):
        name = f"attention.out.scales[{group}]"
        moved(model, name, -group * length_of(model, name))


def experts_exchanged(model: ir.Model) -> None:
    first, second = "experts.up.weight[0][0:128]", "experts.up.weight[1][0:128]"
    moved(model, first, length_of(model, first))
    moved(model, second, -length_of(model, second))


def two_terms_of_three(model: ir.Model) -> None:
    value = model.graph.initializers["grok1.term_units"]
    assert value.const_value is not None
    units = value.const_value.numpy().copy()
    units[1] = 0
    value.const_value = ir.tensor(units, name="grok1.term_units")


BUILTIN_PLANTS = [no_soft_cap, exact_gelu, one_scale_group, experts_exchanged, two_terms_of_three]


def test_graphs_without_a_mistake_agree(kernels: str, bundle_of: BundleOf, tmp_path: Path) -> None:
    same = graphs_changed(
        bundle_of("tiny8"), tmp_path / "same", lambda model: None, variant=VARIANTS[kernels]
    )
    assert distance_of(same) < TOLERANCE


@pytest.mark.usefixtures("native")
def test_parts_taken_in_their_own_order_are_no_mistake(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    def in_order(model: ir.Model) -> None:
        for name in ("attention.out.scales", "experts.up.weight", "experts.down.scales"):
            taken(model, name, list(range(8)))

    same = graphs_changed(bundle_of("tiny8"), tmp_path / "same", in_order, variant="")
    assert distance_of(same) < TOLERANCE


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("plant", NATIVE_PLANTS, ids=lambda plant: str(plant.__name__))
def test_a_mistake_planted_in_the_stamped_graphs_is_seen(
    bundle_of: BundleOf, tmp_path: Path, plant: Plant
) -> None:
    bundle = graphs_changed(bundle_of("tiny8"), tmp_path / "planted", plant, variant="")
    assert distance_of(bundle) > TOLERANCE


@pytest.mark.usefixtures("builtin")
@pytest.mark.parametrize("plant", BUILTIN_PLANTS, ids=lambda plant: str(plant.__name__))
def test_a_mistake_planted_in_the_lowered_graphs_is_seen(
    bundle_of: BundleOf, tmp_path: Path, plant: Plant
) -> None:
    bundle = graphs_changed(bundle_of("tiny8"), tmp_path / "planted", plant)
    assert distance_of(bundle) > TOLERANCE
