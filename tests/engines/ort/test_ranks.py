"""Ranks together, each with its part of the weights, compute what one process does alone.

Here they are threads of this process; the sum is taken when the last of them has come to it.
"""

import contextlib
import dataclasses
import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, open_bundle
from export_grok.config import EngineOptions, ExportOptions, GrokConfig, HeadDtype
from export_grok.engines.backend import Session, open_session
from export_grok.engines.ort.build import build_engine
from export_grok.engines.ort.ranks import RankSession, open_rank
from export_grok.engines.ort.session import open_engine
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import BundleError, ConfigError, RequestError
from export_grok.files import atomic_file
from export_grok.runtime.decode import decode
from export_grok.runtime.request import Request
from tests.bundles import BundleOf, hashes, traced
from tests.conftest import DATA, Golden, load_golden
from tests.engines.ort.logits import TOLERANCE, Floats, Ints, at, distance, last_logits, tokens_of

T = TypeVar("T")

GROUPS = [("tiny", 2), ("tiny8", 2), ("tiny8", 4), ("tiny8", 8), ("deep13", 4)]
# Sums of other lengths, in another order. Logits of the fixtures reach 2.
CLOSE = 1e-5
LENGTH = 48
PATIENCE = 60


class Hub:
    """Where ranks meet: a slot for each, and their sum."""

    def __init__(self, ranks: int, elements: int) -> None:
        self.slots = np.full((ranks, elements), np.nan, np.float32)
        self.total = np.full(elements, np.nan, np.float32)
        self.barrier = threading.Barrier(ranks, self._add, timeout=PATIENCE)
        self.places: list[list[str]] = [[] for _ in range(ranks)]

    def _add(self) -> None:
        self.total[:] = functools.reduce(np.add, self.slots)
        self.slots[:] = np.nan  # whoever sums what was not written again is seen


class Member:
    """One rank of a hub: a `Group`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.ranks, self._hub = rank, len(hub.slots), hub

    def partial(self, shape: tuple[int, ...]) -> Floats:
        return self._hub.slots[self.rank, : np.prod(shape)].reshape(shape)

    def total(self, shape: tuple[int, ...]) -> Floats:
        return self._hub.total[: np.prod(shape)].reshape(shape)

    def all_reduce(self, shape: tuple[int, ...], where: str) -> None:
        self._hub.places[self.rank].append(where)
        self._hub.barrier.wait()

    def broadcast(self, data: bytes | None, where: str) -> bytes:
        raise NotImplementedError(where)


class Together:
    """A session of all ranks, each in a thread of its own."""

    def __init__(self, bundle: Bundle, ranks: int, batch: int, max_length: int) -> None:
        self.config: GrokConfig = bundle.config
        self.batch, self.max_length, self.prefill_rows = batch, max_length, batch
        self.hub = Hub(ranks, batch * max_length * bundle.config.emb_size)
        self._pool = ThreadPoolExecutor(ranks)
        self.sessions: list[RankSession] = [
            open_rank(
                bundle, Member(self.hub, rank), batch=batch, max_length=max_length, threads=1
            )
            for rank in range(ranks)
        ]
        for session in self.sessions:
            for array in (*session.keys, *session.values):
                array[:] = np.nan

    def forward(
        self, tokens: Ints, start: Ints, last: Ints | None, rows: Ints | None = None
    ) -> Floats | None:
        parts = self.each(lambda session: session.forward(tokens, start, last, rows))
        return None if last is None else np.concatenate([p for p in parts if p is not None], -1)

    def forward_all(self, tokens: Ints, start: Ints) -> Floats:
        return np.concatenate(
            self.each(lambda session: session.forward_all(tokens, start)), axis=-1
        )

    def copy(self, source: int, target: int, length: int) -> None:
        self.each(lambda session: session.copy(source, target, length))

    def each(self, work: Callable[[RankSession], T]) -> list[T]:
        def guarded(session: RankSession) -> T:
            try:
                return work(session)
            except BaseException:
                self.hub.barrier.abort()
                raise

        return list(self._pool.map(guarded, self.sessions))


RanksOf = Callable[[str, int], Bundle]
TogetherOf = Callable[[str, int, int], Together]


@pytest.fixture(scope="session")
def ranks_of(bundle_of: BundleOf, tmp_path_factory: pytest.TempPathFactory) -> RanksOf:
    """Return the way to a shared bundle of ranks. Leave it as it is."""

    @functools.cache
    def bundle(name: str, ranks: int) -> Bundle:
        folder = tmp_path_factory.mktemp(f"{name}_{ranks}") / "bundle"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("export_grok.export.trace.template_from_config", traced)
            return build_engine(
                own_copy(bundle_of(name), folder),
                EngineOptions(tensor_parallel=ranks, allow_functions=name == "deep13"),
            )

    return bundle


@pytest.fixture(scope="session")
def together_of(ranks_of: RanksOf) -> TogetherOf:
    """Return the way to shared ranks with native kernels; what their caches hold is no matter."""

    @functools.cache
    def opened(name: str, ranks: int, batch: int) -> Together:
        return Together(ranks_of(name, ranks), ranks, batch, LENGTH)

    return opened


def own_copy(bundle: Bundle, folder: Path) -> Bundle:
    shutil.copytree(bundle.folder, folder)
    return open_bundle(folder, weights_root=bundle.weights_root)


def largest(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return the largest difference; infinite where there is no number."""
    return float(np.nan_to_num(np.abs(found - wanted), nan=np.inf).max())


def mixed(golden: Golden) -> tuple[Ints, Ints]:
    """Return three rows of tokens [3, S], padded, and the last true one of each."""
    tokens = np.resize(tokens_of(golden), (3, 12))
    return tokens, np.array([11, 0, 6])


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_ranks_compute_what_one_does(
    name: str, ranks: int, bundle_of: BundleOf, together_of: TogetherOf
) -> None:
    alone: Session = open_session(bundle_of(name), batch=3, max_length=LENGTH, threads=1)
    group = together_of(name, ranks, 3)
    tokens, last = mixed(load_golden(name))
    sessions: list[Any] = [alone, group]
    whole = [session.forward_all(tokens, at(3, 0)) for session in sessions]
    assert largest(whole[1], whole[0]) < CLOSE
    some = [last_logits(session, tokens, at(3, 0), last) for session in sessions]
    assert largest(some[1], some[0]) < CLOSE
    fed = tokens[:, :1]
    for step in range(4):
        start = last + 1 + step
        steps = [last_logits(session, fed, start, at(3, 0)) for session in sessions]
        assert largest(steps[1], steps[0]) < CLOSE
        fed = steps[0].argmax(-1)[:, None]
    assert group.forward(fed, start, None) is None


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_every_rank_holds_the_keys_and_values_of_its_heads(
    name: str, ranks: int, bundle_of: BundleOf, together_of: TogetherOf
) -> None:
    alone = open_engine(bundle_of(name), batch=3, max_length=LENGTH, threads=1)
    group = together_of(name, ranks, 3)
    tokens, _ = mixed(load_golden(name))
    for session in (alone, group):
        session.forward(tokens, at(3, 0), None)
    for layer in range(alone.config.num_layers):
        for whole, parts in (
            (alone.keys[layer], [session.keys[layer] for session in group.sessions]),
            (alone.values[layer], [session.values[layer] for session in group.sessions]),
        ):
            found = np.concatenate(parts, axis=1)
            written = whole[:, :, :12]
            assert largest(found[:, :, :12], written) < CLOSE * np.abs(written).max()


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_ranks_reproduce_the_original(name: str, ranks: int, together_of: TogetherOf) -> None:
    group: Any = together_of(name, ranks, 2)
    assert distance(group, load_golden(name)) < TOLERANCE


@pytest.mark.usefixtures("builtin")
@pytest.mark.parametrize(("name", "ranks"), [("tiny", 2), ("tiny8", 8)])
def test_ranks_reproduce_the_original_by_built_in_kernels(
    name: str, ranks: int, ranks_of: RanksOf
) -> None:
    group: Any = Together(ranks_of(name, ranks), ranks, 2, LENGTH)
    assert distance(group, load_golden(name)) < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_greedy_answers_are_those_of_one(
    ranks: int, bundle_of: BundleOf, together_of: TogetherOf
) -> None:
    tokens, last = mixed(load_golden("tiny8"))
    requests = [
        Request(prompt=tuple(row[: end + 1].tolist()), max_new_tokens=32)
        for row, end in zip(tokens, last, strict=True)
    ]
    alone = open_session(bundle_of("tiny8"), batch=3, max_length=LENGTH, threads=1)
    wanted = list(decode(alone, requests))
    assert len(wanted) == 3 * 32
    assert list(decode(together_of("tiny8", ranks, 3), requests)) == wanted


@pytest.mark.parametrize(("name", "ranks"), GROUPS)
def test_ranks_compute_the_rows_that_are_named_and_copy_as_one_does(
    name: str, ranks: int, bundle_of: BundleOf, together_of: TogetherOf
) -> None:
    alone = open_session(bundle_of(name), batch=3, max_length=LENGTH, threads=1)
    tokens, _ = mixed(load_golden(name))
    found: list[Any] = []
    for session in (alone, together_of(name, ranks, 3)):
        session.forward(tokens, at(3, 0), None)
        rows, start = np.array([2, 0]), np.array([7, 3])  # they lie apart
        found.append(session.forward(tokens[1:, :5], start, at(2, 4), rows))
        session.copy(2, 1, 9)
        found.append(session.forward(tokens[:1, :2], np.array([9]), at(1, 1), np.array([1])))
    for one, other in ((0, 2), (1, 3)):
        assert largest(found[one], found[other]) < 2 * CLOSE  # what it sees is as far apart


def test_every_sum_says_what_it_is_of(ranks_of: RanksOf) -> None:
    group = Together(ranks_of("tiny", 2), 2, 1, 4)
    group.forward_all(np.ones((1, 1), np.int64), at(1, 0))
    wanted = ["embedding"] + [
        f"layer {layer}, {part}" for layer in (0, 1) for part in ("attention", "experts")
    ]
    assert group.hub.places == [wanted, wanted]


# ---- the bundle


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("head", ["float32", "int8"])
def test_a_bundle_of_ranks_is_built_from_a_checkpoint_once(
    tmp_path: Path, head: HeadDtype
) -> None:
    out = tmp_path / "out"
    engine, options = EngineOptions(tensor_parallel=2), ExportOptions(head=head)
    build = functools.partial(engine_from_source, backend="ort", options=options)
    bundle = build(DATA / "tiny", out, engine=engine)
    assert bundle.manifest.engine == {"tensor_parallel": 2}
    files = {name for name in hashes(out) if name != "manifest.json"}
    assert files == bundle.manifest.files.keys()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert build(DATA / "tiny", out, engine=engine) == bundle
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    group: Any = Together(open_bundle(out, kind="engine"), 2, 2, LENGTH)
    alone: Any = open_session(
        build(DATA / "tiny", tmp_path / "one", engine=EngineOptions()), batch=2, max_length=LENGTH
    )
    tokens = tokens_of(load_golden("tiny"))
    logits = [session.forward_all(tokens, at(2, 0)) for session in (group, alone)]
    assert largest(*logits) < CLOSE


@pytest.mark.usefixtures("traced_once")
def test_an_engine_of_other_ranks_replaces_the_one_before(
    bundle_of: BundleOf, ranks_of: RanksOf, tmp_path: Path
) -> None:
    bundle = own_copy(bundle_of("tiny8"), tmp_path / "out")
    for ranks in (4, 2):
        bundle = build_engine(bundle, EngineOptions(tensor_parallel=ranks))
        assert hashes(bundle.folder) == hashes(ranks_of("tiny8", ranks).folder)
    bundle = build_engine(bundle)
    assert hashes(bundle.folder) == hashes(bundle_of("tiny8").folder)


def broken_off(patch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Have Ctrl-C pressed after so many files of weights; return their names, as they come."""
    written: list[str] = []

    @contextlib.contextmanager
    def counted(path: Path) -> Iterator[IO[bytes]]:
        if len(written) == after:
            raise KeyboardInterrupt
        with atomic_file(path) as file:
            yield file
        written.append(f"{path.parent.name}/{path.name}")

    patch.setattr("export_grok.export.rank_weights.atomic_file", counted)
    return written


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("before", [1, 4])
def test_a_build_that_is_broken_off_leaves_no_engine_and_goes_on(
    before: int, bundle_of: BundleOf, ranks_of: RanksOf, tmp_path: Path
) -> None:
    old = bundle_of("tiny8") if before == 1 else ranks_of("tiny8", before)
    bundle = own_copy(old, tmp_path / "out")
    options = EngineOptions(tensor_parallel=2)
    with pytest.MonkeyPatch.context() as patch:
        first = broken_off(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            build_engine(bundle, options)
    with pytest.raises(BundleError, match="holds graphs and no engine"):
        open_bundle(bundle.folder, kind="engine", weights_root=bundle.weights_root)
    with pytest.MonkeyPatch.context() as patch:
        then = broken_off(patch, 8)
        left = open_bundle(bundle.folder, weights_root=bundle.weights_root)
        build_engine(left, options)
    assert len({*first, *then}) == len(first) + len(then) == 8
    assert hashes(bundle.folder) == hashes(ranks_of("tiny8", 2).folder)


@pytest.mark.usefixtures("traced_once")
def test_another_runtime_has_its_graphs_built_again_and_keeps_the_weights(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    bundle = own_copy(ranks_of("tiny8", 2), tmp_path / "out")
    old = dataclasses.replace(
        bundle.manifest, versions=bundle.manifest.versions | {"onnxruntime": "0.1"}
    )
    with pytest.MonkeyPatch.context() as patch:
        broken_off(patch, 0)
        build_engine(dataclasses.replace(bundle, manifest=old), EngineOptions(tensor_parallel=2))
    assert hashes(bundle.folder) == hashes(ranks_of("tiny8", 2).folder)


@pytest.mark.usefixtures("traced_once")
def test_what_a_broken_off_build_left_of_other_weights_is_not_kept(
    bundle_of: BundleOf, ranks_of: RanksOf, tmp_path: Path
) -> None:
    bundle = own_copy(bundle_of("tiny8"), tmp_path / "out")
    source = dict.fromkeys(bundle.manifest.source, "sha256:of another")
    options = EngineOptions(tensor_parallel=2)
    with pytest.MonkeyPatch.context() as patch:
        broken_off(patch, 5)
        other = dataclasses.replace(bundle.manifest, source=source)
        with pytest.raises(KeyboardInterrupt):
            build_engine(dataclasses.replace(bundle, manifest=other), options)
    for path in bundle.folder.glob("rank_*/*.weights"):
        path.write_bytes(bytes(path.stat().st_size))
    assert hashes(build_engine(bundle, options).folder) == hashes(ranks_of("tiny8", 2).folder)


# ---- refused


def remove(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [remove, cut_short, change])
@pytest.mark.parametrize(
    "file", ["rank_1/layer_01.weights", "rank_0/embedding.weights", "ranks/layer_00.1.onnx"]
)
def test_a_damaged_file_of_a_rank_is_named(
    file: str, damage: Callable[[Path], None], ranks_of: RanksOf, tmp_path: Path
) -> None:
    bundle = own_copy(ranks_of("tiny", 2), tmp_path / "out")
    damage(bundle.folder / file)
    with pytest.raises(BundleError, match=file):
        open_bundle(bundle.folder, weights_root=bundle.weights_root)


@pytest.mark.parametrize("damage", [remove, cut_short])
def test_weights_that_go_while_a_bundle_is_opened_are_told_by_the_session(
    damage: Callable[[Path], None], ranks_of: RanksOf, tmp_path: Path
) -> None:
    bundle = own_copy(ranks_of("tiny", 2), tmp_path / "out")
    damage(bundle.folder / "rank_1" / "layer_01.weights")
    with pytest.raises(BundleError, match=r"layer_01.*does not load"):
        Together(bundle, 2, 1, 4)


def test_another_number_of_ranks_is_refused(ranks_of: RanksOf, bundle_of: BundleOf) -> None:
    eight = ranks_of("tiny8", 8)
    with pytest.raises(ConfigError, match=r"needs 8 ranks, sees 4.*--tp 4"):
        open_rank(eight, Member(Hub(4, 1), 0), batch=1, max_length=4)
    with pytest.raises(ConfigError, match=r"needs 1 ranks, sees 2"):
        open_rank(bundle_of("tiny8"), Member(Hub(2, 1), 0), batch=1, max_length=4)
    with pytest.raises(ConfigError, match="an engine of 8 ranks"):
        open_session(eight, batch=1, max_length=4)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_ranks_that_cannot_share_the_model_are_refused_before_anything_is_written(
    ranks: int, tmp_path: Path
) -> None:
    engine = EngineOptions(tensor_parallel=ranks)
    with pytest.raises(ConfigError, match=f"shared evenly by {ranks} ranks; use 1, 2$"):
        engine_from_source(DATA / "tiny", tmp_path / "out", backend="ort", engine=engine)
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_refused_by_a_rank_alone(together_of: TogetherOf) -> None:
    """Before the first sum: so no other rank waits for one that refused."""
    rank = together_of("tiny", 2, 3).sessions[1]
    tokens = np.ones((3, 2), np.int64)
    for wrong, start in ((tokens * 512, 0), (tokens[:2], 0), (tokens, LENGTH - 1)):
        with pytest.raises(RequestError):
            rank.forward_all(wrong, at(3, start))
    with pytest.raises(RequestError):
        rank.forward(tokens, at(3, 0), at(3, 2))
