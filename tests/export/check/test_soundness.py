"""Every kind of damage is found and named with its place; sound weights are called sound."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export_grok.config import GrokConfig
from export_grok.export.check import code_values
from export_grok.export.check import file as checked_file
from export_grok.export.check.file import FileToRead, check_file
from export_grok.export.check.plan import check_plan
from export_grok.export.check.soundness import soundness_of
from export_grok.export.check.zero_runs import HOLE_BYTES
from export_grok.export.checkpoint import open_weights
from export_grok.export.demo import DEMO_MODEL
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.weights import Weight
from tests.conftest import FIXTURES, load_golden
from tests.damaged_weights import checked, checkpoint, place_of, values_in, whole

__all__ = ["checkpoint", "whole"]

GATE = "layers.0.experts.gate.weight"
GATE_SCALES = "layers.0.experts.gate.scales"
DOWN_SCALES = "layers.1.experts.down.scales"
EMBEDDING = "embedding.weight"


# ---- sound weights


@pytest.mark.parametrize("name", FIXTURES)
def test_the_original_programs_models_are_sound(name: str) -> None:
    golden = load_golden(name)
    found = checked(golden.folder)
    assert found.findings == ()
    assert found.tensors == len(golden.index.weights)
    # Every byte, and the scales of nothing twice.
    assert found.nbytes == sum(golden.index.files.values())


def test_a_trained_model_is_sound() -> None:
    assert checked(DEMO_MODEL).findings == ()


CONFIGS = st.builds(
    lambda layers, kv, queries, half, experts, width, ffn, vocabulary, groups: GrokConfig(
        num_layers=layers,
        emb_size=width,
        num_q_heads=kv * queries * groups,
        num_kv_heads=kv,
        key_size=2 * half,
        ffn_size=ffn * groups,
        vocab_size=vocabulary,
        num_experts=experts,
        num_selected_experts=1,
        attn_output_multiplier=0.1,
        embedding_multiplier_scale=1.0,
        output_multiplier_scale=1.0,
        row_parallel_scale_groups=groups,
    ),
    layers=st.integers(1, 2),
    kv=st.integers(1, 3),
    queries=st.integers(1, 2),
    half=st.integers(1, 8),
    experts=st.integers(1, 4),
    width=st.integers(1, 70),
    ffn=st.integers(1, 70),
    vocabulary=st.integers(1, 300),
    groups=st.sampled_from([1, 2, 8]),
)


def quantised(shape: tuple[int, ...], groups: int, random: np.random.Generator) -> Any:
    """Return codes and scales of a bell, as a quantiser by the largest value makes them."""
    *lead, rows, columns = shape
    exact = 0.02 * random.standard_normal((*lead, groups, rows // groups, columns))
    scales = (np.abs(exact).max(axis=-2, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    codes = np.rint(exact / scales.astype(np.float64)).clip(-127, 127).astype(np.int8)
    return codes.reshape(shape), scales.reshape(*lead, groups, columns)


@given(config=CONFIGS, seed=st.integers(0, 1000), bell=st.booleans())
@settings(max_examples=12, deadline=None)
def test_no_alarm_on_random_models(
    config: GrokConfig, seed: int, bell: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("random")
    write_random_checkpoint(config, out, seed)
    if bell:
        random = np.random.default_rng(seed)
        for weight in open_weights(out)[1]:
            if weight.dtype == "int8":
                codes, scales = quantised(weight.shape, weight.groups or 1, random)
                values_in(out, weight.name)[...] = codes
                values_in(out, weight.name.replace(".weight", ".scales"))[...] = scales
    assert checked(out).findings == ()


def test_no_alarm_on_what_the_format_allows(checkpoint: Path) -> None:
    values_in(checkpoint, GATE)[0, :5] = -128
    values_in(checkpoint, GATE_SCALES)[0, 0, ::2] *= -1
    # A column that is nothing, as a quantiser stores it.
    values_in(checkpoint, GATE)[1, :, 7] = 0
    values_in(checkpoint, GATE_SCALES)[1, 0, 7] = 0
    # Some zeros, but for less than a hole.
    values_in(checkpoint, GATE)[2].reshape(-1)[: HOLE_BYTES - 100] = 0
    values_in(checkpoint, "final_norm.scale")[:100] = 1
    # Matrices that are nearly another: in one code, and in the order of their rows.
    up = values_in(checkpoint, "layers.0.experts.up.weight")
    up[1:] = up[0]
    up[1, -1, -1] ^= 1
    up[2, :2] = up[2, 1::-1]
    assert checked(checkpoint).findings == ()


# ---- one kind of damage after the other

Damage = Callable[[Path], object]


def write(name: str, index: Any, value: Any) -> Damage:
    return lambda checkpoint: values_in(checkpoint, name).__setitem__(index, value)


def hole(name: str, start: int, length: int) -> Damage:
    """Return what overwrites bytes of a tensor's file with zeros, from a page of the file on."""

    def damage(checkpoint: Path) -> None:
        weight = place_of(checkpoint, name)
        with (checkpoint / weight.file).open("r+b") as file:
            file.seek(start)
            file.write(bytes(length))

    return damage


def copied(source: str, at: Any, target: str, to: Any) -> Damage:
    def damage(checkpoint: Path) -> None:
        values_in(checkpoint, target)[to] = values_in(checkpoint, source)[at]

    return damage


DAMAGES: dict[str, tuple[Damage, dict[str, Any]]] = {
    "nan in the embedding": (
        write(EMBEDDING, (300, slice(5, 8)), np.nan),
        {"kind": "nan", "tensor": EMBEDDING, "index": (300, 5), "count": 3},
    ),
    "infinity in a norm": (
        write("layers.1.post_moe_norm.scale", 9, -np.inf),
        {"kind": "nan", "tensor": "layers.1.post_moe_norm.scale", "index": (9,), "count": 1},
    ),
    "nan in scales": (
        write(DOWN_SCALES, (2, 3, 17), np.nan),
        {"kind": "nan", "tensor": DOWN_SCALES, "index": (2, 3, 17), "count": 1},
    ),
    "a norm of zeros": (
        write("final_norm.scale", ..., 0),
        {"kind": "zeros", "tensor": "final_norm.scale"},
    ),
    "a router of zeros": (
        write("layers.0.router.weight", ..., 0),
        {"kind": "zeros", "tensor": "layers.0.router.weight"},
    ),
    "a matrix of zeros": (
        write("layers.1.attention.key.weight", ..., 0),
        {"kind": "zeros", "tensor": "layers.1.attention.key.weight"},
    ),
    "all experts of zeros": (write(GATE, ..., 0), {"kind": "zeros", "tensor": GATE}),
    "one expert of zeros": (
        write(GATE, 1, 0),
        {"kind": "zeros", "tensor": GATE, "index": (1,), "count": 1},
    ),
    "a row of scales of zeros": (
        write(DOWN_SCALES, (2, 3), 0),
        {"kind": "zeros", "tensor": DOWN_SCALES, "index": (2, 3), "count": 1},
    ),
    "scales of 0 for codes": (
        write(DOWN_SCALES, (2, 1, slice(30, 33)), 0),
        {
            "kind": "scale",
            "tensor": "layers.1.experts.down.weight",
            "index": (2, 1, 30),
            "count": 3,
        },
    ),
    "a scale of 0 for codes of attention": (
        write("layers.0.attention.out.scales", (3, 127), 0),
        {
            "kind": "scale",
            "tensor": "layers.0.attention.out.weight",
            "index": (3, 127),
            "count": 1,
        },
    ),
    "an absurd scale": (
        write(GATE_SCALES, (2, 0, 1000), 1e30),
        {"kind": "scale", "tensor": GATE_SCALES, "index": (2, 0, 1000), "count": 1},
    ),
    "a scale below the normal numbers": (
        write(GATE_SCALES, (0, 0, 3), 1e-39),
        {"level": "doubtful", "kind": "scale", "tensor": GATE_SCALES, "index": (0, 0, 3)},
    ),
    "a hole in a matrix": (
        hole(GATE, 8192, HOLE_BYTES),
        {"kind": "hole", "tensor": GATE, "offset": 8192, "count": HOLE_BYTES},
    ),
    "a hole in the embedding": (
        hole(EMBEDDING, 4096, HOLE_BYTES),
        {"kind": "hole", "tensor": EMBEDDING, "offset": 4096, "count": HOLE_BYTES},
    ),
    "rows of the embedding": (
        write(EMBEDDING, slice(100, 300), 0),
        {
            "level": "doubtful",
            "kind": "zeros",
            "tensor": EMBEDDING,
            "index": (100,),
            "count": 200,
        },
    ),
    "a sixteenth of an expert saturated": (
        write(GATE, (1, slice(0, 8)), -127),
        {"level": "doubtful", "kind": "saturated", "tensor": GATE, "index": (1,)},
    ),
    "an expert saturated": (
        write(GATE, 2, 127),
        {"kind": "saturated", "tensor": GATE, "index": (2,)},
    ),
    "an expert that is another": (
        copied(GATE, 0, GATE, 2),
        {"kind": "equal", "tensor": GATE, "index": (0,), "count": 2},
    ),
    "a matrix of another layer": (
        copied("layers.0.attention.query.weight", ..., "layers.1.attention.query.weight", ...),
        {"kind": "equal", "tensor": "layers.0.attention.query.weight", "count": 2},
    ),
    "up for gate": (
        copied(GATE, 1, "layers.0.experts.up.weight", 1),
        {"kind": "equal", "tensor": GATE, "index": (1,), "count": 2},
    ),
}


def test_rows_of_the_embedding_end_where_the_next_begins(checkpoint: Path) -> None:
    rows = values_in(checkpoint, EMBEDDING)
    rows[100:300] = 0
    rows[300, 0] = 1.5  # its low bytes are zeros too
    (finding,) = checked(checkpoint).findings
    assert (finding.level, finding.index, finding.count) == ("doubtful", (100,), 200)


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_found_and_named(what: str, checkpoint: Path) -> None:
    damage, wanted = DAMAGES[what]
    wanted = {"level": "wrong", **wanted}
    damage(checkpoint)
    found = checked(checkpoint)
    finding = next(f for f in found.findings if f.kind == wanted["kind"])
    for key, value in wanted.items():
        assert getattr(finding, key) == value, (key, found.findings)
    assert finding.file == place_of(checkpoint, wanted["tensor"]).file
    # Nothing else is accused.
    assert {finding.tensor for finding in found.findings} == {wanted["tensor"]}
    assert found.sound == (wanted["level"] == "doubtful")


def test_bytes_in_the_wrong_order_are_seen_by_the_scales(checkpoint: Path) -> None:
    values_in(checkpoint, GATE_SCALES).view(np.uint16).byteswap(True)
    found = checked(checkpoint)
    assert {finding.tensor for finding in found.findings} == {GATE_SCALES}
    assert not found.sound


# Those of other tensors, so that each is told in the same way with the others as alone.
TOGETHER = (
    "nan in the embedding",
    "infinity in a norm",
    "a norm of zeros",
    "a router of zeros",
    "a matrix of zeros",
    "a row of scales of zeros",
    "scales of 0 for codes",
    "a hole in a matrix",
    "a matrix of another layer",
)


@pytest.mark.parametrize("block_bytes", [3000, 1 << 16, 8 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_all_damage_is_told_at_once_however_it_is_read(
    block_bytes: int, workers: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []
    for what in TOGETHER:
        damage, wanted = DAMAGES[what]
        damage(checkpoint)
        alone.append(wanted)
    (checkpoint / "ckpt-0" / "tensor00003_000").unlink()
    os.truncate(checkpoint / "ckpt-0" / "tensor00016_000", 1000)
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", block_bytes)
    found = checked(checkpoint, workers=workers)
    told = {(finding.kind, finding.tensor): finding for finding in found.findings}
    assert len(told) == len(TOGETHER) + 1  # of the two files
    assert sum(finding.kind == "file" for finding in found.findings) == 2
    for wanted in alone:
        finding = told[wanted["kind"], wanted["tensor"]]
        assert {key: getattr(finding, key) for key in wanted} == wanted


# ---- shapes and numbers that no model has


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1,) * 100 + (40, 60), None),
        ((2400,), None),
        ((1200, 2, 1), 2),
        ((1, 2400), 1),
        ((2400, 1), 2400),
        ((40, 60), 7),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_shapes_that_no_model_has_are_read_all_the_same(
    shape: tuple[int, ...],
    groups: int | None,
    dtype: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_values, "MOST_GROUPS", 1000)
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", 1000)
    values = np.random.default_rng(0).integers(1, 100, 2400).astype(dtype)
    (tmp_path / "file").write_bytes(b"x" + values.tobytes() + b"x")
    weight = Weight(
        name="a.weight", file="file", offset=1, dtype=dtype, shape=shape, groups=groups
    )
    file = FileToRead(
        path=tmp_path / "file",
        name="file",
        nbytes=values.nbytes + 2,
        weights=(weight,),
        sha256=hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest(),
        tensor_sha256={"a.weight": hashlib.sha256(values.tobytes()).hexdigest()},
    )
    result = check_file(file)
    assert result.findings == ()
    assert (result.hashes, result.nbytes) == (2, values.nbytes + 2)


def test_tensors_that_overlap_are_read_and_the_file_is_hashed_once(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(1, 100, 5000, dtype=np.int8).tobytes()
    (tmp_path / "file").write_bytes(data)
    places = [(0, 3000), (1000, 3000), (1000, 500), (4500, 500)]
    weights = tuple(
        Weight(name=f"{number}.weight", file="file", offset=offset, dtype="int8", shape=(1, size))
        for number, (offset, size) in enumerate(places)
    )
    file = FileToRead(
        path=tmp_path / "file",
        name="file",
        nbytes=5000,
        weights=weights,
        sha256=hashlib.sha256(data).hexdigest(),
        tensor_sha256={
            f"{number}.weight": hashlib.sha256(data[offset : offset + size]).hexdigest()
            for number, (offset, size) in enumerate(places)
        },
    )
    assert check_file(file).hashes == 1 + len(places)


def test_an_interruption_stops_all_threads(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", 1000)
    plan = check_plan(whole)
    done: list[int] = []
    main, first = threading.get_ident(), threading.Lock()

    def progress(count: int) -> None:
        done.append(count)
        if first.acquire(blocking=False):
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        soundness_of(plan, workers=2, progress=progress)
    read = len(done)
    assert read < 100
    time.sleep(0.05)
    assert len(done) == read


def test_progress_counts_every_byte(whole: Path) -> None:
    plan = check_plan(whole)
    done: list[int] = []
    found = soundness_of(plan, workers=2, progress=done.append)
    assert sum(done) == plan.nbytes == found.nbytes
