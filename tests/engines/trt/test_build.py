"""Plans are built whole or not at all, once for the same input, and for what can hold them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export_grok.artifacts import MANIFEST, Bundle, open_bundle
from export_grok.config import EngineOptions, ExportOptions, GrokConfig
from export_grok.engines.pipeline import engine_from_source
from export_grok.engines.trt.plan import Plan, plan_from_graph
from export_grok.engines.trt.record import PHASES, Sizes, TrtRecord, record_in
from export_grok.errors import BuildError, BundleError, ConfigError, ExportGrokError
from export_grok.export.contract import GRAPH_KINDS
from tests.bundles import checkpoint_copy, hashes
from tests.conftest import DATA, cuda_devices

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
pytestmark = pytest.mark.usefixtures("traced_once")

BUILDER = "export_grok.engines.trt.build.plan_from_graph"
SMALL = EngineOptions(sm=(89,), batch=2, chunk=80, max_length=96)
Build = Callable[..., Bundle]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build plans of `tiny` in one folder, as the command does; options are named."""

    def built(source: Path | None = None, overwrite: bool = False, **options: Any) -> Bundle:
        folder = source or DATA / "tiny"
        return engine_from_source(
            folder,
            tmp_path / "engine" if source is None else None,
            backend="trt-rtx",
            engine=dataclasses.replace(SMALL, **options),
            options=ExportOptions(overwrite=overwrite),
        )

    return built


_built: dict[tuple[bytes, Any], tuple[Plan, bytes]] = {}


def plan_once(graph: Path, out: Path, **rest: Any) -> Plan:
    """Build a plan, or write the one that was built of the same graph in the same way."""
    key = (graph.read_bytes(), tuple(sorted(rest.items())))
    if key in _built:
        plan, content = _built[key]
        out.write_bytes(content)
        return plan
    plan = plan_from_graph(graph, out, **rest)
    _built[key] = plan, out.read_bytes()
    return plan


@pytest.fixture(autouse=True)
def plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all builds share their plans, as they share their traces."""
    monkeypatch.setattr(BUILDER, plan_once)


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every plan as it is built."""
    built: list[str] = []

    def counted(graph: Path, out: Path, **rest: Any) -> Any:
        built.append(out.name)
        return plan_once(graph, out, **rest)

    monkeypatch.setattr(BUILDER, counted)
    return built


def test_a_bundle_has_a_plan_of_every_graph_for_every_architecture(build: Build) -> None:
    bundle = build(sm=(89, 120))
    record = record_in(bundle.manifest)
    keys = {(graph.kind, graph.phase) for graph in record.graphs}
    assert keys == {(kind, phase) for kind in GRAPH_KINDS for phase in PHASES}
    assert {(plan.kind, plan.phase, plan.sm) for plan in record.plans} == {
        (*key, sm) for key in keys for sm in (89, 120)
    }
    assert record.sizes == Sizes(batch=2, chunk=80, max_length=96)
    assert (bundle.manifest.backend, bundle.manifest.dtype) == ("trt-rtx", "bfloat16")
    assert record.kernels == {}  # TensorRT-RTX has no plugins
    assert open_bundle(bundle.folder, kind="engine").manifest == bundle.manifest
    assert TrtRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_unchanged_input_is_built_once(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = build()
    before = hashes(bundle.folder)
    built = count_plans(monkeypatch)
    assert build().manifest == bundle.manifest
    assert built == []
    assert hashes(bundle.folder) == before


@pytest.mark.parametrize(
    ("option", "kinds"),
    [
        ({"sm": (80,)}, set(GRAPH_KINDS)),
        ({"batch": 3}, set(GRAPH_KINDS)),
        ({"max_length": 200}, {"layer"}),
        ({"tensor_parallel": 2}, set(GRAPH_KINDS)),
    ],
)
def test_another_option_builds_what_it_changes_and_leaves_no_plan_of_the_old(
    build: Build, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], kinds: set[str]
) -> None:
    build()
    built = count_plans(monkeypatch)
    bundle = build(**option)
    assert {name.split(".")[0] for name in built} == kinds
    record = record_in(bundle.manifest)
    names = set(record.files)
    assert {f"trt/{path.name}" for path in (bundle.folder / "trt").iterdir()} == names
    assert names <= bundle.manifest.files.keys()


def test_a_build_that_is_broken_off_leaves_graphs_and_goes_on_where_it_was(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(batch=5).folder  # another engine is there already
    done: list[Path] = []

    def killed(graph: Path, out: Path, **rest: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(out)
        return plan_once(graph, out, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(BUILDER, killed)
        with pytest.raises(KeyboardInterrupt):
            build()
    assert open_bundle(folder).manifest.kind == "graphs"
    with pytest.raises(BundleError, match="holds graphs and no engine"):
        open_bundle(folder, kind="engine")
    built = count_plans(monkeypatch)
    bundle = build()
    assert not {path.name for path in done} & set(built)
    assert all(path.exists() for path in done)
    open_bundle(bundle.folder, kind="engine")


def test_a_changed_plan_is_seen_before_anything_is_deserialised(build: Build) -> None:
    bundle = build()
    plan = bundle.folder / record_in(bundle.manifest).plans[0].file
    plan.write_bytes(plan.read_bytes()[:-1])
    with pytest.raises(BundleError, match=rf"{plan.name} has \d+ bytes, not"):
        open_bundle(bundle.folder)


def test_a_weight_that_is_not_the_same_makes_the_bundle_anew(build: Build, tmp_path: Path) -> None:
    source = checkpoint_copy("tiny", tmp_path / "checkpoint")
    out = tmp_path / "out"

    def run(**options: Any) -> Bundle:
        return engine_from_source(
            source, out, backend="trt-rtx", engine=SMALL, options=ExportOptions(**options)
        )

    before = run().manifest
    norm = source / "ckpt-0" / "tensor00001_000"
    content = bytearray(norm.read_bytes())
    content[-20] ^= 1
    norm.write_bytes(content)
    with pytest.raises(BundleError, match="--overwrite"):
        run()
    after = run(overwrite=True).manifest
    assert after.source != before.source
    assert record_in(after) == record_in(before)  # the plans hold no weights


def test_a_damaged_record_is_told(build: Build) -> None:
    bundle = build()
    path = bundle.folder / MANIFEST
    manifest = json.loads(path.read_bytes())
    del manifest["engine"]["sizes"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"record of the trt-rtx engine is damaged .'sizes'"):
        record_in(open_bundle(bundle.folder).manifest)


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        ({"sm": (75,)}, ConfigError, r"SM75; use --sm 80,86,89,120"),
        ({"sm": (90,)}, ConfigError, r"SM90; use --sm 80"),
        ({"tensor_parallel": 8}, ConfigError, r"by 8 ranks; use 1, 2$"),
        ({"gpu_memory": 1e-4}, ConfigError, r"one GPU needs .* GB .*--gpu-memory says less"),
        ({"max_length": 1 << 24}, ConfigError, r"cache of \d+ slots; positions"),
        ({"batch": 4000}, ConfigError, r"batch is 4000; graphs are made for up to 1024"),
        ({"batch": 1000, "max_length": 1 << 20}, ConfigError, r"cache of 1000 rows of 1048576"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_nothing_is_built(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    option: dict[str, Any],
    error: type[ExportGrokError],
    said: str,
) -> None:
    built = count_plans(monkeypatch)
    with pytest.raises(error, match=said):
        build(**option)
    assert built == []


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a GPU")
def test_without_a_gpu_trt_names_what_builds_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    with pytest.raises(BuildError, match=r"no NVIDIA driver.*trt-rtx builds on a CPU") as error:
        engine_from_source(DATA / "tiny", out, backend="trt", engine=EngineOptions(batch=2))
    assert "\n" not in str(error.value)


def test_options_of_plans_are_refused_for_an_engine_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--batch, --sm: the ort engine|--sm, --batch"):
        engine_from_source(DATA / "tiny", tmp_path / "out", backend="ort", engine=SMALL)


def test_sizes_are_those_of_the_model_where_none_are_asked_for(tiny_config: GrokConfig) -> None:
    sizes = Sizes.of(EngineOptions(), tiny_config)
    assert sizes.max_length == tiny_config.sequence_len
    assert sizes.slots >= sizes.max_length + sizes.chunk - 1
    assert sizes.slots % 128 == 0
