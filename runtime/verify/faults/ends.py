"""Mistakes at both ends of the model: in the embedding and in the head."""

import onnx_ir as ir

from export_grok.config import GrokConfig
from export_grok.export.model import rounded
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.graph import multiplier_changed
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]


def _rounded(config: GrokConfig) -> float:
    return rounded(config.embedding_multiplier_scale, "bfloat16")


def _round_multiplier(mistake: Mistake) -> None:
    mistake.configure(embedding_multiplier_scale=_rounded(mistake.config))


def _plant_multiplier_rounded(model: ir.Model, config: GrokConfig) -> None:
    multiplier_changed(model, "h", _rounded(config))


def _is_1(multiplier: float) -> str | None:
    return "its multiplier is 1" if multiplier == 1 else None


FAULTS = (
    Fault(
        name="embedding_multiplier_missing",
        title="the embedding is not multiplied",
        graph="embedding",
        shows="h",
        mistake=lambda mistake: mistake.configure(embedding_multiplier_scale=1.0),
        plant=lambda model, config: multiplier_changed(model, "h", 1.0),
        harmless=lambda config: _is_1(config.embedding_multiplier_scale),
    ),
    Fault(
        name="embedding_multiplier_rounded_to_bf16",
        title="the embedding's multiplier is rounded to bfloat16, in float32 too",
        graph="embedding",
        shows="h",
        mistake=_round_multiplier,
        plant=_plant_multiplier_rounded,
        harmless=lambda config: (
            f"its multiplier, {config.embedding_multiplier_scale}, is a bfloat16 already"
            if _rounded(config) == config.embedding_multiplier_scale
            else None
        ),
    ),
    Fault(
        name="output_multiplier_missing",
        title="the logits are not multiplied",
        graph="head",
        shows="logits",
        mistake=lambda mistake: mistake.configure(output_multiplier_scale=1.0),
        plant=lambda model, config: multiplier_changed(model, "logits", 1.0),
        harmless=lambda config: _is_1(config.output_multiplier_scale),
    ),
)
