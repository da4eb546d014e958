"""What is read is a file: a pipe does not keep us waiting, and what has no end is not begun."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export_grok.config import GrokConfig
from export_grok.errors import ExportGrokError
from export_grok.export.safetensors_header import read_store_header
from export_grok.files import fingerprint, read_json
from export_grok.regular_file import open_regular, read_regular
from export_grok.runtime.logits import read_tokens
from export_grok.runtime.text.tokenizer import Tokenizer
from export_grok.weights import Weight, WeightReader

# What somebody may put where a file is expected, in a folder or an archive.
ODD: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "no end": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


def tensor_in(path: Path) -> object:
    weight = Weight(name="w", file=path.name, offset=0, dtype="int8", shape=(4,))
    return WeightReader(path.parent).read(weight)


READERS: dict[str, Callable[[Path], object]] = {
    "json": read_json,
    "config": GrokConfig.from_file,
    "safetensors": read_store_header,
    "tensor": tensor_in,
    "tokenizer": Tokenizer,
    "tokens": read_tokens,
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_is_refused(odd: str, tmp_path: Path) -> None:
    ODD[odd](tmp_path / "x")
    for read in (open_regular, read_regular, fingerprint):
        with pytest.raises(OSError, match=r"regular|directory|symbolic links"):
            read(tmp_path / "x")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_what_is_no_file(reader: str, odd: str, tmp_path: Path) -> None:
    ODD[odd](tmp_path / "x")
    with pytest.raises(ExportGrokError, match=str(tmp_path / "x")):
        READERS[reader](tmp_path / "x")


def test_a_file_is_read_behind_a_link_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        assert read_regular(tmp_path / name) == b"text"
        with open_regular(tmp_path / name) as file:
            assert (file.read(2), file.read()) == (b"te", b"xt")


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    assert read_regular(path, most=4) == b"text"
    with pytest.raises(OSError, match="it has 4 bytes, and 3 at most"):
        read_regular(path, most=3)
    os.truncate(path, 1 << 40)  # a hole: to read it would take all memory
    with pytest.raises(OSError, match="it has 1099511627776 bytes"):
        read_regular(path)
