"""Lists of hashes are read in all forms that sha256sum writes, and bad ones are refused whole."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from export_grok.errors import CheckpointError, ConfigError
from export_grok.export.check.hash_list import HashList, tensor_hashes

A, B = "a" * 64, "B" * 64


def read(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "list"
    path.write_bytes(text.encode())
    return dict(HashList.read(path).hashes)


@pytest.mark.parametrize(
    ("text", "hashes"),
    [
        (f"{A}  x\n", {"x": A}),
        (f"{A} *x\n", {"x": A}),
        (f"{A}  ckpt-0/tensor 1\n{B}  y", {"ckpt-0/tensor 1": A, "y": B.lower()}),
        (f"# of grok\n\n{A}  x\r\n  \n", {"x": A}),
        (f"\ufeff{A}  x\n", {"x": A}),
        (f"SHA256 (a (b).bin) = {A}\n", {"a (b).bin": A}),
        (f"\\{A}  a\\\\b\\nc\n", {"a\\b\nc": A}),
        (f"{A}  x\n{A}  x\n", {"x": A}),
    ],
)
def test_every_form_of_a_line_is_read(text: str, hashes: dict[str, str], tmp_path: Path) -> None:
    assert read(tmp_path, text) == hashes


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
@pytest.mark.parametrize("options", [[], ["--binary"], ["--tag"]])
def test_what_sha256sum_prints_is_read(options: list[str], tmp_path: Path) -> None:
    names = ["plain", "with blank", "back\\slash", "new\nline", "()"]
    for name in names:
        (tmp_path / name).write_text(name)
    run = subprocess.run(
        ["sha256sum", *options, "--", *names], cwd=tmp_path, capture_output=True, check=True
    )
    assert list(read(tmp_path, run.stdout.decode())) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# nothing\n", "it is empty"),
        ("hello\n", "line 1 is no hash and path: 'hello'"),
        (f"{A}  x\n{A[:-1]}  y\n", "line 2 is no hash and path: 'aaaa"),
        (f"{A} x\n", "line 1 is no hash and path"),
        (f"{A}\n", "line 1 is no hash and path"),
        (f"{A[:-1]}g  x\n", "line 1 is no hash and path"),
        (f"{A}  x\n{B}  x\n", "line 2 has another hash of x than a line before"),
    ],
)
def test_what_is_no_list_is_refused_with_the_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "list") in str(caught.value)
    assert said in str(caught.value)


def test_all_bad_lines_are_told_up_to_some(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "\n".join(f"bad {number}" for number in range(1, 21)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert lines[1:3] == [f"  line {n} is no hash and path: 'bad {n}'" for n in (1, 2)]
    assert lines[-1] == "  ... and 15 more"


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(A.encode() + b"  \xff")
    for path in (tmp_path / "none", tmp_path, tmp_path / "latin"):
        with pytest.raises(ConfigError, match="cannot be read as a list of hashes"):
            HashList.read(path)
    (tmp_path / "store.json").write_text(json.dumps({"format": "?"}))
    with pytest.raises(CheckpointError, match="not of a store of export-grok"):
        HashList.read(tmp_path / "store.json")


def listed(*paths: str, **hashes: str) -> HashList:
    return HashList(source=Path("list"), hashes=hashes | {path: path for path in paths})


def test_a_path_means_the_file_whose_end_it_is_or_which_ends_it() -> None:
    hashes = listed("/data/ckpt-0/a", "./ckpt-0/b", "c", "other/d", "rank_0/e", "rank_1/e")
    files = [f"ckpt-0/{name}" for name in "abcd"]
    files += ["rank_0/e", "rank_1/e", "rank_2/e"]
    assert hashes.match(files) == {
        "ckpt-0/a": "/data/ckpt-0/a",
        "ckpt-0/b": "./ckpt-0/b",
        "ckpt-0/c": "c",
        "rank_0/e": "rank_0/e",
        "rank_1/e": "rank_1/e",
    }
    assert hashes.match(["a"]) == {"a": "/data/ckpt-0/a"}


def test_two_paths_with_other_hashes_for_a_file_are_refused() -> None:
    assert listed("x/a", "y/a", "a").match(["a"]) == {"a": "a"}
    with pytest.raises(ConfigError, match="has other hashes for a as x/a and as y/a"):
        listed("x/a", "y/a").match(["a"])


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0{}", b"x" * 8 + b"[1]"])
def test_a_header_that_is_none_has_no_hashes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    assert tensor_hashes(tmp_path / "x.safetensors") == {}
    assert tensor_hashes(tmp_path / "none") == {}
