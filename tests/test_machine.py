"""What the system says of the machine is read from its files, of either kind of control group."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from export_grok import machine
from export_grok.machine import address_space, available_memory, this_machine

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


def test_without_such_files_all_memory_is_available_and_any_address(root: Path) -> None:
    assert available_memory() == 256 * GB
    assert address_space() is None


def test_what_the_system_could_take_back_is_available(root: Path) -> None:
    write(root, {"proc/meminfo": "MemTotal: 250000 kB\nMemFree: 10 kB\nMemAvailable:  2000 kB"})
    assert available_memory() == 2000 * 1024


VERSION_2 = {"proc/self/cgroup": "0::/a/b"}
VERSION_1 = {"proc/self/cgroup": "4:memory:/x\n2:cpu:/x\n0::/"}
# Files in memory that the system may drop, and files of a file system in memory.
STAT = f"anon {GB}\nfile {3 * GB}\nshmem {GB}\ninactive_file {GB}\nactive_file {GB}"
TOTAL = f"cache 5\ninactive_file 5\nactive_file 5\ntotal_cache {3 * GB}\n" + (
    f"total_inactive_file {GB}\ntotal_active_file {GB}\ntotal_shmem {GB}"
)


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        (VERSION_2, {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 256),
        (VERSION_2, {"a/b/memory.max": str(8 * GB), "a/b/memory.current": str(5 * GB)}, 3),
        (VERSION_2, {"memory.max": str(8 * GB), "memory.current": str(9 * GB)}, 0),
        (
            VERSION_2,
            {
                "a/b/memory.max": str(8 * GB),
                "a/b/memory.current": str(5 * GB),
                "a/b/memory.stat": STAT,
            },
            5,
        ),
        (
            VERSION_2,
            {
                "a/b/memory.max": str(8 * GB),
                "a/b/memory.current": str(GB),
                "a/memory.max": str(9 * GB),
                "a/memory.current": str(7 * GB),
            },
            2,
        ),
        (
            VERSION_1,
            {
                "memory/x/memory.limit_in_bytes": str(8 * GB),
                "memory/x/memory.usage_in_bytes": str(5 * GB),
                "memory/x/memory.stat": TOTAL,
            },
            5,
        ),
        (
            VERSION_1,
            {
                "memory/x/memory.limit_in_bytes": UNLIMITED,
                "memory/x/memory.usage_in_bytes": str(5 * GB),
            },
            256,
        ),
    ],
    ids=["no limit", "limit", "beyond", "file pages", "group around", "version 1", "unlimited"],
)
def test_what_control_groups_have_left_is_available_and_pages_of_files_are_left(
    root: Path, group: dict[str, str], files: dict[str, str], left: int
) -> None:
    write(root, group | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert available_memory() == left * GB


@pytest.mark.parametrize(
    ("space", "data", "left"),
    [
        ("unlimited", "unlimited", None),
        ("9000000", "unlimited", 9000000 - 3072000),
        ("9000000", "2000000", 2000000 - 1024000),
        ("1000", "unlimited", 0),
    ],
)
def test_address_space_is_what_limits_leave(
    root: Path, space: str, data: str, left: int | None
) -> None:
    limits = f"Limit   Soft Limit  Hard Limit  Units\nMax data size  {data} unlimited bytes\n"
    limits += f"Max stack size  5 5 bytes\nMax address space  {space}  unlimited  bytes"
    status = "Name: x\nVmSize:\t3000 kB\nVmData:   1000 kB"
    write(root, {"proc/self/limits": limits, "proc/self/status": status})
    assert address_space() == left


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_limit_of_this_system_is_found() -> None:
    code = "from export_grok.machine import address_space; print(address_space())"
    limit = 2 * GB
    found = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert GB < int(found.stdout) < limit
