"""The King James Bible as a training text: fetched, cleaned, split, and cut into tokens.

Debian packs the text in a format of its own (`bible-kjv-text`) beside the program that reads it
(`bible-kjv`), so both are fetched and unpacked, nothing is installed, and the program prints it.
The text of 1611 is in the public domain.

A chapter becomes one line of prose, without the numbers of its verses. Every 20th chapter is held
out: the 10th, 30th, 50th, ... counted from Genesis 1. So the held-out text has every book's style,
and no sentence of it was trained on.
"""

import io
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from export_grok.config import GrokConfig
from export_grok.errors import BuildError
from export_grok.files import atomic_file

__all__ = [
    "Chapter",
    "Tokens",
    "chapters",
    "fetch_text",
    "split",
    "tokenizer_model",
    "tokens",
    "write_lines",
]

PACKAGES = ("bible-kjv-text", "bible-kjv")
HELD_OUT_EVERY = 20

_VERSE = re.compile(r"(\w*[A-Za-z])(\d+):\d+ (.*\S)")

Chapter = tuple[str, ...]  # its verses


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A text as one stream of tokens, an end token behind every chapter.

    Attributes:
        ids: the tokens, int64.
        starts: where verses begin in `ids`, int64.
        byte_lengths: bytes of UTF-8 that each token stands for, 0 for the end token.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    byte_lengths: NDArray[np.int64]


def fetch_text(work: Path) -> Path:
    """Return the file of all verses, `<work>/kjv.txt`, one `Ge1:1 In the beginning ...` a line.

    Raises:
        BuildError: a package cannot be fetched or read.
    """
    path = work / "kjv.txt"
    if path.exists():
        return path
    packages = work / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    try:
        for name in PACKAGES:
            subprocess.run(["apt-get", "download", name], cwd=packages, check=True)
            (deb,) = packages.glob(f"{name}_*.deb")
            subprocess.run(["dpkg", "-x", deb.name, "unpacked"], cwd=packages, check=True)
        reader = packages / "unpacked/usr/bin/bible"
        data = packages / "unpacked/usr/lib"
        # -f is off by default only in name: it *turns off* the layout for a screen.
        command = [str(reader), "-f", "-p", str(data), "Gen1:1-Rev22:21"]
        text = subprocess.run(command, check=True, capture_output=True).stdout
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"the text cannot be fetched: {error}; run `apt-get update` on a Debian or Ubuntu "
            f"system, or put a file of lines like `Ge1:1 In the beginning ...` at {path}"
        ) from error
    with atomic_file(path) as file:
        file.write(text)
    return path


def chapters(path: Path) -> list[Chapter]:
    """Return the chapters in the file of all verses.

    Raises:
        BuildError: a line is no verse.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        verse = _VERSE.fullmatch(line.strip())
        if not verse:
            raise BuildError(
                f"{path}, line {number}: {line[:40]!r} is no verse like `Ge1:1 In the beginning`; "
                "delete the file to fetch it again"
            )
        book, chapter, text = verse.groups()
        found.setdefault((book, chapter), []).append(re.sub(r"\s+", " ", text))
    return [tuple(verses) for verses in found.values()]


def split(whole: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Return the chapters to train on and those held out."""
    middle = HELD_OUT_EVERY // 2
    training: list[Chapter] = []
    held_out: list[Chapter] = []
    for number, chapter in enumerate(whole, 1):
        (held_out if number % HELD_OUT_EVERY == middle else training).append(chapter)
    return training, held_out


def write_lines(path: Path, text: Iterable[Chapter]) -> None:
    """Write the chapters, one a line, as `export-grok evaluate --lines` reads them.

    Raises:
        OutputError: `path` cannot be written.
    """
    with atomic_file(path) as file:
        for chapter in text:
            file.write((" ".join(chapter) + "\n").encode())


def tokenizer_model(training: Iterable[Chapter], config: GrokConfig) -> bytes:
    """Return a sentencepiece model of the config's vocabulary, with the options of Grok-1's."""
    model = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=(verse for chapter in training for verse in chapter),
        model_writer=model,
        model_type="bpe",
        vocab_size=config.vocab_size,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=config.pad_token,
        bos_id=config.bos_token,
        eos_id=config.eos_token,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[BOS]",
        eos_piece="[EOS]",
        unk_piece="[UNK]",
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tokens(text: Iterable[Chapter], tokenizer: bytes) -> Tokens:
    """Return the chapters as one stream."""
    pieces = SentencePieceProcessor()
    pieces.load_from_serialized_proto(tokenizer)
    ids: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    for chapter in text:
        for verse in chapter:
            starts.append(len(ids))
            # The space that the tokenizer puts before a text is the one between two verses.
            new = pieces.encode(verse, out_type=int)
            ids += new
            lengths += (_byte_length(pieces.id_to_piece(token)) for token in new)
        ids.append(pieces.eos_id())
        lengths.append(0)
    return Tokens(ids=np.array(ids), starts=np.array(starts), byte_lengths=np.array(lengths))


def _byte_length(piece: str) -> int:
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())
