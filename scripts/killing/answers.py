"""A file of requests that is answered, broken off, and answered on."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from export_grok.errors import OutputError
from export_grok.export.demo import write_demo_checkpoint
from export_grok.runtime.jsonl.run import part_of
from scripts.killing.work import Content, Work

__all__ = ["OUT", "Answers", "write_demo_bundle", "write_requests"]

OUT = "answers"

# Without logprobs, whose last bits depend on the requests that happen to share a turn.
REQUESTS = (
    {"id": "a", "prompt": "The lamp", "max_new_tokens": 4},
    {"id": 2, "tokens": [300], "max_new_tokens": 1},
    {"prompt": "é", "temperature": 0.7, "max_new_tokens": 2},
    {"prompt": "\n\n", "max_new_tokens": 1},
    {"tokens": [400, 401, 402], "temperature": 1.0, "max_new_tokens": 3},
)
# Of what an answer took: all else is seconds.
COUNTS = ("prompt_tokens", "new_tokens")


class Answers(Work):
    """A command that writes the answers to some requests into a folder that is there."""

    def begin(self, out: Path) -> None:
        """Make the folder; have older answers in it, if there were some before."""
        out.mkdir()
        super().begin(out)

    def run(self, out: Path, said: Path | None = None) -> int:
        """Run the command, and see that no answer which was there is made again: times differ."""
        kept = _whole_lines(part_of(out / OUT))
        code = super().run(out, said)
        assert code or kept <= _whole_lines(out / OUT), "answers were made again"
        return code

    def loaded(self, folder: Path) -> Content:
        """Return the answers, once all are there; see that those on the way are whole lines."""
        for line in _whole_lines(part_of(folder / OUT)):
            _untimed(line)
        if not (folder / OUT).exists():
            raise OutputError(f"{folder / OUT} is not there yet")
        return {OUT: self.content(folder)[OUT]}

    def content(self, folder: Path) -> Content:
        """Return the answers as they are but for their times, and what else is in the folder."""
        content = super().content(folder)
        *lines, rest = (folder / OUT).read_bytes().split(b"\n")
        content[OUT] = hashlib.sha256(b"\n".join([*map(_untimed, lines), rest])).hexdigest()
        return content


def write_requests(_checkpoint: Path, out: Path) -> None:
    """Write the file of requests."""
    out.write_text("".join(json.dumps(request) + "\n" for request in REQUESTS))


def write_demo_bundle(_checkpoint: Path, out: Path) -> None:
    """Write a bundle of the demo, and its checkpoint beside it.

    In a process of its own: one that has imported torch is slow to split.
    """
    checkpoint = out.with_name(f"{out.name}_checkpoint")
    write_demo_checkpoint(checkpoint)
    words = ("build-engine", str(checkpoint), "--out", str(out))
    subprocess.run([sys.executable, "-m", "export_grok", *words], check=True, capture_output=True)


def _whole_lines(path: Path) -> set[bytes]:
    return set(path.read_bytes().split(b"\n")[:-1]) if path.exists() else set()


def _untimed(line: bytes) -> bytes:
    """Return an answer without its times; what is cut off raises an error."""
    record = json.loads(line)
    record["usage"] = {name: record["usage"][name] for name in COUNTS}
    return json.dumps(record).encode()
