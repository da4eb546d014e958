"""Plans are built on a CPU by TensorRT-RTX, whole or not at all; what it refuses is told."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx.parser
import pytest

from export_grok.engines.trt import api, plan
from export_grok.engines.trt.callbacks import Progress, messages_of
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.plan import Plan, plan_from_graph
from export_grok.errors import BuildError, ConfigError, OutputError

trt = pytest.importorskip("tensorrt_rtx", reason="builds plans by tensorrt_rtx")

RTX = flavour_of("trt-rtx")

# Weights are inputs, a cache is written in place, a plugin node has a function for a body.
GRAPH = """
<ir_version: 10, opset_import: ["": 24, "grok1": 1, "trt": 1]>
tiny (bfloat16[4,64] x, int8[64,32] w, bfloat16[1,32] s, bfloat16[2,1,16,8] cache,
      bfloat16[2,1,1,8] new, int64[2] at) => (bfloat16[4,32] y, bfloat16[2,1,16,8] written)
{
  h = grok1.GrokTest <plugin_namespace = "grok1", plugin_version = "1", parts = 2> (x, w, s)
  y = trt.DistCollective <collective_operation = "all_reduce", reduce_op = "sum", nb_rank = 8,
                          root = -1, group_size = 0> (h)
  written = TensorScatter <axis = 2> (cache, new, at)
}
<opset_import: ["": 24], domain: "grok1">
GrokTest <parts: int = 1> (a, b, c) => (d)
{
  e = Cast <to = 16> (b)
  i = Cast <to = 1> (b)
  f = Mul (e, c)
  d = MatMul (a, f)
}
"""
REDUCE = "y = trt.DistCollective"


def written(folder: Path, text: str = GRAPH) -> Path:
    path = folder / "tiny.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


def long_chain(nodes: int) -> str:
    """Return a graph that takes TensorRT long enough to be stopped."""
    steps = "\n".join(
        f"  m{i} = MatMul (a{i}, w)\n  s{i} = Softmax (m{i})\n  a{i + 1} = Add (s{i}, x)"
        for i in range(nodes)
    )
    return f"""
<ir_version: 10, opset_import: ["": 24]>
chain (bfloat16[4,64] x, bfloat16[64,64] w) => (bfloat16[4,64] y)
{{
  a0 = Identity (x)
{steps}
  y = Identity (a{nodes})
}}
"""


def build(folder: Path, text: str = GRAPH, **options: Any) -> tuple[Path, Plan]:
    out = folder / "tiny.plan"
    built = plan_from_graph(written(folder, text), out, **{"flavour": RTX, "sm": 89, **options})
    return out, built


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_a_plan_is_built_for_each_architecture(tmp_path: Path, sm: int) -> None:
    out, built = build(tmp_path, sm=sm)
    assert out.stat().st_size == built.bytes > 0
    assert built.seconds > 0
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.onnx", "tiny.plan"}


def test_plans_of_two_architectures_differ_and_of_one_are_equal(tmp_path: Path) -> None:
    plans = [build(tmp_path, sm=sm)[0].read_bytes() for sm in (80, 120, 80)]
    assert plans[0] != plans[1]
    assert plans[0] == plans[2]


@pytest.mark.parametrize(
    ("good", "planted", "told"),
    [
        (
            "d = MatMul (a, f)",
            "d = MatMul (a, i)",
            ["MatMul, in node_of_h (GrokTest)", "same input"],
        ),
        ("d = MatMul (a, f)", "d = Unheard (a, f)", ["Unheard", "GrokTest", "Plugin not found"]),
        (REDUCE, "z = Unheard (h) y = Unseen (h) q = trt.DistCollective", ["Unheard", "Unseen"]),
        (
            REDUCE,
            "z = Attention <softcap = 30.0> (cache, cache, cache) y = trt.DistCollective",
            ["node 1 Attention", "softcap", "(UNSUPPORTED_NODE)"],
        ),
        (
            "TensorScatter <axis = 2> (cache, new, at)",
            'TensorScatter <axis = 2, mode = "circular"> (cache, new, at)',
            ["linear mode"],
        ),
        (
            "written = TensorScatter <axis = 2> (cache, new, at)",
            "w0 = TensorScatter <axis = 2> (cache, new, at) written = Neg (w0)",
            ["must be a network output"],
        ),
        (
            "d = MatMul (a, f)",
            "g = MatMul (a, f) k = Constant <value = int8[1, 1] {3}> () "
            "j = Cast <to = 16> (k) d = Mul (g, j)",
            ["Quantized constant"],
        ),
    ],
)
def test_what_tensorrt_refuses_is_told_and_nothing_is_written(
    tmp_path: Path, good: str, planted: str, told: list[str]
) -> None:
    assert good in GRAPH
    with pytest.raises(BuildError) as refused:
        build(tmp_path, GRAPH.replace(good, planted))
    text = str(refused.value)
    assert text.startswith(f"tensorrt_rtx {trt.__version__} cannot build {tmp_path}/tiny.onnx")
    assert "SM89" in text.splitlines()[0]
    assert all(part in text for part in told), text
    assert "cudaError" not in text  # that there is no driver is no fault of the graph
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_a_build_after_a_refused_one_tells_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="Unheard"):
        build(tmp_path, GRAPH.replace("MatMul", "Unheard"))
    with pytest.raises(BuildError, match="workspace") as refused:
        build(tmp_path, workspace_bytes=1)
    assert "Unheard" not in str(refused.value)


def test_a_dynamic_shape_is_refused_before_tensorrt_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt, "OnnxParser", None)
    text = GRAPH.replace("bfloat16[4,64] x", "bfloat16[B,64] x").replace("[4,32] y", "[B,32] y")
    with pytest.raises(BuildError) as refused:
        build(tmp_path, text)
    assert "input x has shape [B,64]" in str(refused.value)
    assert "output y has shape [B,32]" in str(refused.value)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph")
    for path in (broken, tmp_path / "missing.onnx"):
        with pytest.raises(BuildError, match=f"{path} cannot be read as ONNX"):
            plan_from_graph(path, tmp_path / "out.plan", flavour=RTX, sm=89)


def test_an_architecture_that_cannot_be_built_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SM90"):
        build(tmp_path, sm=90)


def test_a_refused_build_leaves_an_older_plan_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "tiny.plan").write_bytes(b"older")
    with pytest.raises(BuildError):
        build(tmp_path, GRAPH.replace("MatMul", "Unheard"))
    assert (tmp_path / "tiny.plan").read_bytes() == b"older"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"missing/tiny\.plan"):
        plan_from_graph(written(tmp_path), tmp_path / "missing" / "tiny.plan", flavour=RTX, sm=89)


def test_progress_is_shown_from_0_to_100_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    @contextlib.contextmanager
    def bar(label: str, total: int, *, unit: str) -> Iterator[Callable[[int], None]]:
        assert (label, total, unit) == ("tiny.plan", 100, "%")
        yield shown.append

    monkeypatch.setattr(plan, "progress_bar", bar)
    monkeypatch.setattr(plan, "SECONDS_BETWEEN_LOOKS", 0.01)
    build(tmp_path, long_chain(60))
    assert sum(shown) == 100
    assert min(shown) >= 0
    assert sum(part > 0 for part in shown) > 1


def test_ctrl_c_ends_the_build_early_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Progress] = []

    class Kept(Progress):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    def interrupted(_waiting: object, timeout: float) -> None:
        time.sleep(0.001)
        if kept[0].fraction > 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(plan, "Progress", Kept)
    monkeypatch.setattr(plan, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, long_chain(150))
    assert "Build canceled by user" in messages_of(trt).errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]
    monkeypatch.undo()
    assert build(tmp_path)[1].bytes > 0  # the next build is not cancelled


# RTX takes timing caches, says that they do nothing, and gives an empty one back.
@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX")
def test_a_timing_cache_is_kept_where_the_package_times_kernels(tmp_path: Path) -> None:
    cache = tmp_path / "timings"
    build(tmp_path, timing_cache=cache)
    assert not cache.exists()
    times = dataclasses.replace(RTX, keeps_timings=True)
    for content in (None, b"damaged"):
        if content is not None:
            cache.write_bytes(content)
        build(tmp_path, flavour=times, timing_cache=cache)
        assert cache.read_bytes() != b"damaged"


def test_settings_reach_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    configure = plan._configure

    def kept(module: api.TensorRT, config: Any, **options: Any) -> None:
        configure(module, config, **options)
        configs.append(
            SimpleNamespace(
                tf32=config.get_flag(trt.BuilderFlag.TF32),
                workspace=config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
                streams=config.max_aux_streams,
                capturable=config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION),
            )
        )

    monkeypatch.setattr(plan, "_configure", kept)
    build(tmp_path, workspace_bytes=1 << 26)
    build(tmp_path, tf32=True)
    exact, rounded = configs
    assert (exact.tf32, exact.workspace) == (False, 1 << 26)
    assert (rounded.tf32, rounded.workspace > 1 << 26) == (True, True)
    assert exact.streams == rounded.streams == 0
    assert exact.capturable and rounded.capturable


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (api.TensorRT, trt),
        (api.Builder, trt.Builder),
        (api.BuilderConfig, trt.IBuilderConfig),
        (api.HostMemory, trt.IHostMemory),
        (api.Logger, trt.ILogger),
        (api.Network, trt.INetworkDefinition),
        (api.Parser, trt.OnnxParser),
        (api.ParserError, trt.ParserError),
        (api.ProgressMonitor, trt.IProgressMonitor),
        (api.TimingCache, trt.ITimingCache),
    ],
)
def test_tensorrt_has_what_the_protocols_name(ours: type, theirs: Any) -> None:
    names = [name for name in {**vars(ours), **ours.__annotations__} if name[0] != "_"]
    assert names
    assert not [name for name in names if not hasattr(theirs, name)]
