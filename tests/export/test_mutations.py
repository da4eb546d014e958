"""Common mistakes, planted one by one in the model: the check that it passes must go red.

The numbers were measured by planting the same mistakes in an independent numpy implementation:
the largest difference of the logits from the float32 goldens. A planted mistake must move logits
as far, within a factor of three; so it is the mistake that is meant.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from export_grok.config import GrokConfig
from export_grok.export import model as model_module
from export_grok.export.load import model_from_index
from export_grok.export.model import DecoderLayer, RMSNorm, Router, Routing, rounded
from export_grok.plugins.int8_linear import reference as int8_linear
from export_grok.plugins.moe_experts import reference as moe_experts
from export_grok.plugins.softcap_attention import reference as softcap_attention
from export_grok.weights import Weight, WeightIndex
from tests.conftest import FIXTURES, Golden
from tests.parity import FLOAT32_TOLERANCE, disagreeing

LOGITS = (
    "prefill_logits",
    "nocache_logits",
    "decode_logits",
    "padded_logits",
    "padded_decode_logits",
)


@dataclass
class Plant:
    """What a mistake may change before the model is built and run.

    Attributes:
        patch: for the code.
        config: of the model.
        weights: where each weight lies.
    """

    patch: pytest.MonkeyPatch
    config: GrokConfig
    weights: dict[str, Weight]

    def configure(self, **values: Any) -> None:
        self.config = dataclasses.replace(self.config, **values)

    def rename(self, new_name: Callable[[str], str]) -> None:
        self.weights = {new_name(name): weight for name, weight in self.weights.items()}


def disagreements(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Plant], None]
) -> tuple[dict[str, float], dict[str, float]]:
    """Plant the mistake and return what `disagreeing` says."""
    plant = Plant(monkeypatch, golden.config, dict(golden.index.weights))
    mistake(plant)
    index = WeightIndex(root=golden.folder, weights=plant.weights, files=golden.index.files)
    model = model_from_index(plant.config, index, "float32")
    return disagreeing(model, golden.arrays)


def nothing(plant: Plant) -> None:
    """No mistake."""


# ---- router and experts


def _routing(plant: Plant, change: Callable[[Routing], Routing]) -> None:
    original = Router.forward
    plant.patch.setattr(Router, "forward", lambda self, x: change(original(self, x)))


def gates_renormalised(plant: Plant) -> None:
    _routing(plant, lambda r: r._replace(gates=r.gates / r.gates.sum(-1, keepdim=True)))


def top_1_only(plant: Plant) -> None:
    _routing(plant, lambda r: r._replace(gates=r.gates * torch.tensor([1.0, 0.0])))


def router_soft_capped(plant: Plant) -> None:
    cap = plant.config.attn_logit_cap

    def capped(found: Routing) -> Routing:
        logits = softcap_attention.soft_cap(found.logits, cap)
        probabilities = torch.softmax(logits, dim=-1)
        return Routing(
            logits, probabilities, probabilities.gather(-1, found.experts), found.experts
        )

    _routing(plant, capped)


def exact_gelu(plant: Plant) -> None:
    plant.patch.setattr(moe_experts, "activation", lambda gate, up: functional.gelu(gate) * up)


def silu_for_gelu(plant: Plant) -> None:
    plant.patch.setattr(moe_experts, "activation", lambda gate, up: functional.silu(gate) * up)


def linear_and_linear_v_swapped(plant: Plant) -> None:
    other = {"gate": "up", "up": "gate"}

    def swapped(name: str) -> str:
        return ".".join(
            other.get(word, word) if "experts" in name else word for word in name.split(".")
        )

    plant.rename(swapped)


# ---- weights


def layers_in_numeric_order(plant: Plant) -> None:
    stored = sorted(range(plant.config.num_layers), key=str)

    def renumbered(name: str) -> str:
        head, number, *rest = f"{name}.".split(".")
        if head != "layers":
            return name
        return ".".join([head, str(stored.index(int(number))), *rest]).removesuffix(".")

    plant.rename(renumbered)


def _scale_rows(plant: Plant, group_of_row: Callable[[int, int], Tensor]) -> None:
    def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        groups = group_of_row(weight.shape[-2], scales.shape[-2])
        return (weight.float() * scales.float()[..., groups, :]).to(dtype)

    for module in (int8_linear, moe_experts):
        plant.patch.setattr(module, "dequantise", dequantise)


def scale_groups_interleaved(plant: Plant) -> None:
    _scale_rows(plant, lambda rows, groups: torch.arange(rows) % groups)


def only_first_scale_group(plant: Plant) -> None:
    _scale_rows(plant, lambda rows, groups: torch.zeros(rows, dtype=torch.int64))


# ---- attention


def no_attention_soft_cap(plant: Plant) -> None:
    plant.patch.setattr(softcap_attention, "soft_cap", lambda logits, cap: logits)


def root_of_head_size_for_multiplier(plant: Plant) -> None:
    plant.configure(attn_output_multiplier=plant.config.key_size**-0.5)


def split(x: Tensor, *sizes: int) -> Tensor:
    """Return x with its last axis cut into axes of these sizes."""
    return x.reshape(*x.shape[:-1], *sizes)


Rotate = Callable[[Tensor, Tensor, int, float], Tensor]


def _rotary(plant: Plant, change: Callable[[Rotate], Rotate]) -> None:
    plant.patch.setattr(model_module, "rotary_embedding", change(model_module.rotary_embedding))


def interleaved_rope(plant: Plant) -> None:
    def change(rotate: Rotate) -> Rotate:
        def interleaved(x: Tensor, position: Tensor, head_size: int, base: float) -> Tensor:
            """Pairs (2j, 2j + 1) turn together."""
            halves = split(x, -1, head_size // 2, 2).transpose(-1, -2).flatten(2)
            turned = rotate(halves, position, head_size, base)
            return split(turned, -1, 2, head_size // 2).transpose(-1, -2).flatten(2)

        return interleaved

    _rotary(plant, change)


def positions_start_at_1(plant: Plant) -> None:
    def change(rotate: Rotate) -> Rotate:
        return lambda x, position, size, base: rotate(x, position + 1, size, base)

    _rotary(plant, change)


def decode_position_off_by_one(plant: Plant) -> None:
    def change(rotate: Rotate) -> Rotate:
        def late(x: Tensor, position: Tensor, size: int, base: float) -> Tensor:
            return rotate(x, position + 1 if x.shape[1] == 1 else position, size, base)

        return late

    _rotary(plant, change)


def _attention(plant: Plant, change: Callable[..., Any]) -> None:
    """`change` gets the op, and its arguments."""
    original = softcap_attention.softcap_attention_
    plant.patch.setattr(
        model_module, "softcap_attention_", lambda *arguments: change(original, *arguments)
    )


def v_rotated(plant: Plant) -> None:
    config, rotate = plant.config, model_module.rotary_embedding

    def change(op: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        start = rest[2]
        position = start[:, None] + torch.arange(value.shape[1])
        turned = rotate(value, position, config.key_size, config.rope_base)
        y: Tensor = op(query, key, turned, *rest)
        return y

    _attention(plant, change)


def query_heads_strided_over_kv_heads(plant: Plant) -> None:
    heads, shared = plant.config.num_q_heads, plant.config.num_kv_heads

    def change(op: Any, query: Tensor, *rest: Any) -> Tensor:
        """Query head h reads key/value head h % Hkv."""
        strided = split(query, heads // shared, shared, -1).transpose(2, 3).flatten(2)
        y: Tensor = op(strided, *rest)
        return split(y, shared, heads // shared, -1).transpose(2, 3).flatten(2)

    _attention(plant, change)


# ---- norms


def eps_1e_6(plant: Plant) -> None:
    plant.configure(rms_norm_eps=1e-6)


def gain_1_plus_scale(plant: Plant) -> None:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.scale.shape, 1 + self.scale, self.eps)

    plant.patch.setattr(RMSNorm, "forward", forward)


def _layer(plant: Plant, add: Callable[[RMSNorm, Tensor, Tensor], Tensor]) -> None:
    def forward(
        self: DecoderLayer, h: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, k_cache, v_cache = self.attention(self.pre_attn_norm(h), start, k_cache, v_cache)
        h = add(self.post_attn_norm, h, y)
        x = self.pre_moe_norm(h)
        routing = self.router(x)
        h = add(self.post_moe_norm, h, self.experts(x, routing.gates, routing.experts))
        return h, k_cache, v_cache

    plant.patch.setattr(DecoderLayer, "forward", forward)


def no_post_norms(plant: Plant) -> None:
    _layer(plant, lambda norm, h, y: h + y)


def post_norm_after_the_add(plant: Plant) -> None:
    _layer(plant, lambda norm, h, y: norm(h + y))


# ---- embedding and head


def embedding_multiplier_missing(plant: Plant) -> None:
    plant.configure(embedding_multiplier_scale=1.0)


def embedding_multiplier_rounded_to_bf16(plant: Plant) -> None:
    multiplier = rounded(plant.config.embedding_multiplier_scale, "bfloat16")
    plant.configure(embedding_multiplier_scale=multiplier)


def output_multiplier_missing(plant: Plant) -> None:
    plant.configure(output_multiplier_scale=1.0)


# ---- the table: mistake, largest difference of the logits of tiny, tiny8 and deep13

UNSEEN = 2.6e-5  # the largest difference without a mistake

MISTAKES: dict[Callable[[Plant], None], tuple[float, float, float]] = {
    gates_renormalised: (0.0002, 0.00028, 0.0008),
    router_soft_capped: (0.033, 0.76, 0.39),
    no_attention_soft_cap: (0.85, 0.89, 1.9),
    exact_gelu: (0.0016, 0.0023, 0.0024),
    silu_for_gelu: (1.7, 1.3, 2.5),
    linear_and_linear_v_swapped: (4.4, 3.4, 3.6),
    layers_in_numeric_order: (1e-05, 2.6e-05, 3.7),
    scale_groups_interleaved: (1e-05, 3.6, 3.8),
    only_first_scale_group: (1e-05, 4, 3.3),
    root_of_head_size_for_multiplier: (1.5, 2.6e-05, 8.1e-06),
    interleaved_rope: (5.5, 3.8, 3.5),
    positions_start_at_1: (1.2e-05, 1.6e-05, 8.1e-06),
    decode_position_off_by_one: (3.6, 2.5, 2.2),
    v_rotated: (5.4, 3.7, 4.2),
    eps_1e_6: (0.00055, 0.77, 0.00083),
    gain_1_plus_scale: (6.3, 5.1, 6.8),
    no_post_norms: (3.2, 2.6, 3.8),
    post_norm_after_the_add: (2.7, 2.4, 4.1),
    query_heads_strided_over_kv_heads: (4.7, 4.5, 5.6),
    embedding_multiplier_missing: (2.7, 3.3, 3.6),
    embedding_multiplier_rounded_to_bf16: (0.022, 0.014, 0.54),
    output_multiplier_missing: (2.6, 2.1, 2.3),
    top_1_only: (3, 3, 3.4),
}

# Logits cannot tell: a norm follows the experts, and rotary positions are relative.
BETTER_SEEN_IN = {gates_renormalised: "expert_gate", positions_start_at_1: "kv_first_k"}

SEEN = [
    pytest.param(mistake, name, expected, id=f"{mistake.__name__}-{name}")
    for mistake, numbers in MISTAKES.items()
    for name, expected in zip(FIXTURES, numbers, strict=True)
    if expected > UNSEEN or mistake in BETTER_SEEN_IN
]


def test_every_mistake_shows_on_some_fixture() -> None:
    shown = {case.values[0] for case in SEEN}
    assert shown == MISTAKES.keys()


def test_the_check_is_green_without_a_mistake(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, _ = disagreements(golden, monkeypatch, nothing)
    assert wrong == {}


@pytest.mark.parametrize(("mistake", "name", "expected"), SEEN)
def test_the_check_goes_red_under_a_mistake(
    mistake: Callable[[Plant], None],
    name: str,
    expected: float,
    golden_of: Callable[[str], Golden],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong, every = disagreements(golden_of(name), monkeypatch, mistake)
    assert wrong
    if mistake in BETTER_SEEN_IN:
        assert every[BETTER_SEEN_IN[mistake]] > 100 * FLOAT32_TOLERANCE
    if expected > UNSEEN:
        assert max(every[array] for array in LOGITS) > FLOAT32_TOLERANCE
        # Not the largest of all: one choice of experts near a tie moves one array much farther.
        assert any(expected / 3 < every[array] < 3 * expected for array in LOGITS)
    else:
        assert not wrong.keys() & {*LOGITS, "hidden"}
