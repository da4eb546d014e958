"""Ranks of a TensorRT engine as threads, each with a fake GPU, give together what one gives.

Their plans are the PyTorch model of a rank, whose sums run between the threads; it proves slices,
addresses and the order of calls, and nothing of TensorRT or NCCL.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import GrokConfig, HeadDtype
from export_grok.engines import trt_rtx
from export_grok.engines.trt import communicator as communicator_module
from export_grok.engines.trt import ranks as ranks_module
from export_grok.engines.trt.communicator import SUMMING
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.record import PHASES, Phase, Sizes, TrtRecord
from export_grok.engines.trt.session import TrtSession
from export_grok.engines.trt.weights import RankWeights
from export_grok.errors import BundleError, ConfigError
from export_grok.export import model as model_module
from export_grok.export.contract import GRAPH_KINDS, GraphKind
from export_grok.export.head import write_head
from export_grok.export.partition import cut_axis
from export_grok.runtime.decode import decode
from export_grok.runtime.request import Request
from tests.conftest import load_golden
from tests.engines.trt.fake_device import FakeDevice, FakeRuntime, torch_model
from tests.engines.trt.fake_ranks import FakeGroup, Hub, all_reduce, together
from tests.engines.trt.lowered import Lowered, content, lowered
from tests.engines.trt.records import bundle_with, record_for

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

TOLERANCE = 1e-4
GROUPS = [("tiny", 2), ("tiny8", 8)]


class Ranks:
    """Sessions of all ranks as one `engines.backend.RowSession`.

    Attributes:
        sessions: of each rank.
        devices: of each rank.
        hub: where they meet.
    """

    def __init__(self, name: str, folder: Path, ranks: int, **asked: Any) -> None:
        golden = load_golden(name)
        int8_head = asked.pop("int8_head", False)
        record, compute = asked.pop("record", None), asked.pop("compute", None)
        sizes = Sizes(tensor_parallel=ranks, **{"batch": 2, "chunk": 7, "max_length": 48} | asked)
        head: HeadDtype = "int8" if int8_head else "float32"
        self.record = record or record_for(golden.config, sizes, head=head)
        bundle = bundle_with(self.record, name, folder, int8_head=int8_head)
        self.config: GrokConfig = golden.config
        self.batch, self.max_length = sizes.batch, sizes.max_length
        self.hub = Hub(ranks)
        self.devices = [FakeDevice(name=f"GPU {rank}") for rank in range(ranks)]

        def open_rank(rank: int) -> TrtSession:
            group, device = FakeGroup(self.hub, rank), self.devices[rank]
            return TrtSession(
                bundle,
                self.record,
                batch=sizes.batch,
                max_length=sizes.max_length,
                device=device,
                runtime=FakeRuntime(
                    device=device,
                    record=self.record,
                    compute=compute or torch_model(golden.config, "float32", rank, ranks),
                    group=group,
                ),
                group=group,
                capture=False,
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicator_module, "require", lambda name, extra: self.hub.nccl)
            self.sessions = together(self.hub, open_rank)

    prefill_rows = 1

    def forward(
        self, tokens: Ints, start: Ints, last: Ints | None, rows: Ints | None = None
    ) -> Floats | None:
        parts = together(
            self.hub, lambda rank: self.sessions[rank].forward(tokens, start, last, rows)
        )
        found = [part for part in parts if part is not None]
        return np.concatenate(found, axis=-1) if found else None

    def forward_all(self, tokens: Ints, start: Ints) -> Floats:
        parts = together(self.hub, lambda rank: self.sessions[rank].forward_all(tokens, start))
        return np.concatenate(parts, axis=-1)

    def copy(self, source: int, target: int, length: int) -> None:
        together(self.hub, lambda rank: self.sessions[rank].copy(source, target, length))


RanksOf = Callable[..., Ranks]


@pytest.fixture
def ranks_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RanksOf:
    """Return the way to sessions of ranks that sum between threads."""
    monkeypatch.setattr(model_module, "all_reduce", all_reduce)
    return lambda name, ranks, **asked: Ranks(name, tmp_path / "bundle", ranks, **asked)


def at(rows: int, position: int) -> Ints:
    return np.full(rows, position, np.int64)


def ints(array: Any) -> Ints:
    return np.asarray(array, np.int64)


@pytest.mark.parametrize(("name", "count"), GROUPS)
def test_fake_ranks_give_the_logits_of_the_original(
    name: str, count: int, ranks_of: RanksOf
) -> None:
    arrays = load_golden(name).arrays
    tokens = ints(arrays["tokens"])
    ranks = ranks_of(name, count, max_length=64)
    entries = ranks.config.vocab_size // count
    prefill = ranks.forward_all(tokens, at(2, 0))
    assert np.abs(prefill - arrays["f32/prefill_logits"]).max() < TOLERANCE
    for step, column in enumerate(ints(arrays["f32/decode_tokens"]).T):
        start = at(2, tokens.shape[1] + step)
        logits = ranks.forward(column[:, None].copy(), start, at(2, 0))
        assert logits is not None
        assert logits.shape == (2, count * entries)
        assert np.abs(logits - arrays["f32/decode_logits"][:, step]).max() < TOLERANCE


def test_fake_ranks_give_rows_of_mixed_length_the_logits_they_have_alone(
    ranks_of: RanksOf,
) -> None:
    arrays = load_golden("tiny8").arrays
    long, short = ints(arrays["tokens"])[0], ints(arrays["short_tokens"])
    padded = np.stack([long, np.pad(short, (0, len(long) - len(short)))])
    ranks = ranks_of("tiny8", 4)
    last = ranks.forward(padded, at(2, 0), ints([len(long) - 1, len(short) - 1]))
    assert last is not None
    assert np.abs(last[0] - arrays["f32/prefill_logits"][0, -1]).max() < TOLERANCE
    assert np.abs(last[1] - arrays["f32/padded_logits"]).max() < TOLERANCE


def test_fake_ranks_decode_to_the_tokens_of_one(ranks_of: RanksOf) -> None:
    requests = [Request(prompt=tuple(range(3, 3 + length)), max_new_tokens=6) for length in (9, 1)]
    alone, shared = (
        [step.token for step in decode(ranks_of("tiny", count), requests, chunk=13)]
        for count in (1, 2)
    )
    assert alone == shared
    assert len(set(shared)) > 3


def test_fake_ranks_continue_a_row_that_was_copied_beside_one_that_waits(
    ranks_of: RanksOf,
) -> None:
    arrays = load_golden("tiny8").arrays
    tokens, wanted = ints(arrays["tokens"]), arrays["f32/prefill_logits"]
    ranks, other = ranks_of("tiny8", 4, batch=3), tokens[::-1, :-1]
    ranks.forward(other.copy(), at(2, 0), None, ints([2, 0]))
    ranks.copy(0, 1, 12)  # of the first golden row
    for place in range(12, tokens.shape[1]):
        given = tokens[:1, place : place + 1].copy()
        logits = ranks.forward(given, at(1, place), at(1, 0), ints([1]))
        assert logits is not None
        assert np.abs(logits[0] - wanted[0, place]).max() < TOLERANCE
    both = ranks.forward(tokens[:, -1:].copy(), at(2, other.shape[1]), at(2, 0), ints([0, 2]))
    assert both is not None
    assert np.abs(both - wanted[:, -1]).max() < TOLERANCE


def test_fake_ranks_share_an_int8_head(ranks_of: RanksOf, tmp_path: Path) -> None:
    golden = load_golden("tiny")
    (tmp_path / "bundle").mkdir()
    write_head(golden.config, golden.index, tmp_path / "bundle")
    tokens = ints(golden.arrays["tokens"])
    alone, shared = (
        ranks_of("tiny", count, int8_head=True).forward_all(tokens, at(2, 0)) for count in (1, 2)
    )
    assert np.abs(alone - shared).max() < TOLERANCE


def test_fake_ranks_get_the_communicator_before_anything_runs_in_the_same_order(
    ranks_of: RanksOf,
) -> None:
    ranks = ranks_of("tiny8", 2)
    joined = []
    for phase in PHASES:
        for kind in ("embedding", "layer"):
            joined += [f"communicator of {kind} ({phase})", "set_communicator"]
    assert ranks.hub.calls == [["NCCL's unique id", "init", *joined]] * 2
    for device in ranks.devices:
        assert "enqueue" not in device.log
        # A communicator that cannot be had is told before the weights are read.
        assert device.log.count("set_communicator") == 2 * len(PHASES)
    ranks.forward_all(ints([[3, 4], [5, 6]]), at(2, 0))  # by another head: a chain of its own
    again = joined[len(joined) // 2 :]
    assert ranks.hub.calls == [["NCCL's unique id", "init", *joined, *again]] * 2
    for device in ranks.devices:
        assert "set_communicator" not in device.log[device.log.index("enqueue") :]
        assert not {"capture", "launch"} & {*device.log}


def test_fake_rank_is_told_which_tokens_are_its_own(ranks_of: RanksOf) -> None:
    ranks = ranks_of("tiny8", 8)
    entries = ranks.config.vocab_size // 8
    uploads = [device.log.count("upload") for device in ranks.devices]
    ranks.forward(ints([[3], [4]]), at(2, 0), None)
    ranks.forward(ints([[3, 4], [4, 5]]), at(2, 1), None)
    for rank, device in enumerate(ranks.devices):
        runs = [run for run in device.runs if run.kind == "embedding"]
        assert {run.phase for run in runs} == set(PHASES)
        for run in runs:
            assert device.at(run.addresses["first"], 8).view(np.int64) == [rank * entries]
        # Once for all: tokens and start are all that a run uploads.
        assert device.log.count("upload") - uploads[rank] == 2 * (1 + 2)


@pytest.mark.parametrize(("name", "count"), GROUPS)
def test_fake_ranks_read_their_slices_and_together_each_byte_of_them_once(
    name: str, count: int, ranks_of: RanksOf
) -> None:
    ranks = ranks_of(name, count)
    rank = ranks.config.for_rank(count)
    cut = whole = 0
    for weight in load_golden(name).index:
        short = weight.name.split(".", 2)[2] if weight.name.startswith("layers.") else weight.name
        if cut_axis(short, weight.shape, rank) is None:
            whole += weight.nbytes
        else:
            cut += weight.nbytes
    for session in ranks.sessions:
        assert session.weights.bytes_read == cut // count + whole
        assert session.weights.nbytes == cut // count + whole
    assert whole < 0.1 * cut
    tables = [
        device.at(run.addresses["weight"], 16).tobytes()
        for device, run in zip(ranks.devices, embedding_runs(ranks), strict=True)
    ]
    assert len(set(tables)) == count


def embedding_runs(ranks: Ranks) -> list[Any]:
    ranks.forward(ints([[3], [4]]), at(2, 0), None)
    return [
        next(run for run in device.runs if run.kind == "embedding") for device in ranks.devices
    ]


def summing_graph(kind: GraphKind, phase: Phase, count: int) -> Lowered:
    sizes = Sizes(tensor_parallel=count, batch=2, chunk=7, max_length=40)
    config = load_golden("tiny8").config
    return Lowered(config=config, kind=kind, phase=phase, sizes=sizes, dtype="bfloat16")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_contexts_that_are_given_the_communicator_are_those_of_graphs_that_sum(
    kind: GraphKind, phase: Phase
) -> None:
    model = lowered(summing_graph(kind, phase, 2))
    sums = [node for node in model.graph if node.op_type == "DistCollective"]
    assert bool(sums) == (kind in SUMMING)


# ---- open_rank


def record_of(ranks: int) -> TrtRecord:
    sizes = Sizes(tensor_parallel=ranks, batch=2, chunk=7, max_length=48)
    return record_for(load_golden("tiny8").config, sizes)


def test_a_rank_takes_the_gpu_of_its_number_and_only_then_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ranks_module, "CudaDevice", lambda rank, ranks: seen.append((rank, ranks)))
    monkeypatch.setattr(ranks_module, "PlanRuntime", lambda flavour: seen.append(flavour.backend))
    monkeypatch.setattr(
        ranks_module,
        "TrtSession",
        lambda bundle, record, **asked: seen.append((asked["group"].rank, asked["capture"])),
    )
    bundle = bundle_with(record_of(8), "tiny8", tmp_path)
    ranks_module.open_rank(bundle, FakeGroup(Hub(8), 5), batch=2, max_length=48, threads=1)
    assert seen == [(5, 8), "trt", (5, False)]


def test_the_other_package_opens_ranks_likewise() -> None:
    from export_grok.engines.trt_rtx import ranks

    assert ranks.open_rank is ranks_module.open_rank
    assert trt_rtx.__name__ in ranks.__name__


def test_a_manifest_that_says_nothing_of_plans_is_refused(tmp_path: Path) -> None:
    bundle = bundle_with(record_of(2), "tiny8", tmp_path)
    bundle.manifest.engine.clear()
    with pytest.raises(BundleError, match="build the engine again"):
        ranks_module.open_rank(bundle, FakeGroup(Hub(2), 0), batch=2, max_length=48)


@pytest.mark.parametrize(("planned", "ranks"), [(8, 4), (8, 1), (1, 2)])
def test_another_number_of_ranks_than_the_plans_is_told_before_anything_is_loaded(
    planned: int, ranks: int, tmp_path: Path
) -> None:
    device, record = FakeDevice(), record_of(planned)
    group: Any = SimpleNamespace(rank=0, ranks=ranks)  # asked for nothing
    with pytest.raises(ConfigError) as error:
        TrtSession(
            bundle_with(record, "tiny8", tmp_path),
            record,
            batch=2,
            max_length=48,
            device=device,
            runtime=FakeRuntime(
                device=device,
                record=record,
                compute=torch_model(load_golden("tiny8").config, "float32"),
            ),
            group=group if ranks > 1 else None,
        )
    said = str(error.value)
    assert f"for --tp {planned}: needs {planned} ranks, sees {ranks}" in said
    assert f"--tp {ranks} " in said
    assert (f"export-grok generate {tmp_path} starts them all" in said) == (ranks == 1)
    assert device.log == []


def test_a_rank_alone_joins_nobody(tmp_path: Path) -> None:
    """A group of one has no sums, and needs no NCCL."""
    hub = Hub(1)
    record, device = record_of(1), FakeDevice()
    session = TrtSession(
        bundle_with(record, "tiny8", tmp_path),
        record,
        batch=2,
        max_length=48,
        device=device,
        runtime=FakeRuntime(
            device=device,
            record=record,
            compute=torch_model(load_golden("tiny8").config, "float32"),
        ),
        group=FakeGroup(hub, 0),
    )
    logits = session.forward(ints([[3], [4]]), at(2, 0), at(2, 0))
    assert logits is not None
    assert logits.shape == (2, session.config.vocab_size)
    assert hub.calls == [[]]


# ---- plans for ranks


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_plans_that_sum_over_ranks_build(count: int, phase: Phase, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds plans by tensorrt_rtx")
    kinds: tuple[GraphKind, ...] = ("embedding", "layer")
    for kind in kinds:
        model = lowered(summing_graph(kind, phase, count))
        sums = [node for node in model.graph if node.op_type == "DistCollective"]
        assert {node.attributes["nb_rank"].value for node in sums} == {count}
        (tmp_path / "graph.onnx").write_bytes(content(model))
        plan = tmp_path / "graph.plan"
        plan_from_graph(tmp_path / "graph.onnx", plan, flavour=flavour_of("trt-rtx"), sm=89)
        assert plan.stat().st_size > 0


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_plan_is_the_same_file_for_all_ranks(count: int) -> None:
    """Which rank it is, an input says, and the weights that are bound."""
    record, index = record_of(count), load_golden("tiny8").index
    assert len(record.plans) == len(GRAPH_KINDS) * len(PHASES)  # whatever the number of ranks
    weights = [RankWeights(record, index, index, layers=1, rank=rank) for rank in range(count)]
    assert len({rank.nbytes for rank in weights}) == 1
    (first,) = {row for row in record.graphs[0].bindings if row.name == "first"}
    assert (first.direction, first.weight) == ("in", None)
