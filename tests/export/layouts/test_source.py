"""Grok-1 in the layouts of others is Grok-1: the same tensors, and what the original computed."""

import dataclasses
import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from export_grok.config import GrokConfig
from export_grok.engines.ort.session import open_engine
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import CheckpointError, ConfigError
from export_grok.export.checkpoint import open_weights
from export_grok.export.kv_cache import KVCache
from export_grok.export.layouts import ForeignSource, foreign_source
from export_grok.export.load import model_from_index
from export_grok.export.model import Grok1
from export_grok.export.parameters import model_parameters
from export_grok.export.tensor_source import TensorSource
from export_grok.weights import NUMPY_DTYPES, WeightReader
from tests.bundles import traced_once as traced_once
from tests.conftest import FIXTURES, Golden, load_golden
from tests.engines.ort.logits import TOLERANCE as ENGINE_TOLERANCE
from tests.engines.ort.logits import distance as engine_distance
from tests.export.layouts.written import (
    LAYOUTS,
    Tensors,
    by_rank,
    float8,
    floats,
    hf_config,
    parts_of_ranks,
    released,
    save_bin,
    save_safetensors,
    tensors,
)
from tests.parity import FLOAT32_TOLERANCE, disagreeing, forward

Write = Callable[..., None]


def opened(folder: Path, golden: Golden, groups: int | None = None) -> ForeignSource:
    """Return the source in `folder`, with as many groups as the fixture has."""
    (folder / "config.json").write_text(json.dumps(hf_config(golden.config)))
    return foreign_source(folder, groups=groups or golden.config.row_parallel_scale_groups)


def array(source: TensorSource, name: str) -> NDArray[Any]:
    """Return a parameter as it is offered."""
    parameter = model_parameters(source.config)[name]
    content = b"".join(bytes(block) for block in source.blocks(name))
    return np.frombuffer(content, NUMPY_DTYPES[parameter.dtype]).reshape(parameter.shape)


def model(source: TensorSource, folder: Path) -> Grok1:
    config, index = open_weights(released(source, folder))
    return model_from_index(config, index, "float32")


def distance(source: TensorSource, golden: Golden, folder: Path) -> NDArray[Any]:
    """Return how far the logits of the prompts are from those of the original in float32."""
    tokens = golden.arrays["tokens"]
    made = model(source, folder)
    cache = KVCache.allocate(made.config, batch=2, length=tokens.shape[1], dtype="float32")
    logits = forward(made, tokens, [0, 0], cache)
    apart: NDArray[Any] = np.abs(logits - golden.arrays["f32/prefill_logits"])
    return apart


def differing(source: TensorSource, golden: Golden) -> set[str]:
    """Return which parameters are not those of the fixture, bit for bit."""
    reader = WeightReader(golden.index.root)
    return {
        weight.name
        for weight in golden.index
        if array(source, weight.name).tobytes() != reader.read(weight).tobytes()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "write", "files", "index"),
    [
        ("tiny", save_safetensors, 1, False),
        ("tiny8", save_bin, 2, True),
        ("deep13", save_safetensors, 3, True),
    ],
)
def test_float32_gives_back_the_release_bit_for_bit(
    layout: str, name: str, write: Write, files: int, index: bool, tmp_path: Path
) -> None:
    golden = load_golden(name)
    write(tmp_path, tensors(layout, floats(golden), head=index), files, index=index)
    source = opened(tmp_path, golden)
    assert (source.layout, source.config) == (layout, golden.config)
    assert differing(source, golden) == set()
    for weight in golden.index:
        error = source.error(weight.name)
        assert (error is None) == (weight.dtype == "float32")
        assert error is None or error.relative_error == 0


@pytest.mark.parametrize(
    ("layout", "name"), [("hpcai", "tiny8"), ("keyfan", "deep13"), ("xai", "tiny")]
)
def test_every_array_of_the_original_comes_out(layout: str, name: str, tmp_path: Path) -> None:
    golden = load_golden(name)
    save_safetensors(tmp_path / "theirs", tensors(layout, floats(golden)))
    source = opened(tmp_path / "theirs", golden)
    wrong, every = disagreeing(model(source, tmp_path / "ours"), golden.arrays)
    assert wrong == {} and every


@pytest.mark.usefixtures("traced_once")
def test_the_onnxruntime_engine_of_it_computes_what_the_original_did(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    (tmp_path / "theirs").mkdir()
    for rank, part in enumerate(parts_of_ranks(tensors("xai", floats(golden)), 2)):
        torch.save(part, tmp_path / "theirs" / f"pytorch_model-{rank:03}.bin")
    ours = released(opened(tmp_path / "theirs", golden), tmp_path / "ours")
    bundle = engine_from_source(ours, tmp_path / "engine", backend="ort")
    assert engine_distance(open_engine(bundle, batch=2, max_length=64), golden) < ENGINE_TOLERANCE


def half(source: Tensors) -> Tensors:
    """Round as a port does: products in bfloat16, all saved in float16."""
    return {name: tensor.to(torch.bfloat16).to(torch.float16) for name, tensor in source.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FIXTURES)
def test_bfloat16_gives_back_int8_and_scales_bit_for_bit(
    layout: str, name: str, tmp_path: Path
) -> None:
    """Only what was float32 is rounded: norms, router, embedding."""
    golden = load_golden(name)
    theirs = tensors(layout, floats(golden), torch.bfloat16)
    rounding = half if layout == "keyfan" else dict
    save_safetensors(tmp_path, rounding(theirs))
    source = opened(tmp_path, golden)
    reader = WeightReader(golden.index.root)
    others = 0
    for weight in golden.index:
        made, expected = array(source, weight.name), reader.read(weight)
        if weight.dtype == "float32":
            (rounded,) = rounding({"": torch.tensor(expected).bfloat16()}).values()
            assert np.array_equal(made, rounded.float().numpy())
        elif weight.dtype == "bfloat16":
            others += int((made != expected).sum())
    # Of 8 values in a group of deep13 another scale says the same within bfloat16.
    assert others == (1 if name == "deep13" else 0)


@pytest.mark.parametrize(("layout", "name"), [("hpcai", "tiny"), ("xai", "deep13")])
def test_from_bfloat16_logits_are_nearer_than_those_of_the_original_in_bfloat16(
    layout: str, name: str, tmp_path: Path
) -> None:
    golden = load_golden(name)
    save_safetensors(tmp_path / "theirs", tensors(layout, floats(golden), torch.bfloat16))
    found = distance(opened(tmp_path / "theirs", golden), golden, tmp_path / "ours")
    original = golden.arrays["bf16/prefill_logits"] - golden.arrays["f32/prefill_logits"]
    assert found.mean() < np.abs(original).mean()


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_what_its_codes_and_scales_say_within_half_a_step(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    golden = load_golden("tiny8")
    theirs = float8(tensors("xai", floats(golden)), kind, dtype)
    save_safetensors(tmp_path, theirs)
    source = opened(tmp_path, golden)
    for part, name in (
        ("self_attn.o_proj", "attention.out"),
        ("block_sparse_moe.experts.5.w1", "experts.gate"),
        ("block_sparse_moe.experts.5.w2", "experts.down"),
    ):
        theirs_name = f"model.layers.1.{part}.weight"
        codes = theirs[theirs_name].float().numpy()
        if kind == "block":
            scale = theirs[f"{theirs_name}_scale_inv"].numpy()
            factor = scale.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
        else:
            factor = theirs[f"{theirs_name}_scale"].numpy().reshape(-1, 1)
        weight = array(source, f"layers.1.{name}.weight")
        scales = array(source, f"layers.1.{name}.scales").astype(np.float32)
        if "experts" in name:
            weight, scales = weight[5], scales[5]
        step = scales.repeat(len(weight) // len(scales), 0)
        assert (np.abs((codes * factor).T - weight * step) <= 0.50001 * step).all()
        error = source.error(f"layers.1.{name}.weight")
        assert error is not None and 0 < (error.relative_error or 0) < 0.01


def test_from_float8_logits_keep_their_shape(tmp_path: Path) -> None:
    """4 bits of significand move them by less than a quarter of their spread."""
    golden = load_golden("tiny")
    save_safetensors(tmp_path / "theirs", float8(tensors("hpcai", floats(golden)), "row"))
    found = distance(opened(tmp_path / "theirs", golden), golden, tmp_path / "ours")
    assert found.mean() < golden.arrays["f32/prefill_logits"].std() / 4


def test_other_groups_of_rows_are_within_the_noise_of_int8(tmp_path: Path) -> None:
    """The released int8 itself has about 0.6% of noise; another int8 of the same has no more."""
    golden = load_golden("tiny")
    save_safetensors(tmp_path, tensors("hpcai", floats(golden)))
    source = opened(tmp_path, golden, groups=8)
    assert source.config.row_parallel_scale_groups == 8
    changed = {name for name in differing(source, golden) if name.endswith(".weight")}
    by_rows = ("attention.out.weight", "experts.down.weight")
    assert changed == {name for name in golden.index.weights if name.endswith(by_rows)}
    for name in changed:
        error = source.error(name)
        assert error is not None and 0 < (error.relative_error or 0) < 0.006


# Mistakes that a layout invites: each as an edit of right tensors, by name.
def swapped(source: Tensors, one: str, other: str) -> Tensors:
    made = dict(source)
    for name in source:
        twin = name.replace(one, other)
        if one in name and twin in source:
            made[name], made[twin] = source[twin], source[name]
    return made


def transposed(source: Tensors) -> Tensors:
    return {
        name: tensor.T.contiguous() if tensor.ndim == 2 and len(set(tensor.shape)) == 1 else tensor
        for name, tensor in source.items()
    }


def sorted_as_text(source: Tensors) -> Tensors:
    """Number layers in the order of the released files."""
    order = {str(layer): str(place) for place, layer in enumerate(sorted(range(13), key=str))}
    made = {}
    for name, tensor in source.items():
        stem, kind, number, *rest = name.split(".")
        made[".".join((stem, kind, order.get(number, number), *rest))] = tensor
    return made


MISTAKES: dict[str, dict[str, Callable[[Tensors], Tensors]]] = {
    "hpcai": {
        "gate and up swapped": lambda t: swapped(t, ".linear.", ".linear_v."),
        "experts permuted": lambda t: swapped(t, ".experts.0.", ".experts.7."),
        "norms swapped": lambda t: swapped(t, ".pre_attn_norm.", ".post_attn_norm."),
    },
    "keyfan": {
        "gate and up swapped": lambda t: swapped(t, ".linear.weight", ".linear_v.weight"),
        "experts permuted": lambda t: swapped(t, ".moe.0.", ".moe.7."),
        "norms swapped": lambda t: swapped(t, ".rms_norm_1.", ".rms_norm_2."),
    },
    "xai": {
        "gate and up swapped": lambda t: swapped(t, ".w1.", ".w3."),
        "experts permuted": lambda t: swapped(t, ".experts.0.", ".experts.7."),
        "norms swapped": lambda t: swapped(t, ".post_moe_norm.", ".pre_moe_norm."),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mistakes_that_a_layout_invites_are_far_from_the_original(
    layout: str, tmp_path: Path
) -> None:
    mistakes = MISTAKES[layout] | {
        "square matrices not transposed": transposed,
        "layers sorted as text": sorted_as_text,
    }
    for number, edit in enumerate(mistakes.values()):
        golden = load_golden("deep13" if edit is sorted_as_text else "tiny")
        folder = tmp_path / str(number)
        save_safetensors(folder / "theirs", edit(tensors(layout, floats(golden))))
        found = distance(opened(folder / "theirs", golden), golden, folder / "ours")
        assert found.max() > 1000 * FLOAT32_TOLERANCE, list(mistakes)[number]


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny8", 8)])
def test_parts_of_ranks_are_joined(name: str, ranks: int, tmp_path: Path) -> None:
    golden = load_golden(name)
    theirs = tensors("xai", floats(golden), head=True)
    common, parts = by_rank(theirs, ranks)
    for folder in ("experts", "all", "bin"):
        (tmp_path / folder).mkdir()
    save_file(common, tmp_path / "experts" / "model-00000-TP-common.safetensors")
    for rank, part in enumerate(parts):
        save_file(part, tmp_path / "experts" / f"model-00001-TP-{rank:03}.safetensors")
    for rank, part in enumerate(parts_of_ranks(theirs, ranks)):
        save_file(part, tmp_path / "all" / f"model-TP-{rank:03}.safetensors")
        torch.save(part, tmp_path / "bin" / f"pytorch_model-{rank:03}.bin")
    for folder in ("experts", "all", "bin"):
        source = opened(tmp_path / folder, golden)
        assert differing(source, golden) == set()
        files = source.origins("layers.1.experts.down.weight")
        assert len(files) == ranks and set(files) <= source.files.keys()


def test_parts_of_float8_have_scales_of_their_own(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    whole = tensors("xai", floats(golden))
    common, parts = by_rank(whole, 8)
    save_file(common, tmp_path / "model-TP-common.safetensors")
    for rank, part in enumerate(parts):
        save_file(float8(part, "tensor"), tmp_path / f"model-TP-{rank:03}.safetensors")
    source = opened(tmp_path, golden)
    made = array(source, "layers.2.experts.up.weight")
    step = array(source, "layers.2.experts.up.scales").astype(np.float32)
    exact = floats(golden)["layers.2.experts.up.weight"]
    # Half a unit of 4 bits of significand, and half a step of int8.
    allowed = np.abs(exact) * 2.0**-4 + 0.51 * step + np.abs(exact).max() / 448 / 2
    assert (np.abs(made * step - exact) <= allowed).all()


def ranks_of(golden: Golden, folder: Path, ranks: int = 8) -> list[Tensors]:
    folder.mkdir(exist_ok=True)
    parts = parts_of_ranks(tensors("xai", floats(golden)), ranks)
    for rank, part in enumerate(parts):
        save_file(part, folder / f"model-TP-{rank:03}.safetensors")
    return parts


def test_ranks_in_another_order_are_far_from_the_original(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    parts = ranks_of(golden, tmp_path / "theirs")
    save_file(parts[2], tmp_path / "theirs" / "model-TP-005.safetensors")
    save_file(parts[5], tmp_path / "theirs" / "model-TP-002.safetensors")
    found = distance(opened(tmp_path / "theirs", golden), golden, tmp_path / "ours")
    assert found.max() > 1000 * FLOAT32_TOLERANCE


@pytest.mark.parametrize("lost", [(3,), (0,), (7,), (1, 2), (4, 5, 6, 7)])
@pytest.mark.parametrize("with_config", [True, False])
def test_missing_ranks_are_named(lost: tuple[int, ...], with_config: bool, tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    ranks_of(golden, tmp_path)
    for rank in lost:
        (tmp_path / f"model-TP-{rank:03}.safetensors").unlink()
    numbers = ", ".join(f"{rank:03}" for rank in lost)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, golden) if with_config else foreign_source(tmp_path, golden.config)
    assert f"the files of ranks {numbers} of 8 are missing: they hold parts of" in str(
        caught.value
    )


def test_without_a_config_parts_of_ranks_do_not_pass_for_a_smaller_model(tmp_path: Path) -> None:
    ranks_of(load_golden("tiny8"), tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match="published Grok-1"):
        foreign_source(tmp_path)


def test_what_all_ranks_have_must_be_the_same(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    parts = ranks_of(golden, tmp_path)
    parts[6]["model.layers.1.block_sparse_moe.gate.weight"][5, 9] += 1
    save_file(parts[6], tmp_path / "model-TP-006.safetensors")
    source = opened(tmp_path, golden)
    with pytest.raises(CheckpointError, match=r"TP-006.* must be the same, but at \[5, 9\]"):
        array(source, "layers.1.router.weight")


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = tensors("hpcai", floats(golden))
    expert = "model.layers.1.moe_block.experts.3"
    del theirs["model.layers.0.attn.k_proj.weight"], theirs[f"{expert}.linear_v.weight"]
    theirs[f"{expert}.linear.weight"] = theirs[f"{expert}.linear.weight"].T.contiguous()
    theirs["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(2, 2)
    theirs["model.layers.0.rotary_emb.inv_freq"] = torch.zeros(8)
    theirs["model.layers.0.attn.o_proj.weight"] = torch.zeros(96, 96, dtype=torch.int8)
    theirs["model.layers.0.attn.q_proj.weight"] = torch.zeros(96, 96).to(torch.float8_e5m2)
    theirs["model.layers.5.post_moe_norm.scale"] = torch.zeros(96)
    save_safetensors(tmp_path, theirs)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, golden)
    text = str(caught.value)
    for said in (
        "layout hpcai",
        "k_proj.weight is missing",
        "experts.3.linear_v.weight is missing",
        "experts.3.linear.weight has shape (96, 256); ",
        "config.json asks for (256, 96)",
        "mlp.gate_proj.weight (model-00001-of-00001.safetensors) is no tensor of Grok-1",
        "o_proj.weight (model-00001-of-00001.safetensors) has dtype int8; read are float32, ",
        "q_proj.weight is float8_e5m2 (96, 96) with 0 tensors of scales",
        "layers.5.post_moe_norm.scale is none of the 2 layers and 8 experts of",
    ):
        assert said in text
    assert "inv_freq" not in text
    assert len(caught.value.faults) == 7


def test_many_faults_are_counted_and_some_are_shown(tmp_path: Path) -> None:
    golden = load_golden("deep13")
    theirs = tensors("xai", floats(golden))
    del theirs["model.norm.weight"]
    for layer in range(13):
        theirs[f"model.layers.{layer}.mlp.down_proj.weight"] = torch.zeros(1)
        theirs[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.zeros(1)
    save_safetensors(tmp_path, theirs)
    with pytest.raises(CheckpointError, match=r"27 faults[^$]*and 7 more") as caught:
        opened(tmp_path, golden)
    assert len(caught.value.faults) == 27


def test_whole_layers_that_are_missing_are_one_fault_each(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    theirs = tensors("keyfan", floats(golden))
    kept = {name: tensor for name, tensor in theirs.items() if ".decoder_layer.1." not in name}
    save_safetensors(tmp_path, kept)
    with pytest.raises(CheckpointError, match=r"layer 1 is missing: .* and 32 more") as caught:
        opened(tmp_path, golden)
    assert len(caught.value.faults) == 1


def test_another_model_is_said_to_be_one(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    save_safetensors(tmp_path, tensors("xai", floats(load_golden("tiny"))))
    with pytest.raises(CheckpointError, match=r"seems to be another model than .*config\.json"):
        opened(tmp_path, dataclasses.replace(golden, config=golden.config))


def test_names_of_no_layout_are_shown(tmp_path: Path) -> None:
    save_safetensors(tmp_path, {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"no layout of Grok-1 .*hpcai, keyfan, xai[^$]*mlp"):
        foreign_source(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = tensors("xai", floats(golden))
    save_safetensors(tmp_path, theirs)
    save_file({"model.norm.weight": torch.ones(96)}, tmp_path / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight stands in several files: .*other"
    ):
        opened(tmp_path, golden)


def test_scales_in_two_files_are_refused(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = float8(tensors("xai", floats(golden)), "row")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_safetensors(tmp_path, theirs)
    save_file({f"{name}_scale": torch.ones(96)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has scales .*q_proj\.weight_scale in several"):
        opened(tmp_path, golden)


def test_first_layers_need_no_files_of_the_others(tmp_path: Path) -> None:
    golden = load_golden("deep13")
    theirs = tensors("xai", floats(golden))
    late = {n: t for n, t in theirs.items() if n.startswith(("model.layers.1", "model.layers.9"))}
    early = {n: t for n, t in theirs.items() if n not in late or ".layers.1." in n}
    places = dict.fromkeys(late, "late.safetensors") | dict.fromkeys(early, "early.safetensors")
    save_file(early, tmp_path / "early.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"late\.safetensors is missing: the index says"):
        opened(tmp_path, golden)
    source = foreign_source(tmp_path, layers=3)
    assert source.config.num_layers == 3
    reader = WeightReader(golden.index.root)
    for name in model_parameters(source.config):
        assert array(source, name).tobytes() == reader.read(golden.index[name]).tobytes()
    with pytest.raises(ConfigError, match="14 layers were asked for"):
        foreign_source(tmp_path, layers=14)


def test_a_head_of_its_own_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = tensors("hpcai", floats(golden), head=True)
    theirs["lm_head.weight"][300, 7] += 1
    save_safetensors(tmp_path, theirs)
    source = opened(tmp_path, golden)
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens\.weight and lm_head\.weight must be the same, but at \[300, 7\]",
    ):
        array(source, "embedding.weight")


def test_of_one_table_under_two_names_either_will_do(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    theirs = tensors("hpcai", floats(golden), head=True)
    del theirs["model.embed_tokens.weight"]
    save_safetensors(tmp_path, theirs)
    assert differing(opened(tmp_path, golden), golden) == set()


@pytest.mark.parametrize(
    ("theirs", "ours", "place"),
    [
        ("moe_block.experts.2.linear_1", "layers.0.experts.down.weight", [95, 255]),
        ("attn.q_proj", "layers.0.attention.query.scales", [3, 4]),
        ("moe_block.gate", "layers.0.router.weight", [7, 0]),
    ],
)
def test_a_value_that_is_no_number_is_named(
    theirs: str, ours: str, place: list[int], tmp_path: Path
) -> None:
    golden = load_golden("tiny")
    made = tensors("hpcai", floats(golden))
    made[f"model.layers.0.{theirs}.weight"][tuple(place)] = torch.nan
    save_safetensors(tmp_path, made)
    source = opened(tmp_path, golden)
    with pytest.raises(CheckpointError) as caught:
        array(source, ours)
    assert f"model.layers.0.{theirs}.weight holds nan at {place}" in str(caught.value)


def test_a_file_that_is_cut_meanwhile_is_named(tmp_path: Path) -> None:
    golden = load_golden("tiny")
    save_safetensors(tmp_path, tensors("xai", floats(golden)))
    source = opened(tmp_path, golden)
    (file,) = source.files
    with (tmp_path / file).open("r+b") as opened_file:
        opened_file.truncate(source.files[file] // 2)
    with pytest.raises(CheckpointError, match=r"model-00001.* cannot be read at .*too early"):
        for name in model_parameters(source.config):
            array(source, name)
    with pytest.raises(CheckpointError, match="when it was looked at"):
        source.sha256(["final_norm.scale"])


def test_hashes_are_those_of_the_files_that_a_parameter_came_from(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    save_safetensors(tmp_path, tensors("xai", floats(golden)), 3)
    source = opened(tmp_path, golden)
    for names in (["final_norm.scale"], list(model_parameters(golden.config))):
        files = {file for name in names for file in source.origins(name)}
        assert source.sha256(names) == {
            file: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() for file in files
        }
    assert source.files == {
        path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")
    }


def test_scales_can_be_had_without_their_matrix_and_again(tmp_path: Path) -> None:
    golden = load_golden("tiny8")
    save_safetensors(tmp_path, tensors("hpcai", floats(golden)))
    source = opened(tmp_path, golden)
    name = "layers.2.experts.down.scales"
    expected = WeightReader(golden.index.root).read(golden.index[name])
    assert source.error(name) is None
    assert array(source, name).tobytes() == expected.tobytes()
    assert array(source, name).tobytes() == expected.tobytes()
    assert source.error(name) is not None


def test_threads_read_different_tensors_at_once(tmp_path: Path) -> None:
    golden = load_golden("deep13")
    save_safetensors(tmp_path, tensors("keyfan", floats(golden)), 2)
    source = opened(tmp_path, golden)
    names = [name for name in golden.index.weights if not name.endswith(".scales")]

    def both(name: str) -> Iterator[tuple[str, bytes]]:
        scales = name.removesuffix("weight") + "scales"
        for part in (name, scales) if scales in golden.index.weights else (name,):
            yield part, array(source, part).tobytes()

    with ThreadPoolExecutor(4) as pool:
        found = dict(pair for pairs in pool.map(lambda n: list(both(n)), names) for pair in pairs)
    reader = WeightReader(golden.index.root)
    assert found == {w.name: reader.read(w).tobytes() for w in golden.index}


def test_one_matrix_is_held_at_once(tmp_path: Path) -> None:
    """Here the file has 170 MB and a float32 expert 8 MB: sparse, all zeros."""
    config = GrokConfig.from_file(load_golden("tiny").folder / "config.json")
    config = dataclasses.replace(
        config, num_layers=1, emb_size=1024, ffn_size=2048, row_parallel_scale_groups=8
    )
    theirs = {
        name: torch.zeros(1).expand(shape)
        for name, shape in {
            "model.embed_tokens.weight": (512, 1024),
            "model.norm.weight": (1024,),
            **{f"model.layers.0.self_attn.{x}_proj.weight": (32, 1024) for x in "kv"},
            "model.layers.0.self_attn.q_proj.weight": (96, 1024),
            "model.layers.0.self_attn.o_proj.weight": (1024, 96),
            "model.layers.0.block_sparse_moe.gate.weight": (8, 1024),
            **{
                f"model.layers.0.block_sparse_moe.experts.{e}.w{i}.weight": (
                    (1024, 2048) if i == 2 else (2048, 1024)
                )
                for e in range(8)
                for i in (1, 2, 3)
            },
            **{
                f"model.layers.0.{norm}.weight": (1024,)
                for norm in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
            },
        }.items()
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in theirs.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset := offset + 4 * tensor.numel()],
        }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    source = foreign_source(tmp_path, config)
    expert = 1024 * 2048
    tracemalloc.start()
    try:
        for name in model_parameters(config):
            for _ in source.blocks(name):
                pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < expert + (16 << 20)
    assert offset > 10 * peak
