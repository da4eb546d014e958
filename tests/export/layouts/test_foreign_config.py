"""Hyper-parameters are found under any name in use; what is not Grok-1 is refused, or said."""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from export_grok.config import GROK_1, GrokConfig
from export_grok.errors import CheckpointError, ConfigError
from export_grok.export.layouts import foreign_source
from tests.conftest import FIXTURES, load_golden
from tests.export.layouts.written import floats, hf_config, save_safetensors, tensors


def config_of(folder: Path, values: Any, name: str = "tiny8", **options: Any) -> GrokConfig:
    """Return the config of a fixture's weights beside a config.json with these values."""
    save_safetensors(folder, tensors("keyfan", floats(load_golden(name))))
    (folder / "config.json").write_text(json.dumps(values))
    return foreign_source(folder, **options).config


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


@pytest.mark.parametrize("name", FIXTURES)
def test_names_of_transformers_are_known(name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    groups = golden.config.row_parallel_scale_groups
    assert config_of(tmp_path, hf_config(golden.config), name, groups=groups) == golden.config


def test_names_of_the_original_are_known_among_those_of_others(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    values = json.loads((golden.folder / "config.json").read_text())
    values |= {"model_type": "grok", "hidden_act": "gelu_new", "vocab_size": None}
    del values["row_parallel_scale_groups"], values["golden"]
    assert config_of(tmp_path, values) == golden.config


def test_a_config_of_ours_is_held_to_its_own_names(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    values = json.loads((golden.folder / "config.json").read_text())
    assert config_of(tmp_path, values) == golden.config
    with pytest.raises(ConfigError, match="unknown key 'num_layer'"):
        config_of(tmp_path, values | {"num_layer": 3})


def test_what_a_config_leaves_open_is_told_by_shapes(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    told = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_experts")
    values = without(hf_config(golden.config), *told, "num_key_value_heads")
    assert config_of(tmp_path, values) == golden.config
    values = without(hf_config(golden.config), "num_attention_heads", "num_key_value_heads")
    assert config_of(tmp_path, values | {"head_dim": 8}) == golden.config


def test_the_rest_is_as_grok_1_was_published(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    values = {"model_type": "grok-1", "head_dim": golden.config.key_size}
    made = config_of(tmp_path, values)
    sizes = ("num_layers", "emb_size", "num_q_heads", "num_kv_heads", "key_size", "ffn_size")
    assert made == dataclasses.replace(
        GROK_1, vocab_size=640, **{name: getattr(golden.config, name) for name in sizes}
    )


def test_the_width_of_experts_can_be_told_by_the_widening_factor(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    values = without(hf_config(golden.config), "intermediate_size") | {"widening_factor": 2.5}
    assert config_of(tmp_path, values) == golden.config
    with pytest.raises(CheckpointError, match=r"linear\.weight has shape \(216, 128\)"):
        config_of(tmp_path, values | {"widening_factor": 4})


def test_groups_are_those_that_are_asked_for_then_those_of_the_config_then_8(
    tmp_path: Path,
) -> None:
    values = hf_config(load_golden("tiny8").config)
    assert config_of(tmp_path, values).row_parallel_scale_groups == 8
    values |= {"row_parallel_scale_groups": 2}
    assert config_of(tmp_path, values).row_parallel_scale_groups == 2
    assert config_of(tmp_path, values, groups=4).row_parallel_scale_groups == 4
    with pytest.raises(ConfigError, match="ffn_size is 216; its rows cannot be cut into 16 equal"):
        config_of(tmp_path, values, groups=16)
    given = load_golden("tiny8").config
    assert config_of(tmp_path, {}, config=given, groups=2).row_parallel_scale_groups == 2
    with pytest.raises(ConfigError, match="cannot be cut into 16 equal"):
        config_of(tmp_path, {}, config=given, groups=16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 256}, r"has shape \(640, 128\); .*config\.json asks for \(640, 256\)"),
        ({"intermediate_size": 512}, r"has shape \(216, 128\); .* asks for \(512, 128\)"),
        ({"vocab_size": 1000}, r"in_out_embed\.weight has shape \(640, 128\); .* \(1000, 128\)"),
        ({"num_key_value_heads": 2}, r"key\.weight has shape \(64, 128\); .* \(16, 128\)"),
        ({"num_hidden_layers": 4}, r"layer 3 is missing"),
        ({"num_hidden_layers": 2}, r"decoder_layer\.2.* is none of the 2 layers"),
        ({"num_experts": 4}, r"moe\.4\.linear\.weight is none of the 3 layers and 4 experts"),
    ],
)
def test_a_config_and_shapes_that_contradict_are_both_told(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    values = hf_config(load_golden("tiny8").config) | changes
    with pytest.raises(CheckpointError, match=said):
        config_of(tmp_path, values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu', not 'gelu_tanh'"),
        (
            {"tie_word_embeddings": False},
            "tie_word_embeddings is False, not True, and there is no head",
        ),
        ({"residual_moe": True}, "residual_moe is True, not False"),
        ({"final_logit_softcapping": 50.0}, "final_logit_softcapping is 50.0, not 0"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}, not None"),
        ({"sliding_window": 4096}, "sliding_window is 4096, not None"),
        ({"attn_logit_softcapping_method": "clamp"}, "is 'clamp', not 'tanh'"),
        ({"hidden_size": "wide"}, "emb_size is 'wide'; it must be a number"),
        ({"num_attention_heads": 0}, "num_q_heads is 0; it must be a positive"),
        ({"eos_token_id": [1, 2]}, "eos_token is [1, 2]; it must be a number"),
    ],
)
def test_what_is_not_grok_1_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = hf_config(load_golden("tiny8").config) | changes
    with pytest.raises(ConfigError, match=re.escape(said)):
        config_of(tmp_path, values)
    given = load_golden("tiny8").config
    assert config_of(tmp_path, values, config=given) == given  # who knows better may say so


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"[" * 100_000, b"\xff"])
def test_a_config_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    save_safetensors(tmp_path, tensors("hpcai", floats(load_golden("tiny"))))
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        foreign_source(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "the exact gelu of a port"),
        ({"router_logit_softcapping": 30.0}, "router_logit_softcapping is 30.0; the published"),
    ],
)
def test_what_other_programs_do_differently_is_said(
    changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = hf_config(load_golden("tiny8").config)
    with caplog.at_level(logging.WARNING):
        config_of(tmp_path, values)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert config_of(tmp_path, values | changes) == load_golden("tiny8").config
    assert said in caplog.text


def test_values_of_a_model_as_large_as_grok_1_are_held_to_the_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A port writes a base of 100000 for the rotary embedding; no shape could tell."""
    save_safetensors(tmp_path, tensors("keyfan", floats(load_golden("tiny"))))
    values = hf_config(GROK_1) | {"head_dim": 128, "rope_theta": 1e5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="another model"):
        foreign_source(tmp_path)
    assert "rope_base is 100000.0; published is 10000.0" in caplog.text
    assert caplog.text.count("published is") == 1
