"""Right engines pass against every reference; each planted fault is found, and named."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_grok.artifacts import Bundle, record_of, write_manifest
from export_grok.config import ExportOptions
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import ConfigError, MissingDependencyError
from export_grok.export.demo import write_demo_checkpoint
from export_grok.runtime.open import open_session
from export_grok.runtime.verify import verify as verify_module
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.planting import plant_fault, why_not
from export_grok.runtime.verify.finding import finding
from export_grok.runtime.verify.options import VerifyOptions
from export_grok.runtime.verify.result import failure
from export_grok.runtime.verify.verify import verify_bundle
from tests.bundles import BundleOf

QUICK = {"prompt": 12, "tokens": 2}

# What is planted only has no mistake to try. A slot that must stay as it is, is not tried either:
# what is wrong is said already.
WITHOUT_CAUSE = {
    "a_slot_too_far",
    *(name for name, fault in FAULTS.items() if fault.mistake is None),
}


def options(**values: Any) -> VerifyOptions:
    return VerifyOptions(**QUICK | values)


@pytest.mark.parametrize("against", ["torch", "ort", "checkpoint", "bundle"])
def test_a_right_engine_passes_against_every_reference(
    against: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("demo")
    where = against
    if against == "checkpoint":
        where = str(tmp_path / "demo")
        write_demo_checkpoint(Path(where))
    if against == "bundle":
        where = str(bundle.folder)
    found = verify_bundle(bundle.folder, options(against=where), threads=1)
    assert found.passed, failure(found)
    assert [str(graph.graph) for graph in found.graphs] == [
        "embedding",
        *(f"layer {layer}" for layer in range(bundle.config.num_layers)),
        "head",
        "head_all",
    ]
    assert found.free_run is not None
    assert found.free_run.positions == sum(found.rows)


@pytest.mark.parametrize("name", ["tiny", "tiny8", "deep13"])
def test_a_right_engine_passes_against_the_original_itself(name: str, bundle_of: BundleOf) -> None:
    bundle = bundle_of(name)
    found = verify_bundle(bundle.folder, options(against="goldens"), threads=1)
    assert found.passed, failure(found)
    assert {one.tensor for one in found.graphs[1].deviations} == {
        "k_out",
        "v_out",
        "experts",
        "gates",
        "h_out",
    }


PLANTED = [name for name, fault in FAULTS.items() if fault.of_ranks is None]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_in_its_graph_and_named(
    name: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    bundle = next(
        bundle_of(model)
        for model in ("demo", "tiny", "deep13")
        if why_not(fault, bundle_of(model)) is None
    )
    wrong = plant_fault(bundle, fault, tmp_path / "wrong")
    found = verify_bundle(wrong.folder, options(), threads=1)
    failed = found.failed
    assert failed is not None
    planted = wrong.manifest.engine["planted_fault"]
    assert (failed.graph.kind, failed.graph.layer) == (fault.graph, planted["layer"])
    assert failed.first_failed is not None
    assert failed.first_failed.tensor == fault.shows
    assert found.free_run is None
    if name in WITHOUT_CAUSE:
        assert found.cause is None
    else:
        assert found.cause is not None
        assert found.cause.fault == name
        assert fault.title in failure(found)


def test_the_check_goes_on_behind_a_fault_if_told_to(bundle_of: BundleOf, tmp_path: Path) -> None:
    wrong = plant_fault(bundle_of("demo"), FAULTS["silu_for_gelu"], tmp_path / "wrong")
    found = verify_bundle(wrong.folder, options(keep_going=True), threads=1)
    assert [graph.passed for graph in found.graphs] == [True, True, False, True, True, True]
    assert found.free_run is not None
    assert not found.free_run.passed


def test_one_damaged_block_of_a_weight_is_found_against_the_checkpoint_only(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    """The model in PyTorch reads the bundle's weights: it is wrong in the same way."""
    checkpoint, out = bundle_of("demo").weights_root, tmp_path / "copied"
    copied = engine_from_source(
        checkpoint, out, backend="ort", options=ExportOptions(copy_weights=True)
    )
    weight = copied.index()["layers.1.attention.key.weight"]
    path = copied.weights_root / weight.file
    content = bytearray(path.read_bytes())
    middle = weight.offset + weight.nbytes // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    # As if the file were too large to be looked at whole when a bundle is opened.
    records = copied.manifest.weight_files | {weight.file: record_of(path)}
    write_manifest(out, dataclasses.replace(copied.manifest, weight_files=records))

    assert verify_bundle(out, options(), threads=1).passed
    found = verify_bundle(out, options(against=str(checkpoint)), threads=1)
    assert found.failed is not None
    assert str(found.failed.graph) == "layer 1"
    assert found.failed.first_failed is not None
    assert found.failed.first_failed.tensor == "k_out"
    text = "\n".join(finding(found))
    assert "k_out is off by" in text
    assert re.search(
        r"at row \d+, position \d+, head \d+, channel \d+: engine .*, reference", text
    )
    assert re.search(r"differences: largest [\d.]+, mean [\d.]+", text)


def test_what_is_wrong_between_graphs_shows_running_free(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph is right, and the session that runs them is not: it begins a slot too late."""

    @contextmanager
    def late(bundle: Bundle, **sizes: Any) -> Iterator[Any]:
        with open_session(bundle, **sizes | {"max_length": sizes["max_length"] + 16}) as session:
            right = session.forward

            def forward(tokens: Any, start: Any, last: Any) -> Any:
                return right(tokens, start + (start > 0), last)

            monkeypatch.setattr(session, "forward", forward)
            yield session

    monkeypatch.setattr(verify_module, "open_session", late)
    found = verify_bundle(bundle_of("demo").folder, options(), threads=1)
    assert found.failed is None
    assert not found.passed
    assert found.free_run is not None
    assert max(found.free_run.error, key=lambda step: found.free_run.error[step]).startswith(  # type: ignore[union-attr]
        "decode"
    )


def test_chosen_layers_are_compared_and_no_others(bundle_of: BundleOf) -> None:
    found = verify_bundle(bundle_of("demo").folder, options(layers=(0, 2)), threads=1)
    assert [str(graph.graph) for graph in found.graphs] == ["layer 0", "layer 2"]
    assert found.free_run is None
    assert any("free run" in note for note in found.notes)


def test_without_graphs_the_whole_engine_is_compared_alone(
    bundle_of: BundleOf, tmp_path: Path
) -> None:
    bundle = bundle_of("demo")
    for folder, passed in (
        (bundle.folder, True),
        (plant_fault(bundle, FAULTS["silu_for_gelu"], tmp_path / "wrong").folder, False),
    ):
        found = verify_bundle(folder, options(graphs=False), threads=1)
        assert found.graphs == ()
        assert found.free_run is not None
        assert found.passed is passed
        assert (found.engine, found.dtype) == ("ort engine", "float32")


def test_a_tolerance_of_nothing_fails_a_right_engine(bundle_of: BundleOf) -> None:
    found = verify_bundle(
        bundle_of("demo").folder, options(layers=(1,), tolerances={"moe": 0.0}), threads=1
    )
    assert found.failed is not None
    assert found.failed.first_failed is not None
    assert found.failed.first_failed.tensor == "moe"
    assert found.cause is None


def test_two_runs_find_the_same(bundle_of: BundleOf) -> None:
    first, second = (
        verify_bundle(bundle_of("tiny8").folder, options(), threads=1).to_dict() for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layers": (3, 7)}, "there is no layer 3, 7"),
        ({"tolerances": {"h_ot": 1.0}}, "did you mean 'h_out'?"),
        ({"against": "tensorflow"}, "there is no such reference"),
        ({"prompt": 300}, "do not fit this engine, which takes 256"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    values: dict[str, Any], said: str, bundle_of: BundleOf
) -> None:
    with pytest.raises(ConfigError, match=said):
        verify_bundle(bundle_of("demo").folder, options(**values))


def test_without_polygraphy_the_extra_is_named(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polygraphy", None)
    with pytest.raises(MissingDependencyError, match=r"export-grok\[verify\]"):
        verify_bundle(bundle_of("demo").folder, options())


def test_rows_are_of_the_bundles_own_text(bundle_of: BundleOf) -> None:
    found = verify_bundle(bundle_of("demo").folder, options(layers=(0,)), threads=1)
    assert found.text == "verses of Ecclesiastes"
    assert found.rows == (14, 10, 3)
    assert np.isfinite([one.error for graph in found.graphs for one in graph.deviations]).all()
