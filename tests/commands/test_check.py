"""`check` says what it read and found good, or all that is wrong, and leaves accordingly."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.commands.conftest import FILES, Refused, Run
from tests.damaged_weights import CONFIG, checkpoint, values_in, whole

__all__ = ["checkpoint", "whole"]

ALL_FILES = 2 + 12 * CONFIG.num_layers


def sha256sum(folder: Path, out: Path) -> Path:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in sorted(folder.glob("ckpt-0/*"))
    ]
    out.write_text("".join(lines))
    return out


def test_what_was_read_and_found_good_is_said_with_the_rate(done: Run, tiny: Path) -> None:
    size = sum(path.stat().st_size for path in tiny.glob("ckpt-0/*"))
    lines = done("check", tiny).out.splitlines()
    assert lines[0].startswith(
        f"{tiny}: released checkpoint of 2 layers, 40 tensors in 26 files; {size:,} bytes read in "
    )
    assert lines[0].endswith(" GB/s")
    assert lines[1:] == [
        "sha256: none is known to hold the bytes to; values only were checked",
        "all as it must be",
    ]


def test_hashes_are_counted(done: Run, tiny: Path, tmp_path: Path) -> None:
    hashes = sha256sum(tiny, tmp_path / "SHA256SUMS")
    lines = done("check", tiny, "--hashes", hashes).out.splitlines()
    assert lines[1:] == ["sha256 as it must be: 26", "all as it must be"]


def test_what_is_wrong_comes_first_and_the_exit_code_is_1(run: Run, checkpoint: Path) -> None:
    values_in(checkpoint, "embedding.weight")[3, 4] = np.inf
    values_in(checkpoint, "layers.1.experts.gate.scales")[0, 0, 5] = 1e-40
    values_in(checkpoint, "layers.0.experts.up.weight")[2] = 0
    os.truncate(checkpoint / "ckpt-0" / "tensor00001_000", 10)
    outcome = run("check", checkpoint, "--workers", 1)
    assert outcome.code == 1
    assert outcome.out.splitlines()[2:] == [
        "wrong (3):",
        "  tensor00001_000 (final_norm.scale) has 10 of 662 bytes: fetch it again",
        "  ckpt-0/tensor00000_000 embedding.weight: 1 infinite of 65,536 values, the first at "
        "[3, 4]",
        "  ckpt-0/tensor00004_000 layers.0.experts.up.weight: [2] of 3 is all zeros",
        "doubtful (1):",
        "  ckpt-0/tensor00014_000 layers.1.experts.gate.scales: 1 scale so small that some "
        "processors read 0, the first at [0, 0, 5]",
    ]
    assert outcome.err == (
        f"Error: {checkpoint} is not sound: 3 wrong, listed above; get or make these files again\n"
    )


def test_what_is_only_doubtful_is_listed_and_the_exit_code_is_0(
    done: Run, checkpoint: Path
) -> None:
    values_in(checkpoint, "layers.1.experts.gate.weight")[0, :20] = 127
    lines = done("check", checkpoint).out.splitlines()
    assert lines[2] == "doubtful (1):"
    assert "layers.1.experts.gate.weight: [0] of 3 is saturated, up to 16." in lines[3]
    assert len(lines) == 4


def test_json_has_all_of_it(run: Run, done: Run, checkpoint: Path) -> None:
    value = json.loads(done("check", checkpoint, "--json").out)
    assert (value["sound"], value["findings"]) == (True, [])
    assert (value["path"], value["kind"]) == (str(checkpoint), "released checkpoint")
    assert (value["layers"], value["files"], value["tensors"]) == (2, ALL_FILES, 40)
    size = sum(path.stat().st_size for path in checkpoint.glob("ckpt-0/*"))
    assert (value["bytes"], value["hashes"]) == (size, 0)
    assert value["bytes_per_second"] == pytest.approx(size / value["seconds"])

    values_in(checkpoint, "embedding.weight")[3, 4:6] = np.nan
    outcome = run("check", checkpoint, "--json")
    assert outcome.code == 1
    value = json.loads(outcome.out)
    assert value["sound"] is False
    assert value["findings"] == [
        {
            "level": "wrong",
            "kind": "nan",
            "text": "2 NaN of 65,536 values, the first at [3, 4]",
            "file": "ckpt-0/tensor00000_000",
            "tensor": "embedding.weight",
            "count": 2,
            "index": [3, 4],
            "offset": value["findings"][0]["offset"],
        }
    ]


def test_lines_are_capped_and_json_is_not(run: Run, checkpoint: Path) -> None:
    for path in sorted(checkpoint.glob("ckpt-0/*"))[3:]:
        path.unlink()
    outcome = run("check", checkpoint)
    assert outcome.code == 1
    assert outcome.out.splitlines()[2] == "wrong (23):"
    assert outcome.out.splitlines()[-1] == "  ... and 3 more; --json has all"
    assert len(outcome.out.splitlines()) == 3 + 20 + 1
    assert len(json.loads(run("check", checkpoint, "--json").out)["findings"]) == 23


def test_a_dry_run_reads_headers_only(done: Run, run: Run, checkpoint: Path) -> None:
    values_in(checkpoint, "embedding.weight")[3, 4] = np.nan
    assert done("check", checkpoint, "--dry-run").out.startswith("needs ")
    (checkpoint / "ckpt-0" / "tensor00001_000").unlink()
    outcome = run("check", checkpoint, "--dry-run")
    assert outcome.code == 1
    assert outcome.out.splitlines()[1:] == [
        "wrong (1):",
        "  tensor00001_000 (final_norm.scale) is missing",
    ]


def test_it_needs_memory_for_its_threads_and_can_be_forced(
    refused: Refused, done: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export_grok.needs.available_memory", lambda: 2 * 10**8)
    done("check", tiny, "--workers", 1)
    text = refused("check", tiny, "--workers", 10)
    assert text.startswith("there is too little (--force tries anyhow):")
    done("check", tiny, "--workers", 10, "--force")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as a list of hashes"),
        ("0123  ckpt-0/tensor00000_000\n", "line 1 is no hash and path: '0123  ckpt-0/"),
        (f"{'0' * 64}  other\n", "names no file of "),
    ],
)
def test_a_list_that_is_none_is_refused(
    text: str | None, said: str, refused: Refused, tiny: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "list").write_text(text)
    assert said in refused("check", tiny, "--hashes", tmp_path / "list")


def test_what_is_no_folder_of_weights_is_refused(refused: Refused, tmp_path: Path) -> None:
    assert "holds no checkpoint" in refused("check", tmp_path)
    assert "cannot be read" in refused("check", tmp_path / "none")


def test_an_imported_store_is_held_to_its_hashes(
    run: Run, done: Run, tiny: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    done("import", tiny, store)
    lines = done("check", store).out.splitlines()
    assert lines[1:] == ["sha256 as it must be: 40", "all as it must be"]
    assert done("check", tiny, "--hashes", store / "store.json").out.endswith(
        "sha256 as it must be: 26\nall as it must be\n"
    )
    with (store / "layer_01.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 64]))
    outcome = run("check", store)
    assert outcome.code == 1
    assert "layer_01.safetensors layers.1." in outcome.out
    assert "has sha256 " in outcome.out


def test_a_bundle_is_checked_with_its_weights(done: Run, demo: Path) -> None:
    lines = done("check", demo).out.splitlines()
    assert lines[0].startswith(f"{demo}: bundle of 3 layers, 59 tensors in {FILES} files; ")
    assert lines[-1] == "all as it must be"
