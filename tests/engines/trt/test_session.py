"""What a session binds and enqueues, and that the logits of the original follow from just that.

All of it runs on a fake device whose plans are the PyTorch model: it proves addresses, slices,
order, padding and capture, and nothing of TensorRT.
"""

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_grok.engines.backend import Session
from export_grok.engines.trt.tensors import binding_of, size_of
from export_grok.errors import RequestError
from export_grok.export.head import write_head
from export_grok.runtime.decode import decode
from export_grok.runtime.request import Request
from tests.conftest import Golden, load_golden
from tests.engines.trt.fake_device import Enqueue, FakeDevice
from tests.engines.trt.fake_session import TOLERANCE, Floats, Ints, Opened, at, ints, open_fake
from tests.engines.trt.records import record_for

OpenedOf = Callable[..., Opened]


@pytest.fixture
def opened(tmp_path: Path) -> OpenedOf:
    """Return the way to a session on a fake device."""
    return functools.partial(open_fake, tmp_path / "bundle")


def logits_of(session: Session, tokens: Ints, start: Ints, last: Ints) -> Floats:
    logits = session.forward(tokens, start, last)
    assert logits is not None
    return logits


def decoded(session: Session, tokens: Ints, start: Ints) -> Floats:
    """Return the logits [B, S, V] of tokens [B, S] that come one by one, rows from `start` on."""
    zeros = at(len(tokens), 0)
    steps = [
        logits_of(session, column[:, None].copy(), start + step, zeros)
        for step, column in enumerate(tokens.T)
    ]
    return np.stack(steps, axis=1)


def layer_runs(device: FakeDevice) -> list[Enqueue]:
    return [run for run in device.runs if run.kind == "layer"]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("chunk", [5, 64])
def test_fake_device_gives_the_logits_of_the_original(
    golden: Golden, opened: OpenedOf, chunk: int, capture: bool
) -> None:
    slots = golden.config.sequence_len
    session = opened(golden.name, chunk=chunk, max_length=slots, capture=capture).session
    arrays, tokens = golden.arrays, ints(golden.arrays["tokens"])
    prefill = session.forward_all(tokens, at(2, 0))
    assert np.abs(prefill - arrays["f32/prefill_logits"]).max() < TOLERANCE
    steps = decoded(session, ints(arrays["f32/decode_tokens"]), at(2, tokens.shape[1]))
    assert np.abs(steps - arrays["f32/decode_logits"]).max() < TOLERANCE


def test_fake_device_gives_rows_of_mixed_length_the_logits_they_have_alone(
    golden: Golden, opened: OpenedOf
) -> None:
    session, arrays = opened(golden.name).session, golden.arrays
    long, short = ints(arrays["tokens"])[0], ints(arrays["short_tokens"])
    length = np.array([len(long), len(short)])
    padded = np.stack([long, np.pad(short, (0, len(long) - len(short)))])
    last = logits_of(session, padded, at(2, 0), length - 1)
    assert np.abs(last[0] - arrays["f32/prefill_logits"][0, -1]).max() < TOLERANCE
    assert np.abs(last[1] - arrays["f32/padded_logits"]).max() < TOLERANCE
    fed = np.stack(
        [ints(arrays["f32/decode_tokens"])[0, :3], ints(arrays["f32/padded_decode_tokens"])]
    )
    steps = decoded(session, fed, length)
    assert np.abs(steps[0] - arrays["f32/decode_logits"][0, :3]).max() < TOLERANCE
    assert np.abs(steps[1] - arrays["f32/padded_decode_logits"]).max() < TOLERANCE


def test_fake_device_gives_the_logits_of_the_original_in_bfloat16(opened: OpenedOf) -> None:
    arrays = load_golden("tiny8").arrays
    session, tokens = opened("tiny8", dtype="bfloat16").session, ints(arrays["tokens"])
    prefill = session.forward_all(tokens, at(2, 0))
    steps = decoded(session, ints(arrays["bf16/decode_tokens"]), at(2, tokens.shape[1]))
    for found, name in ((prefill, "prefill_logits"), (steps, "decode_logits")):
        wanted, exact = arrays[f"bf16/{name}"], arrays[f"f32/{name}"]
        # Now and then a sum falls on the other side of a rounding.
        assert np.abs(found - wanted).mean() < 0.1 * np.abs(wanted - exact).mean()


def test_fake_device_runs_the_decode_loop_to_the_same_tokens_by_graph_and_by_enqueues(
    opened: OpenedOf,
) -> None:
    prompts = [tuple(range(3, 3 + length)) for length in (9, 1, 30)]
    requests = [Request(prompt=prompt, max_new_tokens=6) for prompt in prompts]
    steps = []
    for capture in (True, False):
        session = opened("tiny", batch=3, chunk=8, max_length=41, capture=capture).session
        steps.append(list(decode(session, requests, chunk=13)))
    assert steps[0] == steps[1]
    assert len({step.token for step in steps[0]}) > 3


def test_fake_device_runs_a_step_in_the_order_of_the_model(opened: OpenedOf) -> None:
    run = opened("deep13", chunk=8, max_length=41)
    logits_of(run.session, ints([[3], [4]]), at(2, 0), at(2, 0))
    config = load_golden("deep13").config
    kinds = [row.kind for row in run.device.runs]
    assert kinds == ["embedding", *["layer"] * config.num_layers, "head"]
    assert {row.phase for row in run.device.runs} == {"decode"}
    # What one writes the next one reads, by turns in two places.
    embedding, *layers, head = (row.addresses for row in run.device.runs)
    written = [embedding["h"], *(row["h_out"] for row in layers)]
    assert [*(row["h"] for row in layers), head["h"]] == written
    assert len(set(written)) == 2
    assert all(here != there for here, there in itertools.pairwise(written))


def test_fake_device_has_a_cache_for_each_layer_bound_as_input_and_output(
    opened: OpenedOf,
) -> None:
    run = opened("tiny8")
    run.session.forward(ints([[3], [4]]), at(2, 0), None)
    run.session.forward(ints([[3, 4], [4, 5]]), at(2, 1), None)
    layers = layer_runs(run.device)
    seen = set()
    for row in layers:
        for letter in "kv":
            assert row.addresses[f"{letter}_out"] == row.addresses[f"{letter}_cache"]
    for row in layers[:3]:  # of the decode step
        seen |= {row.addresses["k_cache"], row.addresses["v_cache"]}
    assert len(seen) == 2 * load_golden("tiny8").config.num_layers


def test_fake_device_has_nothing_in_its_caches_at_first(opened: OpenedOf) -> None:
    run = opened("tiny")
    run.session.forward(ints([[3], [4]]), at(2, 0), None)
    addresses = layer_runs(run.device)[0].addresses
    fresh = opened("tiny")  # allocates the same in the same order
    row = binding_of(record_for(load_golden("tiny").config, fresh.sizes).graphs[2], "k_cache")
    for name in ("k_cache", "v_cache"):
        assert run.device.at(addresses[name], size_of(row)).any()
        assert not fresh.device.at(addresses[name], size_of(row)).any()


def test_fake_device_prefills_a_row_where_the_decode_step_finds_it(opened: OpenedOf) -> None:
    run = opened("tiny8", batch=3, chunk=4)
    golden, zeros = load_golden("tiny8"), at(3, 0)
    run.session.forward(ints([[3], [4], [5]]), zeros, None)
    whole = layer_runs(run.device)[: golden.config.num_layers]
    run.device.runs.clear()
    run.session.forward(ints(np.arange(27).reshape(3, 9)), zeros + 1, None)
    pieces = layer_runs(run.device)
    layers = golden.config.num_layers
    assert len(pieces) == 3 * 3 * layers  # rows, chunks
    record = record_for(golden.config, run.sizes)
    graph = next(g for g in record.graphs if (g.kind, g.phase) == ("layer", "prefill"))
    row_bytes = size_of(binding_of(graph, "k_cache"))
    for number, piece in enumerate(pieces):
        row, layer = number // (3 * layers), number % layers
        for name in ("k_cache", "v_cache"):
            assert piece.addresses[name] == whole[layer].addresses[name] + row * row_bytes


def test_fake_device_runs_no_head_that_nobody_asked_for(opened: OpenedOf) -> None:
    run = opened("tiny", chunk=4, max_length=41)
    tokens = ints(np.arange(20).reshape(2, 10))
    assert run.session.forward(tokens, at(2, 0), None) is None
    assert run.session.forward(tokens[:, :1], at(2, 10), None) is None
    assert "head" not in {row.kind for row in run.device.runs}
    run.session.forward(tokens, at(2, 0), ints([3, 9]))  # in the first chunk and in the last
    kinds = [row.kind for row in run.device.runs if row.kind != "layer"][-8:]
    piece = ["embedding"]
    assert kinds == [*piece, "head", *piece, *piece, *piece, *piece, *piece, "head"]


def test_fake_device_captures_the_second_step_once_and_launches_it_from_then_on(
    opened: OpenedOf,
) -> None:
    run = opened("tiny")
    layers = load_golden("tiny").config.num_layers
    done = []
    for step in range(4):
        run.device.log.clear()
        logits_of(run.session, ints([[step], [step + 1]]), at(2, step), at(2, 0))
        done.append([call for call in run.device.log if call not in ("upload", "download")])
    enqueues = ["enqueue"] * (layers + 2)
    assert done == [enqueues, ["capture", *enqueues, "launch"], ["launch"], ["launch"]]
    # A graph holds addresses: every step ran with those of the first.
    steps = np.array_split(np.array(run.device.runs, dtype=object), 4)
    assert all([*step] == [*steps[0]] for step in steps)


def test_fake_device_is_asked_for_no_capture_where_that_is_off(opened: OpenedOf) -> None:
    run = opened("tiny", capture=False)
    for step in range(3):
        logits_of(run.session, ints([[step], [1]]), at(2, step), at(2, 0))
    assert not {"capture", "launch"} & {*run.device.log}


def test_fake_device_holds_each_weight_once_and_a_step_binds_all_of_them(
    opened: OpenedOf,
) -> None:
    run = opened("tiny8")
    golden = load_golden("tiny8")
    run.session.forward_all(ints([[3, 4], [5, 6]]), at(2, 0))
    logits_of(run.session, ints([[3], [4]]), at(2, 2), at(2, 0))
    record = record_for(golden.config, run.sizes)
    weights: dict[tuple[str, str], list[str]] = {
        (graph.kind, graph.phase): [row.name for row in graph.bindings if row.weight]
        for graph in record.graphs
    }
    bound = {
        phase: {
            row.addresses[name]
            for row in run.device.runs
            if row.phase == phase
            for name in weights[row.kind, phase]
        }
        for phase in ("decode", "prefill")
    }
    # The embedding's table is the head's; every tensor of the index has one place.
    assert bound["decode"] == bound["prefill"]
    assert len(bound["decode"]) == len(golden.index.weights)


def test_fake_device_takes_a_row_up_to_its_last_slot(opened: OpenedOf) -> None:
    golden = load_golden("tiny8")
    tokens = ints(golden.arrays["tokens"])
    length = tokens.shape[1]
    run = opened("tiny8", chunk=7, max_length=length)  # 20 tokens are no multiple of 7
    assert length % 7
    logits = run.session.forward_all(tokens, at(2, 0))
    assert np.abs(logits - golden.arrays["f32/prefill_logits"]).max() < TOLERANCE
    singly = decoded(run.session, tokens[:, -1:], at(2, length - 1))
    assert np.abs(singly[:, 0] - logits[:, -1]).max() < TOLERANCE


def test_fake_device_gives_out_logits_that_stay_as_they_are(opened: OpenedOf) -> None:
    session, tokens = opened("tiny").session, ints([[3], [4]])
    given = [logits_of(session, tokens, at(2, 0), at(2, 0)), session.forward_all(tokens, at(2, 0))]
    kept = [array.copy() for array in given]
    logits_of(session, tokens + 5, at(2, 0), at(2, 0))
    session.forward_all(tokens + 5, at(2, 0))
    assert all((old == new).all() for old, new in zip(kept, given, strict=True))


def test_fake_device_takes_tokens_in_any_memory_layout(opened: OpenedOf) -> None:
    session = opened("tiny").session
    tokens = ints([[3, 4, 5], [6, 7, 8]])
    wanted = logits_of(session, tokens, at(2, 0), ints([1, 2]))
    other: Any = np.asfortranarray(tokens.astype(np.int32))
    last: Any = np.array([1, 0, 2, 0], np.int32)[::2]
    assert (logits_of(session, other, at(2, 0), last) == wanted).all()


def test_fake_device_runs_an_int8_head_by_weights_of_its_own(
    opened: OpenedOf, tmp_path: Path
) -> None:
    golden = load_golden("tiny")
    (tmp_path / "bundle").mkdir()
    write_head(golden.config, golden.index, tmp_path / "bundle")
    tokens = ints(golden.arrays["tokens"])
    run = opened("tiny", int8_head=True)
    logits = run.session.forward_all(tokens, at(2, 0))
    wanted = golden.arrays["f32/prefill_logits"]
    error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.02  # int8, and nothing worse
    (head,) = {row.addresses["unembedding.weight"] for row in run.device.runs if "_" in row.kind}
    assert head != run.device.runs[0].addresses["weight"]


@pytest.mark.parametrize(
    ("tokens", "start", "last", "wanted"),
    [
        ([[5, 512], [1, 2]], [0, 0], None, "0 to 511"),
        ([[1], [1]], [0, 48], None, "49 tokens do not fit the cache of 48"),
        ([[1], [1]], [-1, 4], None, "-1"),
        ([[1, 2]], [0, 0], None, r"\[2, 1 or more\]"),
        ([[1, 2]] * 2, [0], None, "start is"),
        ([[1, 2]] * 2, [0, 0], [0, 2], r"last is .*0 to 1"),
    ],
)
def test_fake_device_does_nothing_for_what_does_not_fit(
    opened: OpenedOf, tokens: Any, start: Any, last: Any, wanted: str
) -> None:
    run = opened("tiny")
    run.device.log.clear()
    with pytest.raises(RequestError, match=wanted):
        run.session.forward(ints(tokens), ints(start), None if last is None else ints(last))
    assert run.device.log == []


def test_the_session_loads_neither_torch_nor_onnx() -> None:
    script = (
        "import json, sys, export_grok.engines.trt.session\n"
        "print(json.dumps([name for name in ('torch', 'onnx', 'onnx_ir', 'onnxruntime', 'cuda', "
        "'nccl', 'tensorrt', 'tensorrt_rtx', 'triton') if name in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == []
