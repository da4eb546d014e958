"""Results of the original program are handed on as they are, and wrong files are refused."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.engines.probe import GraphName
from export_grok.errors import RequestError
from export_grok.runtime.verify.comparison import compared
from export_grok.runtime.verify.goldens import Goldens, read_goldens
from export_grok.runtime.verify.steps import steps_of
from export_grok.runtime.verify.tolerances import tolerances_of
from tests.conftest import FIXTURES, Golden, load_golden

Arrays = dict[str, NDArray[Any]]

SPARE = 5


def read(golden: Golden) -> Goldens:
    return read_goldens(golden.folder / "goldens.npz", golden.config)


@functools.cache
def read_once(name: str) -> Goldens:
    return read(load_golden(name))


def given_to_layer(golden: Golden) -> Arrays:
    """Return inputs of a layer with noise in caches that are longer than the prompts."""
    rows, length = golden.arrays["tokens"].shape
    shape = (rows, golden.config.num_kv_heads, length + SPARE, golden.config.key_size)
    noise = np.random.default_rng(0)
    return {
        "start": np.zeros(rows, np.int64),
        "k_cache": noise.standard_normal(shape).astype(np.float32),
        "v_cache": noise.standard_normal(shape).astype(np.float32),
    }


def ran(goldens: Goldens, name: GraphName, inputs: Arrays) -> Arrays:
    with goldens.graph(name) as run:
        return run(inputs)


# ---- as a probe


def test_the_embedding_and_the_heads_give_what_the_original_had(golden: Golden) -> None:
    goldens, arrays = read(golden), golden.arrays
    rows, length = arrays["tokens"].shape
    h = ran(goldens, GraphName(kind="embedding"), {"tokens": arrays["tokens"]})["h"]
    assert np.array_equal(h, arrays["f32/hidden"][:, 0])
    every = ran(goldens, GraphName(kind="head_all"), {"h": h})["logits"]
    assert np.array_equal(every, arrays["f32/prefill_logits"])
    last = np.arange(rows) + length - rows
    (logits,) = ran(goldens, GraphName(kind="head"), {"h": h, "last": last}).values()
    for row in range(rows):
        assert np.array_equal(logits[row], arrays["f32/prefill_logits"][row, last[row]])


def test_a_layer_gives_what_the_original_had_there(golden: Golden) -> None:
    goldens, arrays = read(golden), golden.arrays
    inputs = given_to_layer(golden)
    length = arrays["tokens"].shape[1]
    before = {name: array.copy() for name, array in inputs.items()}
    layers = golden.config.num_layers
    for layer in range(layers):
        found = ran(goldens, GraphName(kind="layer", layer=layer), inputs)
        assert np.array_equal(found["h_out"], arrays["f32/hidden"][:, layer + 1])
        assert np.array_equal(found["experts"], arrays["f32/expert_index"][:, layer])
        assert np.array_equal(found["gates"], arrays["f32/expert_gate"][:, layer])
        assert np.array_equal(found["probabilities"], arrays["f32/router_probs"][:, layer])
        caches = {"k_out": "k", "v_out": "v"} if layer in (0, layers - 1) else {}
        assert found.keys() & {"k_out", "v_out"} == caches.keys()
        for output, letter in caches.items():
            right = arrays[f"f32/kv_{'first' if layer == 0 else 'last'}_{letter}"]
            slots = found[output].transpose(0, 2, 1, 3)
            assert np.array_equal(slots[:, :length], right)
            kept = before[f"{letter}_cache"][:, :, length:]
            assert np.array_equal(found[output][:, :, length:], kept)
    assert all(np.array_equal(inputs[name], array) for name, array in before.items())


def test_held_to_itself_the_original_deviates_by_nothing(golden: Golden) -> None:
    goldens, inputs = read(golden), given_to_layer(golden)
    (step,) = goldens.steps
    assert step.counts.all()
    assert np.array_equal(step.tokens, golden.arrays["tokens"])
    assert step.start.tolist() == [0] * len(step.tokens)
    found = ran(goldens, GraphName(kind="layer", layer=0), inputs)
    findings = compared(found, dict(found), step, inputs, tolerances_of(golden.config))
    assert {one.tensor for one in findings.deviations} == {
        "k_out",
        "v_out",
        "experts",
        "gates",
        "h_out",
    }
    assert {one.error for one in findings.deviations} == {0}
    assert findings.choices == step.tokens.size


# ---- as what was heard


@given(
    name=st.sampled_from(FIXTURES),
    decode=st.integers(1, 8),
    chunk=st.integers(1, 30),
)
@settings(deadline=None, max_examples=30)
def test_whatever_the_steps_each_position_has_the_logits_that_the_original_had_there(
    name: str, decode: int, chunk: int
) -> None:
    golden = load_golden(name)
    goldens, arrays = read_once(name), golden.arrays
    length = arrays["tokens"].shape[1]
    rows = goldens.rows
    steps = steps_of(rows, decode=decode, chunk=chunk, max_length=len(rows[0]))
    heard = goldens.heard(steps)
    for step, logits in zip(steps, heard.logits, strict=True):
        assert len(logits) == step.length.sum()
        for (row, place), said in zip(np.argwhere(step.counts), logits, strict=True):
            at = int(step.start[row] + place)
            right = (
                arrays["f32/prefill_logits"][row, at]
                if at < length
                else arrays["f32/decode_logits"][row, at - length]
            )
            assert np.array_equal(said, right)


def test_greedy_answers_are_the_likeliest_tokens_and_margins_say_by_how_much(
    golden: Golden,
) -> None:
    goldens, arrays = read(golden), golden.arrays
    heard = goldens.heard(goldens.steps)
    answers = arrays["f32/decode_tokens"]
    assert goldens.decoded == answers.shape[1]
    assert np.array_equal(heard.greedy, answers)
    for row, prompt in enumerate(arrays["tokens"]):
        assert goldens.rows[row] == [*prompt.tolist(), *answers[row].tolist()]
        before = [arrays["f32/prefill_logits"][row, -1], *arrays["f32/decode_logits"][row, :-1]]
        for number, logits in enumerate(before):
            assert logits.argmax() == answers[row, number]
            second, first = np.sort(logits.astype(np.float64))[-2:]
            scale = np.sqrt(np.square(logits.astype(np.float64)).mean())
            assert heard.margins[row, number] == pytest.approx((first - second) / scale)


# ---- refused

TINY = load_golden("tiny")
NEEDED = ("tokens", "hidden", "prefill_logits", "decode_tokens", "decode_logits")


def saved(folder: Path, change: Callable[[Arrays], None], *, pickled: bool = False) -> Path:
    """Write the goldens of `tiny` with a change."""
    arrays = {
        name: array
        for name, array in TINY.arrays.items()
        if name == "tokens" or name.startswith("f32/")
    }
    change(arrays)
    path = folder / "goldens.npz"
    np.savez(path, allow_pickle=pickled, **arrays)
    return path


def refused(path: Path, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        read_goldens(path, TINY.config)


def test_a_file_that_is_missing_is_told_with_what_can_be_done(tmp_path: Path) -> None:
    refused(tmp_path / "none.npz", r"none.npz is missing.*--against FILE.npz.*--against torch")


@pytest.mark.parametrize("name", NEEDED)
def test_an_array_that_is_missing_is_named_beside_those_that_are_there(
    name: str, tmp_path: Path
) -> None:
    def less(arrays: Arrays) -> None:
        del arrays[name if name == "tokens" else f"f32/{name}"]

    there = "hidden" if name == "tokens" else "tokens"
    refused(saved(tmp_path, less), rf"has no {name} of the original .*its arrays are .*{there}")


def test_results_in_bfloat16_only_are_none_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "goldens.npz"
    np.savez(path, allow_pickle=False, **{"bf16/hidden": np.zeros(3)})
    refused(path, r"has no decode_logits, .*tokens of the original .*of other names")


OPTIONAL = ("expert_index", "expert_gate", "router_probs", "kv_first_k", "kv_last_v")


@pytest.mark.parametrize("name", [*NEEDED, *OPTIONAL])
@pytest.mark.parametrize("axis", [0, -1])
def test_an_array_of_another_shape_is_named_with_both(
    name: str, axis: int, tmp_path: Path
) -> None:
    full = name if name == "tokens" else f"f32/{name}"

    def longer(arrays: Arrays) -> None:
        arrays[full] = np.concatenate([arrays[full]] * 2, axis=axis)

    # A prompt or answer of another length makes others wrong.
    told = r"\w+" if name in ("tokens", "decode_tokens") else name
    refused(saved(tmp_path, longer), rf"of another model: the shape of its {told} is \(.*\(")


@pytest.mark.parametrize("name", ["tokens", "decode_tokens"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4)])
def test_tokens_that_are_no_rows_are_told(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    full = name if name == "tokens" else f"f32/{name}"
    path = saved(tmp_path, lambda arrays: arrays.update({full: np.zeros(shape, np.int32)}))
    refused(path, "of another model")


@pytest.mark.parametrize("field", ["num_layers", "emb_size", "vocab_size"])
def test_results_of_another_model_are_refused(field: str) -> None:
    config = dataclasses.replace(TINY.config, **{field: getattr(TINY.config, field) + 1})
    with pytest.raises(RequestError, match="of another model"):
        read_goldens(TINY.folder / "goldens.npz", config)


def test_what_is_optional_may_be_missing(tmp_path: Path) -> None:
    def less(arrays: Arrays) -> None:
        for name in list(arrays):
            if name.removeprefix("f32/") not in NEEDED:
                del arrays[name]

    goldens = read_goldens(saved(tmp_path, less), TINY.config)
    found = ran(goldens, GraphName(kind="layer", layer=0), given_to_layer(TINY))
    assert found.keys() == {"h_out"}


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    def tricked(arrays: Arrays) -> None:
        arrays["f32/hidden"] = np.array([{"not": "numbers"}], object)

    path = saved(tmp_path, tricked, pickled=True)
    refused(path, r"cannot be read as .npz: Object arrays cannot be loaded")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04", b"\x93NUMPY"])
def test_a_file_that_is_no_archive_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "goldens.npz"
    path.write_bytes(content)
    refused(path, r"goldens.npz cannot be read as .npz")


def test_a_single_array_and_a_folder_are_no_archives(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    shutil.move(tmp_path / "array.npy", tmp_path / "array.npz")
    refused(tmp_path / "array.npz", "cannot be read as .npz")
    refused(tmp_path, "cannot be read as .npz")


@pytest.mark.parametrize("part", [0.3, 0.6, 0.999])
def test_a_file_that_was_cut_is_told(part: float, tmp_path: Path) -> None:
    content = (TINY.folder / "goldens.npz").read_bytes()
    path = tmp_path / "goldens.npz"
    path.write_bytes(content[: int(len(content) * part)])
    refused(path, "cannot be read as .npz")


def test_bytes_that_were_changed_are_told(tmp_path: Path) -> None:
    path = saved(tmp_path, lambda arrays: None)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    refused(path, r"cannot be read as .npz|of another model")
