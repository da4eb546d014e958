"""A conversation on a terminal or through pipes: lines in, answers out, and commands between."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from export_grok.errors import NumericsError, OutputError, RequestError
from export_grok.files import atomic_file
from export_grok.runtime.params import GenerationParams

# NOTE: the model comes with numpy, which the command line loads only to use it.
if TYPE_CHECKING:
    from export_grok.runtime.handle import Handle, Result
    from export_grok.runtime.model import Model

__all__ = ["Dialogue", "Manner", "typed_lines"]

HELP = """\
/rewind [N]  take back the last turn, or the last N
/reset       begin anew
/usage       tokens so far
/save FILE   write what was said into a new file
/quit        leave; so does the end of the input
//...        a line that begins with /"""
COMMANDS = ("help", "rewind", "reset", "usage", "save", "quit")
WAY_OUT = "/rewind [N] takes turns back, /reset all of them"


@dataclass(frozen=True)
class Manner:
    """How lines and answers become one text.

    Attributes:
        user: what stands before each line.
        reply: what stands before each answer.
    """

    user: str = ""
    reply: str = ""

    @property
    def between(self) -> str:
        """What stands between an answer and the next line."""
        return "\n" if self.user else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends an answer: the beginning of the next line."""
        return (self.between + self.user.rstrip(),) if self.user.strip() else ()

    def put(self, line: str, *, first: bool) -> str:
        """Return the text up to where the answer begins."""
        return ("" if first else self.between) + self.user + line + self.reply


def typed_lines() -> Iterator[str]:
    """Yield the lines of stdin to its end; on a terminal with a prompt and line editing."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # `input` uses it once it is there
        with contextlib.suppress(EOFError):
            while True:
                yield input("> ")
        click.echo()
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer says what is wrong
    for line in iter(sys.stdin.readline, ""):
        yield line.removesuffix("\n")


class Dialogue:
    """Lines that are answered by a model, and those that are commands.

    Args:
        model: that answers.
        manner: how lines and answers become one text.
        params: of the answers; each after the first has the next seed.
    """

    def __init__(self, model: "Model", manner: Manner, params: GenerationParams) -> None:
        self._model = model
        self._manner = manner
        self._params = dataclasses.replace(params, stop=(*params.stop, *manner.stop))
        self._talk = model.conversation()
        self._answers = 0
        self._tokens = 0

    def run(self, lines: Iterator[str]) -> None:
        """Answer line after line, to the last or to /quit.

        Raises:
            ExportGrokError: the engine failed.
            KeyboardInterrupt: Ctrl-C, but for one during an answer, which ends the answer.
        """
        for line in lines:
            if line.startswith("/") and not line.startswith("//"):
                if line.strip() == "/quit":
                    return
                self._command(line)
            elif line.strip():
                self._say(line.removeprefix("/") if line.startswith("//") else line)

    def _say(self, line: str) -> None:
        text = self._manner.put(line, first=not self._talk.turns)
        params = dataclasses.replace(
            self._params, seed=(self._params.seed + self._answers) % 2**64
        )
        try:
            if self._fits(text):
                result = self._shown(self._talk.say(text, params))
                self._answers += 1
                self._tokens += len(result.tokens)
        except RequestError as error:
            _tell(str(error))

    def _fits(self, text: str) -> bool:
        tokenizer, there = self._model.tokenizer, len(self._talk.tokens)
        more = len(tokenizer.encode_more(text) if there else tokenizer.encode(text))
        if there + more < self._model.max_length:
            return True
        _tell(
            f"the context is full: {there} of {self._model.max_length} tokens, and this line has "
            f"{more}, to be followed by an answer; {WAY_OUT}"
        )
        return False

    def _shown(self, handle: "Handle") -> "Result":
        """Print an answer as it is made; Ctrl-C ends it there."""
        from export_grok.runtime.answers import usage_line

        with _ctrl_c(handle.cancel):
            for piece in handle.pieces():
                click.echo(piece.text, nl=False)
        click.echo()
        result = handle.partial()
        click.secho(usage_line(result), dim=True, err=True)
        if handle.error is not None:
            if not isinstance(handle.error, NumericsError):
                raise handle.error
            _tell(str(handle.error))
        elif len(result.prompt_tokens) + len(result.tokens) >= self._model.max_length:
            _tell(f"the context is full: all {self._model.max_length} tokens; {WAY_OUT}")
        return result

    def _command(self, line: str) -> None:
        name, _, argument = line[1:].strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: click.echo(HELP, err=True),
            "rewind": self._rewind,
            "reset": self._reset,
            "usage": self._usage,
            "save": self._save,
        }
        if name not in commands:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            advice = f"did you mean /{near[0]}?" if near else "/help tells the commands"
            _tell(f"there is no command /{name}; {advice}")
            return
        try:
            commands[name](argument.strip())
        except (OutputError, RequestError) as error:
            _tell(str(error))

    def _rewind(self, turns: str) -> None:
        if turns and not (turns.isascii() and turns.isdecimal() and len(turns) < 10):
            raise RequestError(f"/rewind takes a number of turns, not {turns!r}")
        self._talk.rewind(int(turns or 1))
        self._usage("")

    def _reset(self, _argument: str) -> None:
        self._talk = self._model.conversation()

    def _usage(self, _argument: str) -> None:
        click.echo(
            f"{len(self._talk.tokens)} of {self._model.max_length} tokens, turns: "
            f"{self._talk.turns}; new tokens in all: {self._tokens}",
            err=True,
        )

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file")
        path = Path(name).expanduser()
        if path.exists():
            raise OutputError(f"{path} is there already; name a new file")
        text = self._model.tokenizer.decode(self._talk.tokens)
        with atomic_file(path) as file:
            file.write(f"{text}\n".encode())
        click.echo(f"{path}: {len(text)} characters", err=True)


@contextlib.contextmanager
def _ctrl_c(cancel: Callable[[], None]) -> Iterator[None]:
    """Have the first Ctrl-C in the block cancel something, and no more; the next is as ever."""
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        # Not here: this may have interrupted whoever holds the lock that it takes.
        threading.Thread(target=cancel, daemon=True).start()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(text: str) -> None:
    click.echo(text, err=True)
