"""What comes in with a prompt: the tokenizer, and a file of token ids."""

import io
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import TOKENIZER
from export_grok.export.demo import DEMO_MODEL
from export_grok.runtime.logits import read_tokens
from export_grok.runtime.text.answer_text import AnswerText
from export_grok.runtime.text.stream_decoder import StreamDecoder
from export_grok.runtime.text.tokenizer import Tokenizer
from scripts.fuzzing.edits import edited_bytes, odd_entry
from scripts.fuzzing.files import Files, Placed
from scripts.fuzzing.target import Target

__all__ = ["TokenizerTarget", "TokensTarget"]

TEXT = "In the beginning é 日本語 👩‍👩‍👧 \n  x"
STOP = ("\n ", "語 👩")


class TokenizerTarget(Target):
    """The tokenizer of the demo."""

    name = "tokenizer"
    inputs: ClassVar[int] = 500
    spare: ClassVar[int] = 256 << 20

    def __init__(self, folder: Path) -> None:
        self._outside = folder / "outside"
        self._outside.write_bytes(b"text")
        whole: Files = {TOKENIZER: (DEMO_MODEL / TOKENIZER).read_bytes()}
        self.placed = Placed(folder / "tokenizer", whole)

    def edit(self, files: Files, random: Random) -> None:
        """Change a byte, more often of what stands behind the pieces."""
        content = files.get(TOKENIZER)
        if isinstance(content, bytes) and random.randrange(20):
            size = len(content)
            places = [(0, size - 1), (0, 200), (max(0, size - 600), size - 1)]
            files[TOKENIZER] = edited_bytes(content, random, places)
        elif files:
            odd_entry(files, random, str(self._outside))

    def read(self) -> str:
        """Encode and decode a text, whole, as a stream and as an answer up to a stop string."""
        tokenizer = Tokenizer(self.folder / TOKENIZER)
        ids = tokenizer.encode(TEXT)
        for token in range(0, tokenizer.vocab_size, 97):
            tokenizer.byte_length(token)
        stream = StreamDecoder(tokenizer)
        said = tokenizer.decode(ids) + "".join(map(stream.push, ids)) + stream.finish()
        answer, more = AnswerText(tokenizer, ids, STOP), tokenizer.encode_more(TEXT)
        for token in more:
            answer.push(token)
        answer.finish()
        assert not any(string in answer.text for string in STOP)
        shown = tokenizer.decode([*ids, *more[: answer.whole]]) + answer.rest
        assert shown == tokenizer.decode(ids) + answer.text
        return said + answer.text

    def hold(self, said: str) -> None:
        """Nothing: another tokenizer gives another text."""


class TokensTarget(Target):
    """A file of token ids."""

    name = "tokens"
    inputs: ClassVar[int] = 700

    def __init__(self, folder: Path) -> None:
        file = io.BytesIO()
        np.save(file, np.arange(12).reshape(2, 6))
        self._outside = folder / "outside"
        self._outside.write_bytes(file.getvalue())
        self.placed = Placed(folder / "tokens", {"tokens.npy": file.getvalue()})

    def edit(self, files: Files, random: Random) -> None:
        """Change the header."""
        content = files.get("tokens.npy")
        if not isinstance(content, bytes):
            return
        match random.randrange(8):
            case 0:
                odd_entry(files, random, str(self._outside))
            case 1 | 2:
                files["tokens.npy"] = edited_bytes(content, random)
            case 3:
                file = io.BytesIO()
                np.savez(file, tokens=np.arange(12).reshape(2, 6))
                files["tokens.npy"] = edited_bytes(file.getvalue(), random)
            case _:
                files["tokens.npy"] = _told_otherwise(content, random)

    def read(self) -> NDArray[np.int64]:
        """Read the file."""
        return read_tokens(self.folder / "tokens.npy")

    def hold(self, said: NDArray[Any]) -> None:
        """See that it is a matrix of numbers that the file has room for."""
        assert (said.dtype, said.ndim) == (np.int64, 2)
        assert said.size <= (self.folder / "tokens.npy").stat().st_size


def _told_otherwise(content: bytes, random: Random) -> bytes:
    """Return an .npy whose header says another shape, dtype or order."""
    old, new = random.choice(
        (
            (b"(2, 6)", b"(%d, 6)" % random.choice((0, 1, 3, 10**5, 10**8, 10**12, 2**62))),
            (b"(2, 6)", b"(-2, -6)"),
            (b"(2, 6)", b"(12,)"),
            (b"(2, 6)", b"()"),
            (b"(2, 6)", b"__import__('os').system('touch witness')"),
            (b"'<i8'", random.choice((b"'|O'", b"'<f8'", b"'>i4'", b"'<u8'", b"'|V8'", b"'|b1'"))),
            (b"'<i8'", b"[('a', '<i4'), ('b', '|O')]"),
            (b"False", b"True"),
            (b"'descr'", b"'x'"),
        )
    )
    return content.replace(old, new)
