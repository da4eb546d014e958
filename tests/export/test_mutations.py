"""Common mistakes, planted one by one in the model: the check that it passes must go red.

The mistakes are those of the fault library. The numbers were measured by planting the same ones in
an independent numpy implementation: the largest difference of the logits from the float32 goldens.
A planted mistake must move logits as far, within a factor of three; so it is the mistake that is
meant.
"""

import dataclasses
from collections.abc import Callable

import pytest

from export_grok.export.load import model_from_index
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.library import FAULTS, fault_named
from export_grok.runtime.verify.faults.mistake import mistaken
from tests.conftest import FIXTURES, Golden
from tests.parity import FLOAT32_TOLERANCE, disagreeing

LOGITS = (
    "prefill_logits",
    "nocache_logits",
    "decode_logits",
    "padded_logits",
    "padded_decode_logits",
)

NOTHING = dataclasses.replace(FAULTS["eps_1e_6"], name="nothing", mistake=lambda mistake: None)


def disagreements(golden: Golden, fault: Fault) -> tuple[dict[str, float], dict[str, float]]:
    """Make the mistake and return what `disagreeing` says."""
    with mistaken(fault, TorchProbe(golden.config, golden.index)) as wrong:
        model = model_from_index(wrong.config, wrong.index, "float32")
        return disagreeing(model, golden.arrays)


# ---- the table: mistake, largest difference of the logits of tiny, tiny8 and deep13

UNSEEN = 2.6e-5  # the largest difference without a mistake

MISTAKES: dict[str, tuple[float, float, float]] = {
    "gates_renormalised": (0.0002, 0.00028, 0.0008),
    "router_soft_capped": (0.033, 0.76, 0.39),
    "no_attention_soft_cap": (0.85, 0.89, 1.9),
    "exact_gelu": (0.0016, 0.0023, 0.0024),
    "silu_for_gelu": (1.7, 1.3, 2.5),
    "linear_and_linear_v_swapped": (4.4, 3.4, 3.6),
    "layers_in_numeric_order": (1e-05, 2.6e-05, 3.7),
    "scale_groups_interleaved": (1e-05, 3.6, 3.8),
    "only_first_scale_group": (1e-05, 4, 3.3),
    "root_of_head_size_for_multiplier": (1.5, 2.6e-05, 8.1e-06),
    "interleaved_rope": (5.5, 3.8, 3.5),
    "positions_start_at_1": (1.2e-05, 1.6e-05, 8.1e-06),
    "decode_position_off_by_one": (3.6, 2.5, 2.2),
    "v_rotated": (5.4, 3.7, 4.2),
    "eps_1e_6": (0.00055, 0.77, 0.00083),
    "gain_1_plus_scale": (6.3, 5.1, 6.8),
    "no_post_norms": (3.2, 2.6, 3.8),
    "post_norm_after_the_add": (2.7, 2.4, 4.1),
    "query_heads_strided_over_kv_heads": (4.7, 4.5, 5.6),
    "embedding_multiplier_missing": (2.7, 3.3, 3.6),
    "embedding_multiplier_rounded_to_bf16": (0.022, 0.014, 0.54),
    "output_multiplier_missing": (2.6, 2.1, 2.3),
    "top_1_only": (3, 3, 3.4),
}

# Logits cannot tell: a norm follows the experts, and rotary positions are relative.
BETTER_SEEN_IN = {"gates_renormalised": "expert_gate", "positions_start_at_1": "kv_first_k"}

SEEN = [
    pytest.param(mistake, name, expected, id=f"{mistake}-{name}")
    for mistake, numbers in MISTAKES.items()
    for name, expected in zip(FIXTURES, numbers, strict=True)
    if expected > UNSEEN or mistake in BETTER_SEEN_IN
]


def test_every_mistake_shows_on_some_fixture() -> None:
    shown = {case.values[0] for case in SEEN}
    assert shown == MISTAKES.keys()


def test_the_check_is_green_without_a_mistake(golden: Golden) -> None:
    wrong, _ = disagreements(golden, NOTHING)
    assert wrong == {}


@pytest.mark.parametrize(("mistake", "name", "expected"), SEEN)
def test_the_check_goes_red_under_a_mistake(
    mistake: str, name: str, expected: float, golden_of: Callable[[str], Golden]
) -> None:
    wrong, every = disagreements(golden_of(name), fault_named(mistake))
    assert wrong
    if mistake in BETTER_SEEN_IN:
        assert every[BETTER_SEEN_IN[mistake]] > 100 * FLOAT32_TOLERANCE
    if expected > UNSEEN:
        assert max(every[array] for array in LOGITS) > FLOAT32_TOLERANCE
        # Not the largest of all: one choice of experts near a tie moves one array much farther.
        assert any(expected / 3 < every[array] < 3 * expected for array in LOGITS)
    else:
        assert not wrong.keys() & {*LOGITS, "hidden"}
