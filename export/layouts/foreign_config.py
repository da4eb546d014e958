"""The hyper-parameters of weights in another layout.

They are those of a config.json, under any of the names in use; what that leaves open is taken from
shapes, and the rest as Grok-1 was published.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import ConfigError
from export_grok.export.layouts.names import EMBEDDING, FINAL_NORM, HEAD, Place
from export_grok.export.layouts.parts import Parts
from export_grok.regular_file import read_regular

__all__ = ["found_config"]

_log = logging.getLogger(__name__)

# A config.json with one of these keys was written by another program; else it is one of ours.
_FOREIGN = {"architectures", "hidden_size", "model_type", "transformers_version"}

# What others call our hyper-parameters; of two in one file the first counts.
_ALIASES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "emb_size",
    "num_attention_heads": "num_q_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "key_size",
    "moe_intermediate_size": "ffn_size",
    "intermediate_size": "ffn_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_selected_experts",
    "context_len": "sequence_len",
    "max_position_embeddings": "sequence_len",
    "pad_token_id": "pad_token",
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "rope_theta": "rope_base",
    "max_attn_value": "attn_logit_cap",
    "attn_logit_softcapping": "attn_logit_cap",
}

# Keys by which a model can be another than Grok-1, and the values with which it is not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attn_logit_softcapping_method": ("tanh",),
    "final_logit_softcapping": (0,),
    "residual_moe": (False,),
    "rope_rotate_half_dims": (False,),
    "rope_scaling": (None,),
    "rope_type": ("default",),
    "sliding_window": (None,),
}
_ACTIVATIONS = ("activation", "hidden_act", "hidden_activation")
_TANH_GELU = ("gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh")
_ERF_GELU = ("gelu", "gelu_python")


def found_config(path: Path, parts: Parts, groups: int | None) -> tuple[GrokConfig, str]:
    """Return the config of the weights in `path`, and what it comes from, for messages.

    Args:
        path: folder of the weights; its config.json need not be there.
        parts: the weights.
        groups: of rows with scales of their own, in matrices that are cut by rows; None for what
            the config says, or as many as were released.

    Raises:
        ConfigError: config.json cannot be read, or says that the model is not Grok-1.
    """
    place = path / "config.json"
    values: dict[str, Any] = {}
    source = "the published Grok-1 (there is no config.json)"
    if place.exists():
        values, source = _read(place), str(place)
    if groups is not None:
        values["row_parallel_scale_groups"] = groups
    if place.exists() and not _FOREIGN & values.keys():
        return GrokConfig.from_dict(values, source=source), source
    _check_neutral(values, parts, source)
    known = _known(values)
    try:
        config = GrokConfig(**{**GROK_1.to_dict(), **_of_shapes(known, parts), **known})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}; give a config of these weights") from error
    _warn_of_differences(config, source)
    return config, source


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_regular(path))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must hold an object")
    rope = values.get("rope_parameters")  # where newer programs put them
    return values | rope if isinstance(rope, dict) else values


def _check_neutral(values: Mapping[str, Any], parts: Parts, source: str) -> None:
    """Refuse what makes another model, and warn of what other programs do differently."""
    faults = [
        f"{key} is {values[key]!r}, not {neutral[0]!r}"
        for key, neutral in _NEUTRAL.items()
        if values.get(key) is not None and values[key] not in neutral
    ]
    for key in _ACTIVATIONS:
        activation = values.get(key, _TANH_GELU[0])
        if activation in _ERF_GELU:
            _log.warning(
                "%s: %s is %r, the exact gelu of a port; Grok-1 has its tanh approximation, and "
                "so have the engines here",
                source,
                key,
                activation,
            )
        elif activation not in _TANH_GELU:
            faults.append(f"{key} is {activation!r}, not {_TANH_GELU[0]!r}")
    for key in ("tie_word_embeddings", "tied_embeddings"):
        if values.get(key) is False and Place(HEAD) not in parts.places:
            faults.append(f"{key} is False, not True, and there is no head to compare")
    if values.get("router_logit_softcapping"):
        _log.warning(
            "%s: router_logit_softcapping is %s; the published Grok-1 has none, nor have the "
            "engines here",
            source,
            values["router_logit_softcapping"],
        )
    if faults:
        raise ConfigError(
            f"{source} describes another model than Grok-1: {'; '.join(faults)}. If these are "
            "Grok-1's weights all the same (some ports say so by mistake), give its config with "
            "--config"
        )


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return our hyper-parameters that the config names, whatever it calls them."""
    known: dict[str, Any] = {}
    ours = {field.name: field.name for field in dataclasses.fields(GrokConfig)}
    for key, name in (ours | _ALIASES).items():
        if values.get(key) is not None:
            known.setdefault(name, values[key])
    widening, width = values.get("widening_factor"), known.get("emb_size")
    if "ffn_size" not in known and isinstance(widening, int | float) and isinstance(width, int):
        # As the original program computes it: two thirds, up to a multiple of 8.
        known["ffn_size"] = -(-(int(widening * width) * 2 // 3) // 8) * 8
    return known


def _of_shapes(known: Mapping[str, Any], parts: Parts) -> dict[str, int]:
    """Return the hyper-parameters that names and shapes tell.

    A file for one rank tells none: how many there should be is not in it.
    """
    found: dict[str, int | None] = {
        "num_layers": _count(place.layer for place in parts.places),
        "num_experts": _count(place.expert for place in parts.places),
        "emb_size": _rows(parts, Place(FINAL_NORM)),
        "vocab_size": _rows(parts, Place(EMBEDDING)),
        "ffn_size": _rows(parts, Place("experts.gate.weight", 0, 0)),
    }
    queries = _rows(parts, Place("attention.query.weight", 0))
    keys = _rows(parts, Place("attention.key.weight", 0))
    heads, key_size = known.get("num_q_heads"), known.get("key_size")
    if key_size is None and isinstance(heads, int) and heads > 0:
        # Other programs share the width among the heads where no size is given.
        width = queries or known.get("emb_size") or found["emb_size"]
        key_size = found["key_size"] = width // heads if isinstance(width, int) else None
    if not isinstance(key_size, int) or key_size <= 0:
        key_size = GROK_1.key_size
    found["num_q_heads"] = queries // key_size if queries else None
    found["num_kv_heads"] = keys // key_size if keys else None
    return {name: number for name, number in found.items() if number}


def _count(numbers: Iterable[int | None]) -> int:
    return 1 + max((number for number in numbers if number is not None), default=-1)


def _rows(parts: Parts, place: Place) -> int | None:
    part = parts.places.get(place, {}).get(None)
    return None if part is None or not part.tensor.shape else part.tensor.shape[0]


def _warn_of_differences(config: GrokConfig, source: str) -> None:
    """Warn of values that are not the published ones, in a model that has Grok-1's sizes."""
    sizes = ("emb_size", "ffn_size", "vocab_size", "num_q_heads", "num_kv_heads", "key_size")
    if any(getattr(config, name) != getattr(GROK_1, name) for name in sizes):
        return
    for name, published in GROK_1.to_dict().items():
        if (value := getattr(config, name)) != published and name != "num_layers":
            _log.warning("%s: %s is %s; published is %s", source, name, value, published)
