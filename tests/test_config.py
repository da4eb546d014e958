"""A config is right, or refused with name, value and what is allowed for all that is wrong."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.config import GROK_1, TENSOR_PARALLEL_SIZES, ExportOptions, GrokConfig
from export_grok.errors import ConfigError
from export_grok.export.checkpoint import released_files
from export_grok.export.parameters import model_parameters
from export_grok.weights import NUMPY_DTYPES

FIELDS = {field.name: field for field in dataclasses.fields(GrokConfig)}
WHOLE = [name for name, field in FIELDS.items() if field.type is int]
TOKENS = [name for name in WHOLE if name.endswith("_token")]
POSITIVE = [name for name in FIELDS if name not in TOKENS]

no_number = st.one_of(st.none(), st.booleans(), st.text(), st.lists(st.integers()))
not_positive = st.one_of(
    st.integers(max_value=0),
    st.floats(max_value=0, allow_nan=False),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)


def message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(GROK_1, **changes)
    return str(caught.value)


@settings(deadline=None)
@given(name=st.sampled_from(list(FIELDS)), value=no_number)
def test_what_is_no_number_is_refused_by_name_and_value(name: str, value: object) -> None:
    assert message(**{name: value}) == f"{name} is {value!r}; it must be a number"


@settings(deadline=None)
@given(name=st.sampled_from(POSITIVE), value=not_positive)
def test_what_is_not_positive_and_finite_is_refused(name: str, value: float) -> None:
    text = message(**{name: value})
    if name in WHOLE and isinstance(value, float):
        assert text == f"{name} is {value!r}; it must be a whole number"
    else:
        assert text == f"{name} is {value}; it must be a positive finite number"


@pytest.mark.parametrize("name", WHOLE)
def test_a_count_is_no_fraction(name: str) -> None:
    assert message(**{name: 4.0}) == f"{name} is 4.0; it must be a whole number"


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("value", [-1, 2**31])
def test_a_token_is_an_id(name: str, value: int) -> None:
    assert message(**{name: value}) == f"{name} is {value}; it must be a token id, 0 or more"
    assert getattr(dataclasses.replace(GROK_1, **{name: 0}), name) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_kv_heads": 7}, "48 query heads cannot be shared evenly by 7 key/value heads"),
        ({"key_size": 127, "row_parallel_scale_groups": 1}, "key_size is 127; .*an even size"),
        ({"num_selected_experts": 9}, "num_selected_experts is 9; there are 8 experts"),
        ({"ffn_size": 100}, "ffn_size is 100; its rows cannot be cut into 8 equal groups"),
        ({"key_size": 2, "num_q_heads": 6, "num_kv_heads": 2}, r"num_q_heads \* key_size is 12;"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(GROK_1, **changes)


@settings(deadline=None)
@given(names=st.sets(st.sampled_from(POSITIVE), min_size=1))
def test_all_faults_are_named_at_once(names: set[str]) -> None:
    text = message(**dict.fromkeys(names, -1))
    assert {part.split()[0] for part in text.split("; ") if " is -1" in part} == names


def test_all_contradictions_are_named_at_once() -> None:
    text = message(num_kv_heads=5, key_size=3, num_selected_experts=10, ffn_size=3)
    for part in ("48 query heads", "key_size is 3", "is 10; there are 8", "ffn_size is 3"):
        assert part in text


def test_a_frozen_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GROK_1.num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", FIELDS)
def test_a_misspelt_key_is_refused_with_the_near_one(name: str) -> None:
    values = GROK_1.to_dict()
    values[f"{name}x"] = values.pop(name)
    with pytest.raises(ConfigError) as caught:
        GrokConfig.from_dict(values, source="here")
    assert f"unknown key '{name}x', did you mean '{name}'?" in str(caught.value)
    missing = FIELDS[name].default is dataclasses.MISSING
    assert (f"{name} is missing" in str(caught.value)) == missing


def test_a_key_that_is_near_nothing_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^here: unknown key 'zzzzzz'$"):
        GrokConfig.from_dict(GROK_1.to_dict() | {"zzzzzz": 1}, source="here")


@pytest.mark.parametrize(
    ("key", "only", "other"),
    [
        ("tied_embeddings", True, False),
        ("activation", "gelu_tanh", "gelu"),
        ("column_parallel_scale_groups", 1, 8),
    ],
)
def test_what_does_not_vary_may_stand_there_with_its_only_value(
    key: str, only: object, other: object
) -> None:
    values: dict[str, Any] = GROK_1.to_dict()
    assert GrokConfig.from_dict(values | {key: only}) == GROK_1
    with pytest.raises(ConfigError) as caught:
        GrokConfig.from_dict(values | {key: other})
    assert f"{key} is {other!r}; only {only!r} is Grok-1" in str(caught.value)


def test_keys_that_only_inform_are_passed_over() -> None:
    values: dict[str, Any] = GROK_1.to_dict()
    told = {"widening_factor": 8, "quantisation": "int8", "golden": {"any": "thing"}}
    assert GrokConfig.from_dict(values | told) == GROK_1


def test_a_wrong_value_in_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GROK_1.to_dict() | {"num_layers": 0}))
    with pytest.raises(ConfigError) as caught:
        GrokConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: num_layers is 0")


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("num_layers", 10_001, "10000"),
        ("num_experts", 10**5, "10000"),
        ("key_size", 1 << 20, "10000"),
        ("emb_size", (1 << 24) + 1, "16777216"),
        ("vocab_size", 1 << 40, "16777216"),
        ("attn_logit_cap", 10**400, "a positive finite number"),
    ],
)
def test_a_size_beyond_any_model_is_refused(name: str, value: int, most: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be {most}"):
        GrokConfig.from_dict(GROK_1.to_dict() | {name: value})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_a_file_that_is_no_json_object_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GrokConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=str(path)):
            GrokConfig.from_file(path)


@st.composite
def configs(draw: st.DrawFn) -> GrokConfig:
    count = st.integers(1, 64)
    kv_heads, groups = draw(count), draw(st.sampled_from([1, 2, 8]))
    experts = draw(count)
    positive = st.floats(min_value=1e-30, max_value=1e30)
    token = st.integers(0, 2**31 - 1)
    return GrokConfig(
        num_layers=draw(count),
        emb_size=draw(count),
        num_q_heads=kv_heads * draw(count),
        num_kv_heads=kv_heads,
        key_size=2 * groups * draw(count),
        ffn_size=groups * draw(count),
        vocab_size=draw(count),
        num_experts=experts,
        num_selected_experts=draw(st.integers(1, experts)),
        sequence_len=draw(count),
        pad_token=draw(token),
        bos_token=draw(token),
        eos_token=draw(token),
        rms_norm_eps=draw(positive),
        rope_base=draw(positive),
        attn_logit_cap=draw(positive),
        attn_output_multiplier=draw(positive),
        embedding_multiplier_scale=draw(positive),
        output_multiplier_scale=draw(positive),
        row_parallel_scale_groups=groups,
    )


@settings(deadline=None)
@given(config=configs())
def test_a_config_survives_json(config: GrokConfig) -> None:
    assert GrokConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_preset_is_the_published_model() -> None:
    assert (GROK_1.q_size, GROK_1.kv_size) == (6144, 1024)
    assert GROK_1.attn_output_multiplier == pytest.approx(128**-0.5, rel=1e-15)
    assert GROK_1.embedding_multiplier_scale == pytest.approx(6144**0.5, rel=1e-15)
    assert GROK_1.output_multiplier_scale == pytest.approx(3**-0.5, rel=1e-15)
    assert (GROK_1.sequence_len, GROK_1.attn_logit_cap, GROK_1.rope_base) == (8192, 30, 10000)


def test_the_preset_has_the_published_files_and_bytes() -> None:
    files = released_files(GROK_1)
    assert len(files) == 770
    assert len({tuple(parameters) for parameters in files.values()}) == 2
    values: Counter[str] = Counter()
    for parameter in model_parameters(GROK_1).values():
        kind = "scales" if parameter.name.endswith(".scales") else parameter.dtype
        values[kind] += math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
    # By hand: experts, then query and out, key and value; router and norms, head, last norm.
    assert values["int8"] == 64 * (3 * 8 * 6144 * 32768 + 2 * 6144 * 6144 + 2 * 6144 * 1024)
    assert values["float32"] == 4 * (64 * (6144 * 8 + 4 * 6144) + 131072 * 6144 + 6144)
    assert values["int8"] + values["float32"] == 318_114_914_304
    # One group of columns, eight where rows are cut.
    columns = 8 * 2 * 32768 + 6144 + 2 * 1024
    assert values["scales"] == 2 * 64 * (columns + 8 * (8 * 6144 + 6144))


@pytest.mark.parametrize("size", TENSOR_PARALLEL_SIZES)
def test_a_rank_holds_an_even_share(size: int) -> None:
    rank = GROK_1.for_rank(size)
    held = (rank.num_q_heads, rank.num_kv_heads, rank.ffn_size, rank.vocab_size)
    assert (
        held
        == {
            1: (48, 8, 32768, 131072),
            2: (24, 4, 16384, 65536),
            4: (12, 2, 8192, 32768),
            8: (6, 1, 4096, 16384),
        }[size]
    )
    assert (rank.model, rank.tensor_parallel) == (GROK_1, size)


@pytest.mark.parametrize("size", [3, 0, -1, 5, 16])
def test_a_group_that_does_not_divide_the_model_is_refused_with_those_that_do(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        GROK_1.for_rank(size)
    assert f"evenly by {size} ranks; use 1, 2, 4, 8" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"num_kv_heads": 2}, "1, 2"),
        ({"num_kv_heads": 3}, "1"),
        ({"row_parallel_scale_groups": 4}, "1, 2, 4"),
        ({"row_parallel_scale_groups": 1}, "1, 2, 4, 8"),
        ({"vocab_size": 131070}, "1, 2"),
    ],
)
def test_what_divides_depends_on_heads_columns_groups_and_vocabulary(
    changes: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(GROK_1, **changes).for_rank(7)
    assert str(caught.value).endswith(f"use {allowed}")


@settings(deadline=None)
@given(config=configs(), size=st.sampled_from(TENSOR_PARALLEL_SIZES))
def test_shares_add_up_or_are_refused(config: GrokConfig, size: int) -> None:
    try:
        rank = config.for_rank(size)
    except ConfigError:
        assert size > 1
        return
    for part in ("num_q_heads", "num_kv_heads", "ffn_size", "vocab_size"):
        assert getattr(rank, part) * size == getattr(config, part)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'; use float32, float16, bfloat16"),
        ({"head": "int4"}, "head is 'int4'; use float32, int8"),
        ({"head": None}, "head is None; use float32, int8"),
    ],
)
def test_an_unknown_option_of_the_graphs_is_refused_with_those_there_are(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ExportOptions(**options)
    assert str(caught.value) == said
