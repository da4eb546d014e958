"""What does not fit a session, or does not load, is refused in one line; no cache changes."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_grok.artifacts import graph_file
from export_grok.engines.backend import backend_names, builder, open_session
from export_grok.engines.ort.session import OrtSession
from export_grok.errors import BundleError, ConfigError, RequestError
from tests.bundles import BundleOf, graphs_changed
from tests.engines.ort.conftest import VARIANTS, OpenedOf
from tests.engines.ort.logits import at


def check_refused(session: OrtSession, tokens: Any, start: Any, *wanted: str) -> None:
    caches = (*session.keys, *session.values)
    before = [array.view(np.uint32).copy() for array in caches]
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
    assert all((old == new.view(np.uint32)).all() for old, new in zip(before, caches, strict=True))


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


def bits(session: OrtSession) -> list[Any]:
    return [array.view(np.uint32).copy() for array in (*session.keys, *session.values)]


@pytest.mark.parametrize("rows", [[4], [-1, 0], [1, 1], [], [[0, 1]]])
def test_rows_that_are_none_of_the_session_or_named_twice_are_refused(
    opened: OpenedOf, rows: list[Any]
) -> None:
    session = opened("tiny", 4, 32)
    before = bits(session)
    with pytest.raises(RequestError, match=r"rows is \[.*0 to 3, each once"):
        session.forward(np.ones((2, 2), np.int64), at(2, 0), at(2, 0), np.array(rows, np.int64))
    assert all((old == new).all() for old, new in zip(before, bits(session), strict=True))


def test_what_does_not_fit_the_rows_that_are_named_is_refused(opened: OpenedOf) -> None:
    session, rows = opened("tiny", 4, 32), np.array([3, 0])
    before, two = bits(session), np.ones((2, 2), np.int64)
    for tokens, start, last, wanted in (
        (np.ones((4, 2), np.int64), at(2, 0), None, r"\(4, 2\); 2 of its rows take \[2, 1 or "),
        (two, at(4, 0), None, r"start is .*2 of its rows take \[2\] numbers"),
        (two, at(2, 31), None, "33 tokens do not fit the cache of 32"),
        (two, at(2, 0), at(4, 0), r"last is .*2 of its rows take \[2\] numbers, 0 to 1"),
    ):
        with pytest.raises(RequestError, match=wanted):
            session.forward(tokens, start, last, rows)
    assert all((old == new).all() for old, new in zip(before, bits(session), strict=True))


@pytest.mark.parametrize(
    ("source", "target", "length", "told"),
    [
        (0, 0, 1, "row 0 cannot be copied to row 0; name two of the session's, 0 to 3"),
        (4, 0, 1, "row 4 "),
        (0, -1, 1, "to row -1;"),
        (0, 1, 0, "0 tokens cannot be copied; a row of this cache has 1 to 32"),
        (0, 1, 33, "33 tokens"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(
    opened: OpenedOf, source: int, target: int, length: int, told: str
) -> None:
    session = opened("tiny", 4, 32)
    before = bits(session)
    with pytest.raises(RequestError, match=told):
        session.copy(source, target, length)
    assert all((old == new).all() for old, new in zip(before, bits(session), strict=True))


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
@pytest.mark.parametrize(("kind", "layer"), [("embedding", None), ("layer", 1), ("head", None)])
def test_a_graph_that_does_not_load_is_named_in_one_line(
    kernels: str,
    bundle_of: BundleOf,
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: str,
    layer: int | None,
) -> None:
    bundle = graphs_changed(bundle_of("tiny"), tmp_path / "bundle", lambda model: None)
    file = graph_file(kind, layer, variant=VARIANTS[kernels])
    damage(bundle.folder / file)
    with pytest.raises(BundleError) as error:
        session = open_session(bundle, batch=1, max_length=4)
        session.forward(np.ones((1, 1), np.int64), at(1, 0), at(1, 0))
    assert str(bundle.folder / file) in str(error.value)
    assert "\n" not in str(error.value)


def no_output(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    del model.graph.output[0]
    onnx.save(model, path)


def wrong_shape(path: Path) -> None:
    """Have the first output be of another shape than the session has memory for."""
    model = onnx.load(path, load_external_data=False)
    output = model.graph.output[0]
    (last,) = [node for node in model.graph.node if output.name in node.output]
    last.output[list(last.output).index(output.name)] = "flat"
    shape = onnx.helper.make_tensor("one_row", onnx.TensorProto.INT64, [1], [-1])
    model.graph.initializer.append(shape)
    model.graph.node.append(onnx.helper.make_node("Reshape", ["flat", "one_row"], [output.name]))
    output.type.tensor_type.ClearField("shape")
    onnx.save(model, path)


@pytest.mark.parametrize("damage", [no_output, wrong_shape])
@pytest.mark.parametrize(("kind", "layer"), [("embedding", None), ("layer", 1), ("head", None)])
def test_a_graph_that_loads_and_is_another_is_named_in_one_line(
    kernels: str,
    bundle_of: BundleOf,
    tmp_path: Path,
    damage: Callable[[Path], None],
    kind: str,
    layer: int | None,
) -> None:
    bundle = graphs_changed(bundle_of("tiny"), tmp_path / "bundle", lambda model: None)
    damage(bundle.folder / graph_file(kind, layer, variant=VARIANTS[kernels]))
    session = open_session(bundle, batch=1, max_length=4)
    name = f"grok1_{kind}" + ("" if layer is None else f"_{layer}")
    with pytest.raises(BundleError, match=f"^graph '{name}' does not run in ") as error:
        session.forward(np.ones((1, 3), np.int64), at(1, 0), at(1, 0))
    assert "\n" not in str(error.value)


def test_weights_that_went_away_are_named_in_one_line(
    kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = dataclasses.replace(bundle_of("tiny"), weights_root=tmp_path)
    graph = re.escape(graph_file("embedding", variant=VARIANTS[kernels]))
    with pytest.raises(BundleError, match=f"/{graph} does not load") as error:
        open_session(bundle, batch=1, max_length=4)
    assert "\n" not in str(error.value)


def test_a_weight_file_that_was_cut_is_refused(
    kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("tiny")
    root = tmp_path / "weights"
    shutil.copytree(bundle.weights_root / "ckpt-0", root / "ckpt-0")
    cut(root / "ckpt-0" / "tensor00000_000")
    graph = re.escape(graph_file("embedding", variant=VARIANTS[kernels]))
    with pytest.raises(BundleError, match=f"/{graph} does not load.*out of bounds"):
        open_session(dataclasses.replace(bundle, weights_root=root), batch=1, max_length=4)
