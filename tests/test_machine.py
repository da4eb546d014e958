"""What the system says of the machine is read from its files, of either kind of control group."""

from pathlib import Path

import pytest

from export_grok import machine
from export_grok.machine import this_machine

GB = 1000**3
# Without a limit, version 1 has the largest multiple of a page.
UNLIMITED = str(2**63 - 4096)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where a system's files are looked for; 64 cores and 256 GB are there."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "_cores", lambda: 64)
    monkeypatch.setattr(
        "os.sysconf", {"SC_PHYS_PAGES": 256 * GB // 4000, "SC_PAGE_SIZE": 4000}.__getitem__
    )
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_a_system_without_these_files_has_no_limits(root: Path) -> None:
    found = this_machine()
    assert (found.cores, found.core_limit) == (64, None)
    assert (found.memory, found.memory_limit) == (256 * GB, None)
    assert found.cpu


def test_the_processor_is_called_by_its_model(root: Path) -> None:
    write(root, {"proc/cpuinfo": "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some CPU: 9 GHz"})
    assert this_machine().cpu == "Some CPU: 9 GHz"


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, None, None),
        ({"a/b/memory.max": "max", "a/b/cpu.max": "max 100000"}, None, None),
        ({"a/b/memory.max": str(8 * GB), "a/b/cpu.max": "150000 100000"}, 1.5, 8 * GB),
        ({"memory.max": str(8 * GB), "cpu.max": "200000 100000"}, 2, 8 * GB),
        ({"a/memory.max": str(8 * GB), "a/b/memory.max": str(9 * GB)}, None, 8 * GB),
        ({"a/b/memory.max": str(300 * GB), "a/b/cpu.max": "9900000 100000"}, None, None),
        ({"memory/a/b/memory.limit_in_bytes": str(GB)}, None, None),
    ],
    ids=["no files", "no limit", "own", "of the root", "lowest", "above", "version 1"],
)
def test_limits_of_version_2_are_the_lowest_on_the_way_up(
    root: Path, files: dict[str, str], cores: float | None, memory: int | None
) -> None:
    write(root, {"proc/self/cgroup": "0::/a/b"})
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    found = this_machine()
    assert (found.core_limit, found.memory_limit) == (cores, memory)


@pytest.mark.parametrize(
    ("place", "memory", "quota", "expected"),
    [
        ("x/", str(2 * GB), "50000", (0.5, 2 * GB)),
        ("", str(2 * GB), "50000", (0.5, 2 * GB)),  # a container sees its own as the root
        ("x/", UNLIMITED, "-1", (None, None)),
    ],
)
def test_limits_of_version_1_lie_in_a_tree_for_each_controller(
    root: Path, place: str, memory: str, quota: str, expected: tuple[float | None, int | None]
) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/x\n2:cpuacct,cpu:/x\n0::/",
            f"sys/fs/cgroup/memory/{place}memory.limit_in_bytes": memory,
            f"sys/fs/cgroup/cpu/{place}cpu.cfs_quota_us": quota,
            f"sys/fs/cgroup/cpu/{place}cpu.cfs_period_us": "100000",
        },
    )
    found = this_machine()
    assert (found.core_limit, found.memory_limit) == expected
