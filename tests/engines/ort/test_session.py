"""The ONNX Runtime engine computes what the original program did, and keeps its cache in place."""

import dataclasses
import functools
import gc
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.backend import backend_names, builder, open_session
from export_grok.engines.ort import session as session_module
from export_grok.engines.ort.session import OrtSession, open_engine
from export_grok.errors import BundleError, ConfigError, RequestError
from tests.bundles import BundleOf, graphs_changed
from tests.conftest import Golden, load_golden

# Against the original program. The activations go through the kernel as three 7-bit terms, which
# leaves out up to 5e-7 of a group's largest value; the rest is the order of sums.
TOLERANCE = 3e-4

# Between two ways through the same engine: sums over more rows are taken in another order.
SAME = 1e-4

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
OpenedOf = Callable[..., OrtSession]


@pytest.fixture(scope="session")
def opened(bundle_of: BundleOf) -> OpenedOf:
    """Return the way to a session. It is shared: what its cache holds must not matter."""

    @functools.cache
    def session(name: str, batch: int, max_length: int) -> OrtSession:
        return open_engine(bundle_of(name), batch=batch, max_length=max_length)

    return session


def filled(session: OrtSession, value: float) -> OrtSession:
    for array in (*session.keys, *session.values):
        array[:] = value
    return session


def at(rows: int, position: int) -> Ints:
    return np.full(rows, position, np.int64)


def tokens_of(golden: Golden) -> Ints:
    return golden.arrays["tokens"].astype(np.int64)


def fed(golden: Golden) -> Ints:
    return golden.arrays["f32/decode_tokens"].astype(np.int64)


def prefilled(session: OrtSession, tokens: Ints, *, chunk: int) -> Floats:
    rows, length = tokens.shape
    parts = [
        session.forward_all(tokens[:, first : first + chunk], at(rows, first))
        for first in range(0, length, chunk)
    ]
    return np.concatenate(parts, axis=1)


def decoded(session: OrtSession, tokens: Ints, *, after: int) -> Floats:
    rows = len(tokens)
    steps = []
    for step, column in enumerate(tokens.T):
        logits = session.forward(column[:, None].copy(), at(rows, after + step), at(rows, 0))
        assert logits is not None
        steps.append(logits)
    return np.stack(steps, axis=1)


def last_logits(session: OrtSession, tokens: Ints, start: Ints, last: Ints) -> Floats:
    logits = session.forward(tokens, start, last)
    assert logits is not None
    return logits


def distance(session: OrtSession, golden: Golden, *, chunk: int | None = None) -> float:
    """Return the largest difference of all prefill and decode logits from the original's."""
    tokens = tokens_of(golden)
    length = tokens.shape[1]
    prefill = prefilled(session, tokens, chunk=chunk or length)
    steps = decoded(session, fed(golden), after=length)
    found = np.concatenate([prefill, steps], axis=1)
    wanted = np.concatenate(
        [golden.arrays["f32/prefill_logits"], golden.arrays["f32/decode_logits"]], axis=1
    )
    return float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max())


# The original's numbers.


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("poison", [0.0, 1e4, np.nan])
def test_prefill_and_decode_agree_with_the_original(
    golden: Golden, opened: OpenedOf, chunk: int | None, poison: float
) -> None:
    session = filled(opened(golden.name, 2, golden.config.sequence_len), poison)
    assert distance(session, golden, chunk=chunk) < TOLERANCE


def test_keys_and_values_agree_with_the_original(golden: Golden, opened: OpenedOf) -> None:
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    distance(session, golden)
    for layer, place in ((0, "first"), (-1, "last")):
        for letter, caches in (("k", session.keys), ("v", session.values)):
            wanted = golden.arrays[f"f32/kv_{place}_{letter}_after_decode"]
            found = caches[layer][:, :, : wanted.shape[1]].transpose(0, 2, 1, 3)
            assert np.abs(found - wanted).max() < TOLERANCE


def test_the_short_padded_prompt_agrees_with_the_original(
    golden: Golden, opened: OpenedOf
) -> None:
    arrays = golden.arrays
    session = filled(opened(golden.name, 1, golden.config.sequence_len), np.nan)
    short = arrays["short_tokens"].astype(np.int64)
    padded = np.pad(short, (0, 5), constant_values=golden.config.pad_token)[None]
    logits = last_logits(session, padded, at(1, 0), at(1, len(short) - 1))
    assert np.abs(logits[0] - arrays["f32/padded_logits"]).max() < TOLERANCE
    steps = decoded(
        session, arrays["f32/padded_decode_tokens"][None].astype(np.int64), after=len(short)
    )
    assert np.abs(steps[0] - arrays["f32/padded_decode_logits"]).max() < TOLERANCE


def routing(
    bundle: Bundle, layer: int, feeds: dict[str, NDArray[Any]], folder: Path
) -> tuple[Floats, Ints, Floats]:
    """Run a lowered layer whose choice of experts is an output too: gates, experts, h_out."""
    model = onnx.load(
        bundle.folder / graph_file("layer", layer, variant="ort"), load_external_data=False
    )
    (top,) = [node for node in model.graph.node if node.op_type == "TopK"]
    for name, kind in zip(
        top.output, (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64), strict=True
    ):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    path = folder / "layer.onnx"
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(bundle.weights_root)
    )
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    gates, experts, hidden = session.run([*top.output, "h_out"], feeds)
    return gates, experts, hidden


def test_every_layer_chooses_the_experts_of_the_original(
    golden: Golden, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle, arrays, config = bundle_of(golden.name), golden.arrays, golden.config
    rows, length = arrays["tokens"].shape
    for layer in range(config.num_layers):
        empty = np.zeros((rows, config.num_kv_heads, length, config.key_size), np.float32)
        feeds = {
            "h": arrays["f32/hidden"][:, layer],
            "start": at(rows, 0),
            "k_cache": empty,
            "v_cache": empty.copy(),
        }
        gates, experts, hidden = routing(bundle, layer, feeds, tmp_path)
        assert (experts == arrays["f32/expert_index"][:, layer]).all()
        assert np.abs(gates - arrays["f32/expert_gate"][:, layer]).max() < 2e-5
        assert np.abs(hidden - arrays["f32/hidden"][:, layer + 1]).max() < TOLERANCE


# Planted mistakes: the check of the original's numbers must go red.


def no_soft_cap(graph: ir.Graph) -> None:
    for node in graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes["softcap"] = ir.AttrFloat32("softcap", 0.0)


def exact_gelu(graph: ir.Graph) -> None:
    for node in graph.all_nodes():
        if node.op_type == "Gelu":
            node.attributes["approximate"] = ir.AttrString("approximate", "none")


def moved(graph: ir.Graph, name: str, by: int) -> None:
    """Let the initialiser `name` begin so many times its own length further on."""
    value = graph.initializers[name]
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    length = int(tensor.length or 0)
    value.const_value = ir.ExternalTensor(
        tensor.location,
        int(tensor.offset or 0) + by * length,
        length,
        tensor.dtype,
        shape=tensor.shape,
        name=name,
        base_dir=tensor.base_dir,
    )


def one_scale_group(graph: ir.Graph) -> None:
    for group in range(1, 8):
        moved(graph, f"attention.out.scales[{group}]", -group)


def experts_exchanged(graph: ir.Graph) -> None:
    moved(graph, "experts.up.weight[0][0:128]", 1)
    moved(graph, "experts.up.weight[1][0:128]", -1)


def two_terms_of_three(graph: ir.Graph) -> None:
    value = graph.initializers["grok1.term_units"]
    assert value.const_value is not None
    units = value.const_value.numpy().copy()
    units[1] = 0
    value.const_value = ir.tensor(units, name="grok1.term_units")


PLANTS = [no_soft_cap, exact_gelu, one_scale_group, experts_exchanged, two_terms_of_three]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: str(plant.__name__))
def test_a_mistake_planted_in_the_lowered_graphs_is_seen(
    bundle_of: BundleOf, tmp_path: Path, plant: Callable[[ir.Graph], None]
) -> None:
    golden = load_golden("tiny8")
    length = golden.config.sequence_len
    bundle = graphs_changed(bundle_of("tiny8"), tmp_path / "same", lambda graph: None)
    assert distance(open_engine(bundle, batch=2, max_length=length), golden) < TOLERANCE
    bundle = graphs_changed(bundle_of("tiny8"), tmp_path / "planted", plant)
    assert distance(open_engine(bundle, batch=2, max_length=length), golden) > TOLERANCE


@pytest.mark.parametrize(("position", "name"), [(1, "ahead"), (-1, "behind")])
def test_a_wrong_position_is_seen(opened: OpenedOf, position: int, name: str) -> None:
    golden = load_golden("tiny8")
    session = filled(opened("tiny8", 2, golden.config.sequence_len), 0.0)
    length = tokens_of(golden).shape[1]
    prefilled(session, tokens_of(golden), chunk=length)
    steps = decoded(session, fed(golden), after=length + position)
    assert np.abs(steps - golden.arrays["f32/decode_logits"]).max() > 100 * TOLERANCE, name


# One answer, whatever way it was computed.


def mixed(golden_name: str) -> tuple[list[Ints], Ints]:
    """Return prompts of 9, 2 and 5 tokens and what each is continued with, [3, 4]."""
    tokens = tokens_of(load_golden(golden_name))
    prompts = [tokens[0, :9], tokens[1, :2], tokens[1, 3:8]]
    return prompts, np.stack([tokens[0, 9:13], tokens[1, 9:13], tokens[0, 2:6]])


def run_mixed(session: OrtSession, prompts: list[Ints], continued: Ints) -> Floats:
    """Run rows of different length together, padded on the right: logits [B, 1 + steps, V]."""
    length = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), length.max()), np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    rows = len(prompts)
    parts = [last_logits(session, padded, at(rows, 0), length - 1)]
    for step, column in enumerate(continued.T):
        parts.append(last_logits(session, column[:, None].copy(), length + step, at(rows, 0)))
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_rows_of_mixed_length_are_what_they_are_alone(opened: OpenedOf, name: str) -> None:
    prompts, continued = mixed(name)
    together = run_mixed(filled(opened(name, 3, 24), np.nan), prompts, continued)
    for row, prompt in enumerate(prompts):
        session = filled(opened(name, 1, 24), 1e4)
        alone = run_mixed(session, [prompt], continued[row : row + 1])[0]
        if name == "deep13":  # the function body's batched products are summed in another order
            assert np.abs(together[row] - alone).max() < SAME
        else:
            assert (together[row] == alone).all()


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
@pytest.mark.parametrize("poison", [1e4, -1e4, np.inf, np.nan])
def test_what_the_cache_held_beyond_a_row_changes_nothing(
    opened: OpenedOf, name: str, poison: float
) -> None:
    prompts, continued = mixed(name)
    session = opened(name, 3, 24)
    clean = run_mixed(filled(session, 0.0), prompts, continued)
    assert np.isfinite(clean).all()
    assert (run_mixed(filled(session, poison), prompts, continued) == clean).all()


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_the_length_of_the_cache_changes_nothing(opened: OpenedOf, name: str) -> None:
    prompts, continued = mixed(name)
    exact = run_mixed(filled(opened(name, 3, 13), 0.0), prompts, continued)
    roomy = run_mixed(filled(opened(name, 3, 40), 0.0), prompts, continued)
    assert np.abs(exact - roomy).max() < SAME


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_cut_of_a_prompt_into_chunks_gives_the_same_logits(
    opened: OpenedOf, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["tiny", "tiny8"]))
    tokens = tokens_of(load_golden(name))
    length = tokens.shape[1]
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
    session = filled(opened(name, 2, 64), np.nan)
    parts = [
        session.forward_all(tokens[:, first:end], at(2, first))
        for first, end in zip([0, *cuts], [*cuts, length], strict=True)
    ]
    whole = load_golden(name).arrays["f32/prefill_logits"]
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() < TOLERANCE


def test_two_decode_steps_are_one_prefill_of_both_tokens(golden: Golden, opened: OpenedOf) -> None:
    tokens = tokens_of(golden)
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    prefilled(session, tokens[:, :-2], chunk=100)
    together = session.forward_all(tokens[:, -2:], at(2, tokens.shape[1] - 2))
    filled(session, 0.0)
    prefilled(session, tokens[:, :-2], chunk=100)
    singly = decoded(session, tokens[:, -2:], after=tokens.shape[1] - 2)
    assert np.abs(together - singly).max() < SAME


def test_the_head_of_one_token_is_a_row_of_the_head_of_all(
    golden: Golden, opened: OpenedOf
) -> None:
    tokens = tokens_of(golden)
    session = filled(opened(golden.name, 2, golden.config.sequence_len), 0.0)
    every = session.forward_all(tokens, at(2, 0))
    last = np.array([3, tokens.shape[1] - 1])
    assert session.forward(tokens, at(2, 0), None) is None
    one = last_logits(session, tokens, at(2, 0), last)
    assert np.abs(one - every[[0, 1], last]).max() < SAME


def test_logits_that_were_given_out_stay_as_they_are(opened: OpenedOf) -> None:
    tokens = tokens_of(load_golden("tiny"))
    session = opened("tiny", 2, 64)
    first = session.forward_all(tokens, at(2, 0))
    kept = first.copy()
    session.forward_all(tokens[:, ::-1], at(2, 0))
    assert (first == kept).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_matter(bundle_of: BundleOf, threads: int) -> None:
    golden = load_golden("tiny")
    session = open_session(bundle_of("tiny"), batch=2, max_length=64, threads=threads)
    assert isinstance(session, OrtSession)
    assert distance(session, golden) < TOLERANCE


# The cache is written in place.


def addresses(session: OrtSession) -> list[int]:
    return [array.ctypes.data for array in (*session.keys, *session.values)]


def bits(session: OrtSession) -> list[NDArray[np.uint32]]:
    """Return the caches as they are, NaN included."""
    return [array.view(np.uint32).copy() for array in (*session.keys, *session.values)]


def check_in_place(session: OrtSession) -> None:
    """Write tokens at places of their own in each row; every other bit of the cache must stay."""
    before_addresses = addresses(session)
    for width, start in ((1, np.array([0, 5])), (3, np.array([4, 9])), (1, np.array([20, 1]))):
        filled(session, np.nan)
        for array in (*session.keys, *session.values):
            array[:, :, : start.max()] = 0.5  # what comes before is read, so it is a number
        before = bits(session)
        session.forward(np.full((2, width), 7, np.int64), start, at(2, 0))
        for old, new in zip(before, bits(session), strict=True):
            changed = (old != new).any(axis=(1, 3))  # [B, T]
            slots = np.arange(session.max_length)
            written = (slots >= start[:, None]) & (slots < start[:, None] + width)
            assert (changed == written).all(), "not the written slots changed"
    assert addresses(session) == before_addresses


@pytest.mark.parametrize("name", ["tiny", "tiny8"])
def test_only_the_slots_of_new_tokens_change_and_at_the_same_address(
    opened: OpenedOf, name: str
) -> None:
    check_in_place(opened(name, 2, 32))


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


LONG = 1 << 18  # slots: 128 MiB of cache, of which a step may touch a page or two


def check_no_copy(bundle: Bundle) -> None:
    """Decode at the beginning of a long, untouched cache: no memory of its size may be used."""
    session = open_engine(bundle, batch=1, max_length=LONG)
    size = sum(array.nbytes for array in (*session.keys, *session.values))
    token = np.full((1, 1), 7, np.int64)
    gc.collect()
    before = resident()
    session.forward(token, at(1, 0), at(1, 0))  # loads the head, and binds the layers
    tracemalloc.start()
    try:
        for step in range(1, 4):
            session.forward(token, at(1, step), at(1, 0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # By Python and numpy: logits, bindings of the head.
    assert peak < 65536, "arrays were allocated"
    # Attention's scores for T slots are 6 MiB here and are all that may grow with the cache.
    assert resident() - before < size // 4, "memory grew"
    touched = [array.any(axis=(0, 1, 3)) for array in (*session.keys, *session.values)]
    assert all(np.flatnonzero(row).tolist() == [0, 1, 2, 3] for row in touched), "wrong slots"


linux_only = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"
)


@linux_only
def test_a_decode_step_copies_no_cache_and_allocates_none(bundle_of: BundleOf) -> None:
    check_no_copy(bundle_of("tiny"))


@pytest.fixture
def separate_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a mistake: keys and values come out in memory other than that they go in from."""
    bound = session_module._bound
    kept: list[NDArray[Any]] = []

    def bound_apart(session: Any, inputs: Any, outputs: dict[str, Any]) -> Any:
        apart = {
            name: np.zeros_like(array) if name in ("k_out", "v_out") else array
            for name, array in outputs.items()
        }
        kept.extend(apart.values())
        return bound(session, inputs, apart)

    monkeypatch.setattr(session_module, "_bound", bound_apart)


@linux_only
@pytest.mark.usefixtures("separate_outputs")
def test_the_checks_see_an_engine_with_separate_output_buffers(bundle_of: BundleOf) -> None:
    with pytest.raises(AssertionError, match="not the written slots"):
        check_in_place(open_engine(bundle_of("tiny"), batch=2, max_length=32))
    with pytest.raises(AssertionError, match="memory grew"):
        check_no_copy(bundle_of("tiny"))


@linux_only
def test_the_check_sees_an_engine_that_copies_its_cache(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OrtSession.forward

    def forward_with_copies(self: OrtSession, *arguments: Any) -> Any:
        copies = [array.copy() for array in self.keys]
        del copies
        return forward(self, *arguments)

    monkeypatch.setattr(OrtSession, "forward", forward_with_copies)
    with pytest.raises(AssertionError, match="arrays were allocated"):
        check_no_copy(bundle_of("tiny"))


# What is refused.


def check_refused(session: OrtSession, tokens: Any, start: Any, *wanted: str) -> None:
    before = bits(session)
    arguments = (np.asarray(tokens), np.asarray(start))
    calls: list[Callable[[], Any]] = [
        lambda: session.forward(*arguments, None),
        lambda: session.forward_all(*arguments),
    ]
    for call in calls:
        with pytest.raises(RequestError) as error:
            call()
        for part in wanted:
            assert part in str(error.value)
        assert "\n" not in str(error.value)
    assert all((old == new).all() for old, new in zip(before, bits(session), strict=True))


def test_a_token_outside_the_vocabulary_is_refused(opened: OpenedOf) -> None:
    session = opened("tiny", 2, 32)
    check_refused(session, [[5, 512], [1, 2]], [0, 0], "512", "0 to 511")
    check_refused(session, [[5, 4], [-1, 2]], [0, 0], "-1", "0 to 511")


def test_tokens_that_do_not_fit_the_cache_are_refused(opened: OpenedOf) -> None:
    session = opened("tiny", 2, 32)
    check_refused(session, [[1], [1]], [0, 32], "33", "32", "max_length")
    check_refused(session, [[1] * 33] * 2, [0, 0], "33", "32")
    check_refused(session, [[1], [1]], [-1, 4], "-1")
    session.forward(np.ones((2, 1), np.int64), np.array([0, 31]), at(2, 0))


def test_another_number_of_rows_is_refused(opened: OpenedOf) -> None:
    session = opened("tiny", 2, 32)
    check_refused(session, [[1, 2]], [0, 0], "(1, 2)", "[2,")
    check_refused(session, [[1, 2]] * 3, [0, 0], "(3, 2)", "[2,")
    check_refused(session, [[], []], [0, 0], "(2, 0)")
    check_refused(session, [1, 2], [0, 0], "(2,)")
    check_refused(session, [[1, 2]] * 2, [0], "start", "(1,)", "[2]")
    check_refused(session, [[1, 2]] * 2, [0, 0, 0], "start", "(3,)", "[2]")


@pytest.mark.parametrize("last", [[0, 2], [-1, 0], [0], [0, 0, 0]])
def test_a_last_token_that_is_none_of_the_new_ones_is_refused(
    opened: OpenedOf, last: list[int]
) -> None:
    session = opened("tiny", 2, 32)
    with pytest.raises(RequestError, match=r"last is .*\[2\] numbers, 0 to 1"):
        session.forward(np.ones((2, 2), np.int64), at(2, 0), np.array(last))


def test_a_last_token_may_come_in_any_memory_layout(opened: OpenedOf) -> None:
    session, tokens = opened("tiny", 2, 32), tokens_of(load_golden("tiny"))[:, :4]
    wanted = last_logits(session, tokens, at(2, 0), np.array([1, 3]))
    strided = np.array([1, 0, 3, 0])[::2]
    assert (last_logits(session, tokens, at(2, 0), strided) == wanted).all()
    narrow: Any = np.array([1, 3], np.int32)
    assert (last_logits(session, tokens[:, ::-1][:, ::-1], at(2, 0), narrow) == wanted).all()


@pytest.mark.parametrize(("batch", "length"), [(0, 4), (1, 0), (-1, 4), (1, -3)])
def test_a_session_without_rows_or_slots_is_refused(
    bundle_of: BundleOf, batch: int, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"batch is {batch}, max_length {length}"):
        open_session(bundle_of("tiny"), batch=batch, max_length=length)


def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny")
    other = dataclasses.replace(
        bundle, manifest=dataclasses.replace(bundle.manifest, backend="abacus")
    )
    assert "ort" in backend_names()
    for call in (lambda: builder("abacus"), lambda: open_session(other, batch=1, max_length=4)):
        with pytest.raises(ConfigError, match=r"'abacus'; use .*ort"):
            call()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_model(path: Path) -> None:
    path.write_text("this is no graph\n")


def unknown_op(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].op_type = "Abracadabra"
    onnx.save(model, path)


@pytest.mark.parametrize("damage", [cut, no_model, unknown_op, Path.unlink])
@pytest.mark.parametrize("file", ["embedding.ort.onnx", "layer_01.ort.onnx", "head.ort.onnx"])
def test_a_graph_that_does_not_load_is_named_in_one_line(
    bundle_of: BundleOf, tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    bundle = graphs_changed(bundle_of("tiny"), tmp_path / "bundle", lambda graph: None)
    damage(bundle.folder / file)
    with pytest.raises(BundleError) as error:
        session = open_session(bundle, batch=1, max_length=4)
        session.forward(np.ones((1, 1), np.int64), at(1, 0), at(1, 0))
    assert file in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_that_went_away_are_named_in_one_line(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = dataclasses.replace(bundle_of("tiny"), weights_root=tmp_path)
    with pytest.raises(BundleError, match=r"embedding\.ort\.onnx") as error:
        open_session(bundle, batch=1, max_length=4)
    assert "\n" not in str(error.value)


def test_a_weight_file_that_was_cut_is_refused(bundle_of: BundleOf, tmp_path: Path) -> None:
    bundle = bundle_of("tiny")
    root = tmp_path / "weights"
    shutil.copytree(bundle.weights_root / "ckpt-0", root / "ckpt-0")
    cut(root / "ckpt-0" / "tensor00000_000")
    with pytest.raises(BundleError, match=r"embedding\.ort\.onnx does not load.*out of bounds"):
        open_session(dataclasses.replace(bundle, weights_root=root), batch=1, max_length=4)
