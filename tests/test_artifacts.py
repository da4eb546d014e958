"""A bundle opens if every file is what its manifest says; else one error names all faults."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.artifacts import (
    MANIFEST,
    graph_file,
    open_bundle,
    write_manifest,
)
from export_grok.config import DTYPES, GrokConfig
from export_grok.errors import BundleError
from export_grok.manifest import FileRecord, HeadError, Manifest, WeightsPlace
from scripts.fuzzing.targets.bundle_files import write_bundle

shared_folder = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Rewrite = Callable[[Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def made(tmp_path: Path, tiny_config: GrokConfig) -> Path:
    """Return a bundle of two made-up graphs that points at one file of weights beside it."""
    weights, folder = tmp_path / "checkpoint", tmp_path / "bundle"
    weights.mkdir()
    folder.mkdir()
    write_bundle(folder, weights, tiny_config, absolute=str(weights))
    return folder


@pytest.fixture
def rewrite(made: Path) -> Rewrite:
    """Return what changes the JSON of the manifest in place."""

    def change(by: Callable[[dict[str, Any]], None]) -> None:
        value = json.loads((made / MANIFEST).read_bytes())
        by(value)
        (made / MANIFEST).write_text(json.dumps(value))

    return change


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(folder, **options)
    return str(caught.value)


def test_a_whole_bundle_opens(made: Path) -> None:
    bundle = open_bundle(made, kind="engine")
    assert bundle.folder == made
    assert bundle.config == bundle.manifest.config
    assert bundle.weights_root == made.parent / "checkpoint"
    assert bundle.head_root == made
    assert bundle.index()["w"].shape == (6,)
    assert bundle.tokenizer is None


texts = st.dictionaries(st.text(), st.text(), max_size=3)
errors = st.floats(min_value=0, allow_infinity=False)
records = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}(/[a-z]{1,5})?", fullmatch=True),
    st.builds(FileRecord, bytes=st.integers(0, 2**50), fingerprint=st.text()),
    max_size=3,
)


@settings(shared_folder, max_examples=50)
@given(
    kind=st.sampled_from([("graphs", None), ("engine", "ort"), ("engine", "trt")]),
    dtype=st.sampled_from(DTYPES),
    error=st.none() | st.builds(HeadError, relative=errors, largest=errors),
    texts=texts,
    records=records,
    copied=st.booleans(),
    counts=st.dictionaries(st.text(), st.integers(0, 99), max_size=3),
)
def test_a_manifest_survives_json(
    kind: tuple[Any, str | None],
    dtype: Any,
    error: HeadError | None,
    texts: dict[str, str],
    records: dict[str, FileRecord],
    copied: bool,
    counts: dict[str, int],
    tiny_config: GrokConfig,
    tmp_path: Path,
) -> None:
    manifest = Manifest(
        kind=kind[0],
        backend=kind[1],
        config=tiny_config,
        dtype=dtype,
        head="float32" if error is None else "int8",
        head_error=error,
        weights=WeightsPlace(copied=copied, relative=".", absolute=""),
        source=texts,
        versions=texts,
        files=records,
        weight_files=records,
        ports={"layer": [{"name": "h", "shape": ["B", 1]}]},
        lowering={op: {"lowered": count, "function": 0} for op, count in counts.items()},
    )
    write_manifest(tmp_path, manifest)
    value = json.loads((tmp_path / MANIFEST).read_bytes())
    assert Manifest.from_dict(value, source=tmp_path) == manifest


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_version_is_told_in_plain_words(
    version: object, made: Path, rewrite: Rewrite
) -> None:
    rewrite(lambda value: value.update(format_version=version))
    assert refusal(made) == (
        f"{made / MANIFEST} has format version {version}; this program reads 1: "
        "build the bundle again"
    )


def test_a_json_of_something_else_is_no_manifest(made: Path) -> None:
    (made / MANIFEST).write_text('{"name": "package"}')
    assert refusal(made) == f"{made / MANIFEST} is not a manifest of export-grok"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000])
def test_a_manifest_that_is_no_json_object_is_refused(content: bytes, made: Path) -> None:
    (made / MANIFEST).write_bytes(content)
    assert str(made / MANIFEST) in refusal(made)


def test_a_folder_without_manifest_is_unfinished(made: Path) -> None:
    (made / MANIFEST).unlink()
    assert f"{made} has no manifest.json: it is no bundle, or its making was" in refusal(made)


def test_what_is_no_folder_is_told(made: Path) -> None:
    for path in (made / "none", made / "head.onnx"):
        assert refusal(path) == f"{path} is no folder; give the --out folder of build-engine"


def test_graphs_are_no_engine(made: Path, rewrite: Rewrite) -> None:
    rewrite(lambda value: value.update(kind="graphs", backend=None))
    assert open_bundle(made).manifest.kind == "graphs"
    assert refusal(made, kind="engine") == (
        f"{made} holds graphs and no engine; build one: export-grok build-engine {made}"
    )


@pytest.mark.parametrize("name", ["../checkpoint/w", "/etc/passwd", "a/../../b", "a\0b"])
@pytest.mark.parametrize("table", ["files", "weight_files"])
def test_a_path_out_of_the_folder_is_refused(
    name: str, table: str, made: Path, rewrite: Rewrite
) -> None:
    rewrite(lambda value: value[table].update({name: {"bytes": 24, "fingerprint": "x"}}))
    assert f"{table}: {name!r} is outside the folder" in refusal(made)


@pytest.mark.parametrize("table", ["files", "weight_files"])
def test_a_name_that_no_file_can_have_is_a_missing_file(
    table: str, made: Path, rewrite: Rewrite
) -> None:
    name = "x" * 5000
    rewrite(lambda value: value[table].update({name: {"bytes": 24, "fingerprint": "x"}}))
    assert f"{name}: File name too long" in refusal(made)


def test_a_manifest_from_before_there_was_a_choice_of_head_has_a_float32_one(
    made: Path, rewrite: Rewrite
) -> None:
    def change(value: dict[str, Any]) -> None:
        del value["head"], value["head_error"]

    rewrite(change)
    bundle = open_bundle(made)
    assert (bundle.manifest.head, bundle.manifest.head_error) == ("float32", None)
    assert bundle.head_root == bundle.weights_root


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": "int4"}, "head: 'int4' is none of float32, int8"),
        ({"head": "float32"}, "head is float32, head_error HeadError(relative=0.005"),
        ({"head_error": None}, "head is int8, head_error None"),
        ({"head_error": {"relative": 0.1}}, "head_error: "),
        ({"head_error": {"relative": -0.1, "largest": 0.1}}, "relative is -0.1, no finite float"),
        ({"head_error": {"relative": 1, "largest": 0.1}}, "relative is 1, no finite float"),
        ({"head_error": [0.1, 0.1]}, "is no object"),
    ],
)
def test_a_head_that_contradicts_itself_is_refused(
    changes: dict[str, Any], said: str, made: Path, rewrite: Rewrite
) -> None:
    rewrite(lambda value: value.update(changes))
    assert said in refusal(made)


def test_all_damaged_fields_are_named_at_once(made: Path, rewrite: Rewrite) -> None:
    def change(value: dict[str, Any]) -> None:
        del value["source"]
        value["config"]["num_layers"] = 0
        value["dtype"] = "float8"
        value["weights"]["copied"] = "yes"
        value["lowering"] = {"op": {"lowered": 1}}

    rewrite(change)
    text = refusal(made)
    for said in (
        "source is missing",
        "num_layers is 0; it must be a positive",
        "dtype: 'float8' is none of float32, float16, bfloat16",
        "copied is 'yes'",
        "lowering: op has counts of lowered",
    ):
        assert said in text


def test_all_damaged_files_are_named_at_once(made: Path) -> None:
    (made / "head.onnx").unlink()
    (made / "head.ort.onnx").write_bytes(b"grapH")
    weights = made.parent / "checkpoint" / "w"
    weights.write_bytes(bytes(23))
    lines = refusal(made).split("\n  ")
    assert lines == [
        f"{made} cannot be used:",
        f"{made / 'head.onnx'}: No such file or directory",
        f"{made / 'head.ort.onnx'} has changed since the bundle was made",
        f"{weights} has 23 bytes, not 24",
        f"the bundle points at the weights in {weights.parent}; "
        "if they were moved, say where to with --weights-root",
    ]


def test_a_name_that_no_file_can_have_is_a_file_that_is_not_there(
    made: Path, rewrite: Rewrite
) -> None:
    record = {"bytes": 1, "fingerprint": "x"}
    rewrite(lambda value: value["files"].update({"\ud800": record, "head2.onnx": record}))
    text = refusal(made)
    assert "ud800" in text
    assert f"{made / 'head2.onnx'}: No such file" in text
    text.encode()


def test_bundle_and_weights_may_be_moved_together(made: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("bundle", "checkpoint"):
        shutil.move(tmp_path / name, moved / name)
    assert open_bundle(moved / "bundle").weights_root == moved / "checkpoint"


def test_a_bundle_alone_may_be_moved(made: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved = Path(shutil.move(made, tmp_path / "far" / "away"))
    assert open_bundle(moved).weights_root == tmp_path / "checkpoint"


def test_weights_that_were_moved_are_found_where_they_are_said_to_be(made: Path) -> None:
    moved = (made.parent / "checkpoint").rename(made.parent / "moved")
    assert "--weights-root" in refusal(made)
    assert open_bundle(made, weights_root=moved).weights_root == moved
    assert str(made / "w") in refusal(made, weights_root=made)


def test_weights_in_the_bundle_need_no_way(made: Path, rewrite: Rewrite) -> None:
    place = dataclasses.asdict(WeightsPlace(copied=True, relative=".", absolute=""))
    rewrite(lambda value: value.update(weights=place))
    assert "--weights-root" not in refusal(made)
    shutil.copy(made.parent / "checkpoint" / "w", made)
    assert open_bundle(made).weights_root == made


@pytest.mark.parametrize(
    ("arguments", "variant", "name"),
    [
        (("head",), "", "head.onnx"),
        (("layer", 3), "", "layer_03.onnx"),
        (("layer", 63), "ort", "layer_63.ort.onnx"),
        (("layer",), "template", "layer.template.onnx"),
    ],
)
def test_a_graph_has_one_name(arguments: tuple[Any, ...], variant: str, name: str) -> None:
    assert graph_file(*arguments, variant=variant) == name
