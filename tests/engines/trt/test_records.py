"""Records that tests of the session make up are those of a build; the graphs behind them run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import Dtype, HeadDtype
from export_grok.engines.trt.record import PHASES, GraphRecord, Phase, Sizes
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from tests.conftest import load_golden
from tests.engines.trt.fake_device import Compute
from tests.engines.trt.fake_session import Opened, open_fake
from tests.engines.trt.lowered import Lowered, bindings, run
from tests.engines.trt.records import record_for
from tests.engines.trt.test_rows import Rows

NAME = "tiny8"
SIZES = Sizes(batch=2, chunk=7, max_length=48)


@pytest.mark.parametrize(
    ("sizes", "dtype", "kinds"),
    [
        (SIZES, "float32", GRAPH_KINDS),
        (Sizes(tensor_parallel=4, chunk=8, max_length=41), "bfloat16", ("embedding", "layer")),
    ],
)
def test_a_made_up_record_binds_what_a_lowered_graph_does(
    sizes: Sizes, dtype: Dtype, kinds: tuple[GraphKind, ...]
) -> None:
    for kind in kinds:
        check_bindings(kind, sizes, dtype, "float32")


def test_a_made_up_record_of_an_int8_head_binds_what_the_graph_does() -> None:
    check_bindings("head", SIZES, "float32", "int8")


def check_bindings(kind: GraphKind, sizes: Sizes, dtype: Dtype, head: HeadDtype) -> None:
    graphs = record_for(load_golden(NAME).config, sizes, dtype, head=head).graphs
    for phase in PHASES:
        (made_up,) = (graph for graph in graphs if (graph.kind, graph.phase) == (kind, phase))
        built = bindings(graph_of(kind, phase, sizes, dtype, head))
        assert {row.name: row for row in built} == {row.name: row for row in made_up.bindings}
        own = [row.name for row in built if row.weight is None]
        assert own == [row.name for row in made_up.bindings if row.weight is None]


def graph_of(
    kind: GraphKind,
    phase: Phase,
    sizes: Sizes = SIZES,
    dtype: Dtype = "float32",
    head: HeadDtype = "float32",
) -> Lowered:
    config = load_golden(NAME).config
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, dtype=dtype, head=head)


def in_onnx_runtime(graph: GraphRecord) -> Compute:
    """Return what computes the lowered graph by its function bodies."""
    kind: Any = graph.kind
    outputs = [row.name for row in graph.bindings if row.direction == "out"]

    def compute(inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        (found,) = run(graph_of(kind, graph.phase), [inputs])
        return [found[name] for name in outputs]

    return compute


def of_lowered_graphs(folder: Path) -> Opened:
    return open_fake(
        folder,
        NAME,
        batch=SIZES.batch,
        chunk=SIZES.chunk,
        max_length=SIZES.max_length,
        compute=in_onnx_runtime,
    )


def test_fake_device_gives_the_logits_of_the_original_by_the_lowered_graphs(
    tmp_path: Path,
) -> None:
    golden = load_golden(NAME)
    arrays, session = golden.arrays, of_lowered_graphs(tmp_path).session
    tokens, fed = (arrays[name].astype(np.int64) for name in ("tokens", "f32/decode_tokens"))
    length = np.full(2, tokens.shape[1])
    found = [*session.forward_all(tokens, 0 * length).transpose(1, 0, 2)]
    for step, column in enumerate(fed.T):
        logits = session.forward(column[:, None].copy(), length + step, 0 * length)
        assert logits is not None
        found.append(logits)
    wanted = [*arrays["f32/prefill_logits"].transpose(1, 0, 2)]
    wanted += [*arrays["f32/decode_logits"].transpose(1, 0, 2)]
    assert np.abs(np.stack(found) - np.stack(wanted)).max() < 1e-4


def test_rows_of_the_lowered_graphs_keep_what_they_hold_while_others_run(tmp_path: Path) -> None:
    alone = open_fake(tmp_path, NAME, batch=1, chunk=48, max_length=48).session
    rows = Rows(run=of_lowered_graphs(tmp_path), alone=alone)
    random = np.random.default_rng(5)
    full, few = (random.integers(alone.config.vocab_size, size=n).tolist() for n in (48, 9))
    rows.forward({1: full}, {1: 0}, 47)
    rows.forward({0: few}, {0: 0}, 8)
    rows.forward({0: [3]}, {0: 9}, 0)  # row 1 has no place left
    rows.forward({1: [full[-1]]}, {1: 47}, 0)
    rows.copy(1, 0, 30)
    rows.forward({0: [5]}, {0: 30}, 0)
