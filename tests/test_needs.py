"""Work is refused exactly when something is short, and then all that is short is named."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export_grok import needs
from export_grok.errors import NeedsError
from export_grok.needs import Disk, Needs, room_of

GB = 10**9
HERE = Path(__file__).parent

nbytes = st.integers(0, 400 * GB)
FIGURE = re.compile(r"([\d.]+) (MB|GB)")


def figures(text: str) -> list[float]:
    """Return all lengths in a text, in bytes."""
    return [float(number) * {"MB": 10**6, "GB": GB}[unit] for number, unit in FIGURE.findall(text)]


@contextmanager
def there(disk: int = 0, memory: int = 0, addresses: int | None = None) -> Iterator[None]:
    """Have so much free while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
        patch.setattr(needs, "available_memory", lambda: memory)
        patch.setattr(needs, "address_space", lambda: addresses)
        yield


@st.composite
def some_needs(draw: st.DrawFn) -> Needs:
    disk = draw(st.lists(st.builds(Disk, folder=st.just(HERE), nbytes=nbytes), max_size=3))
    return Needs(
        disk=tuple(disk),
        memory=draw(nbytes),
        mapped=draw(nbytes),
        gpu_memory=draw(nbytes),
        gpus=draw(st.integers(1, 8)),
        gpu_memory_free=draw(st.none() | nbytes),
        seconds=draw(st.integers(0, 10**6)),
    )


@given(some_needs(), nbytes, nbytes, st.none() | nbytes)
def test_work_is_refused_exactly_when_something_is_short_and_all_of_it_is_named(
    work: Needs, disk: int, memory: int, addresses: int | None
) -> None:
    free = work.gpu_memory_free
    short = {
        "of free disk": sum(part.nbytes for part in work.disk) > disk,
        "of memory are available": work.memory > memory,
        "of address space": addresses is not None and work.memory + work.mapped > addresses,
        "of free memory": free is not None and work.gpu_memory > free,
    }
    with there(disk, memory, addresses):
        if not any(short.values()):
            work.check()
            return
        with pytest.raises(NeedsError) as caught:
            work.check()
    summary, *faults = str(caught.value).splitlines()
    assert "--force" in summary
    assert [name for name, is_short in short.items() if is_short] == [
        name for name in short if any(name in fault for fault in faults)
    ]
    assert len(faults) == sum(short.values())


@given(st.integers(0, 400 * GB), st.integers(1, 400 * GB))
def test_both_figures_are_told_and_never_read_as_if_there_were_enough(
    free: int, missing: int
) -> None:
    with there(memory=free), pytest.raises(NeedsError) as caught:
        Needs(memory=free + missing).check()
    available, needed = figures(str(caught.value))
    assert available <= free < free + missing <= needed
    assert needed - (free + missing) < GB / 10


@given(some_needs(), some_needs())
def test_of_two_pieces_of_work_the_disk_adds_up_and_memory_is_used_again(
    one: Needs, other: Needs
) -> None:
    both = one + other
    assert sum(disk.nbytes for disk in both.disk) == sum(
        disk.nbytes for disk in (*one.disk, *other.disk)
    )
    assert both.seconds == one.seconds + other.seconds
    for name in ("memory", "mapped", "gpu_memory", "gpus"):
        assert getattr(both, name) == max(getattr(one, name), getattr(other, name))
    assert (one + Needs()).memory == one.memory
    assert one + other + one == one + (other + one)


@given(some_needs(), some_needs(), nbytes, nbytes)
def test_both_can_begin_only_where_each_can(
    one: Needs, other: Needs, disk: int, memory: int
) -> None:
    def begins(work: Needs) -> bool:
        try:
            work.check()
        except NeedsError:
            return False
        return True

    with there(disk, memory):
        if begins(one + other):
            assert begins(one)
            assert begins(other)


def test_gpus_that_are_not_known_are_no_reason_to_refuse() -> None:
    with there():
        Needs(gpu_memory=40 * GB, gpus=8).check()


def test_folders_on_one_disk_share_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    disks = tuple(Disk(folder=tmp_path / name, nbytes=6 * GB) for name in ("a", "b/c"))
    with there(disk=10 * GB), pytest.raises(NeedsError, match=r"10\.0 GB .* 12\.0 GB") as caught:
        Needs(disk=disks).check()
    assert f"{tmp_path / 'a'} has" in str(caught.value)


def test_what_lies_there_under_the_same_name_is_kept_or_goes(tmp_path: Path) -> None:
    for name, length in (("whole", 7), ("longer", 9), ("other", 100)):
        (tmp_path / name).write_bytes(bytes(length))
    found = Disk.of_files(tmp_path, {"whole": 7, "longer": 7, "new/file": 5})
    assert found == Disk(folder=tmp_path, nbytes=5)


def test_a_folder_that_is_not_there_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    assert Disk(folder=tmp_path / "a" / "b", nbytes=1).free > 0


def test_holes_of_a_file_take_no_room(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(GB)
    assert room_of(path) < GB / 10
    path.write_bytes(bytes(range(256)) * 256)
    assert room_of(path) >= 65536


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Needs(), "nothing"),
        (Needs(memory=1), "1 MB of memory (2.0 GB available), less than a second"),
        (Needs(memory=10**6), "1 MB of memory (2.0 GB available), less than a second"),
        (Needs(memory=GB - 1, seconds=1), "1000 MB of memory (2.0 GB available), about 1 s"),
        (Needs(memory=GB, seconds=99), "1.0 GB of memory (2.0 GB available), about 99 s"),
        (Needs(memory=GB + 1, seconds=120), "1.1 GB of memory (2.0 GB available), about 2 min"),
        (Needs(seconds=7200), "about 2.0 hours"),
        (Needs(mapped=GB), "1.0 GB of address space (3.0 GB allowed), less than a second"),
        (
            Needs(gpu_memory=2 * GB, gpus=1, gpu_memory_free=3 * GB),
            "2.0 GB of a GPU (3.0 GB free), less than a second",
        ),
        (
            Needs(gpu_memory=2 * GB, gpus=8),
            "2.0 GB of each of 8 GPUs (not known what is free), less than a second",
        ),
        (
            Needs(disk=(Disk(folder=HERE, nbytes=5 * 10**6),)),
            f"5 MB of disk in {HERE} (1.0 GB free), less than a second",
        ),
    ],
)
def test_needs_are_said_in_a_line_with_what_is_there(work: Needs, text: str) -> None:
    addresses = 3 * GB if work.mapped else None
    with there(disk=GB + 10**7, memory=2 * GB, addresses=addresses):
        assert str(work).startswith(text)


@pytest.mark.parametrize(
    ("work", "much"),
    [
        (Needs(), False),
        (Needs(memory=GB - 1, seconds=29), False),
        (Needs(memory=GB), True),
        (Needs(mapped=100 * GB), False),
        (Needs(seconds=30), True),
        (Needs(disk=(Disk(folder=HERE, nbytes=GB // 2),), gpu_memory=GB // 2), True),
    ],
)
def test_much_is_a_gigabyte_or_half_a_minute(work: Needs, much: bool) -> None:
    assert work.much == much
