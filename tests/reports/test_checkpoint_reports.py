"""What others reported of getting and loading the checkpoint does not happen here.

docs/reliability.md says which report each test is of, and which tests elsewhere are of others.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from export_grok.config import GROK_1
from export_grok.errors import UnsafePickleError
from export_grok.export.checkpoint import open_weights
from export_grok.export.demo import write_demo_checkpoint
from export_grok.export.graph_folder import export_graphs
from export_grok.export.released_pickle import arrays_in
from export_grok.weights import WeightReader
from tests.bundles import traced_once
from tests.commands.conftest import Run, done, run
from tests.reports.peak import peak_memory
from tests.reports.sparse import sparse_checkpoint

__all__ = ["done", "run", "traced_once"]

# Nothing can be written in /dev/shm; the rest of the machine does not see it.
NO_SHM = "mount -t tmpfs -o ro,size=4k none /dev/shm"
ALONE = ["unshare", "--map-root-user", "--mount", "sh", "-c"]

STAGES = """
import os, sys
from export_grok.cli import main

for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        assert end.code == 0, line
assert os.listdir("/dev/shm") == []
"""


def can_be_alone() -> bool:
    """Return whether this system lets a process have a /dev/shm of its own."""
    try:
        return subprocess.run([*ALONE, NO_SHM], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_be_alone(), reason="a process has no mounts of its own here")
@pytest.mark.usefixtures("traced_once")
def test_import_build_and_generate_need_no_room_in_dev_shm(tmp_path: Path) -> None:
    write_demo_checkpoint(tmp_path / "demo")
    export_graphs(tmp_path / "demo", tmp_path / "graphs")
    lines = [
        "import demo store",
        "build-engine graphs",
        "generate graphs --prompt a --max-new-tokens 2",
    ]
    script = [sys.executable, "-c", STAGES, *lines]
    ended = subprocess.run(
        [*ALONE, f'{NO_SHM} && exec "$@"', "sh", *script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


# ---- memory


def test_a_checkpoint_larger_than_the_memory_allowed_is_imported(tmp_path: Path) -> None:
    sizes = {"emb_size": 1536, "num_q_heads": 12, "num_kv_heads": 4, "ffn_size": 8192}
    config = dataclasses.replace(GROK_1, num_layers=2, vocab_size=16384, **sizes)
    checkpoint = sparse_checkpoint(config, tmp_path / "checkpoint")
    command = [sys.executable, "-m", "export_grok", "import", str(checkpoint), "store"]
    limit = 500_000_000
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -v {limit // 1024} && exec "$@"', "sh", *command, "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else each core takes some of it
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    _, index = open_weights(tmp_path / "store")
    assert sum(weight.nbytes for weight in index) > 1.4 * limit


def test_inspect_counts_int8_as_int8_and_says_what_each_rank_holds(
    done: Run, tmp_path: Path
) -> None:
    folder = sparse_checkpoint(dataclasses.replace(GROK_1, num_layers=1), tmp_path / "checkpoint")
    told: list[str] = []
    peak = peak_memory(lambda: told.append(done("inspect", folder, "--json").out))
    assert peak < 100_000_000  # of 8.1 GB
    found = json.loads(told[0])
    matrices = 3 * 8 * 6144 * 32768 + 2 * 6144 * 6144 + 2 * 6144 * 1024
    assert found["bytes_by_dtype"]["int8"] == matrices  # one each
    assert found["bytes_by_dtype"]["float32"] == 4 * (131072 * 6144 + 6144 * 8 + 5 * 6144)
    assert found["parameters"] == matrices + found["bytes_by_dtype"]["float32"] // 4
    whole = sum(found["bytes_by_dtype"].values())
    held = {rank["tensor_parallel"]: rank["weight_bytes"] for rank in found["ranks"]}
    assert held[1] == whole
    assert all(1 <= held[ranks] * ranks / whole < 1.001 for ranks in (2, 4, 8))


# ---- files that JAX saved


class QuantizedWeight8bit:
    """The release's class, which its program had in `__main__`."""

    def __init__(self, weight: Any, scales: Any) -> None:
        self.weight, self.scales = weight, scales


@dataclasses.dataclass(frozen=True)
class JaxArray:
    """What pickles as an array of JAX does. Source: `jax._src.array.ArrayImpl`."""

    array: Any
    function: Any

    def __reduce__(self) -> Any:
        return self.function, (*self.array.__reduce__(), {"weak_type": False, "named_shape": {}})


def save_by_jax(path: Path, *arrays: Any, name: str = "_reconstruct_array") -> None:
    """Write one array, or a weight and its scales, as a program with JAX would."""

    def function() -> None: ...

    function.__module__, function.__qualname__ = "jax._src.array", name
    with pytest.MonkeyPatch.context() as patch:
        for module in ("jax", "jax._src", "jax._src.array"):
            patch.setitem(sys.modules, module, types.ModuleType(module))
        patch.setattr(sys.modules["jax._src.array"], name, function, raising=False)
        patch.setattr(QuantizedWeight8bit, "__module__", "__main__")
        patch.setattr(
            sys.modules["__main__"], "QuantizedWeight8bit", QuantizedWeight8bit, raising=False
        )
        values = [JaxArray(array, function) for array in arrays]
        value = values[0] if len(values) == 1 else QuantizedWeight8bit(*values)
        path.write_bytes(pickle.dumps(value, 4))


@pytest.fixture
def no_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever imports JAX fail, even where it is installed."""
    gone: Any = None
    monkeypatch.setitem(sys.modules, "jax", gone)


@pytest.mark.usefixtures("no_jax")
def test_a_pickle_that_names_jax_is_read_by_shape_and_bytes_without_jax(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.integers(-128, 128, (3, 40, 50), dtype=np.int8)
    scales: Any = random.normal(size=(3, 8, 50)).astype(ml_dtypes.bfloat16)
    reader = WeightReader(tmp_path)
    save_by_jax(tmp_path / "quantised", weight, scales)
    save_by_jax(tmp_path / "plain", scales)
    quantised, plain = arrays_in(tmp_path / "quantised"), arrays_in(tmp_path / "plain")
    for found, array in (
        (quantised["weight"], weight),
        (quantised["scales"], scales),
        (plain["array"], scales),
    ):
        assert (found.shape, found.dtype) == (array.shape, array.dtype.name)
        assert reader.read(found).tobytes() == array.tobytes()


@pytest.mark.usefixtures("no_jax")
def test_a_pickle_that_names_anything_else_of_jax_is_refused_by_that_name(tmp_path: Path) -> None:
    save_by_jax(tmp_path / "plain", np.zeros(3, np.float32), name="device_put")
    with pytest.raises(UnsafePickleError, match=r"asks for 'jax\._src\.array\.device_put'"):
        arrays_in(tmp_path / "plain")
