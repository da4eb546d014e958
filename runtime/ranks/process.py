"""The program of a rank: `python -m export_grok.runtime.ranks.process SOCKET MEMORY PARENT`.

SOCKET and MEMORY are descriptors that it was started with. It is told what to open by the first
message, then what to run; it ends when the other end of its socket is closed.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import MANIFEST, Bundle
from export_grok.engines.backend import RowSession
from export_grok.engines.group import Group
from export_grok.errors import ExportGrokError
from export_grok.files import read_json
from export_grok.manifest import Manifest
from export_grok.runtime.ranks.channel import LONGEST_TEXT, Channel, Message
from export_grok.runtime.ranks.group import RankGroup
from export_grok.runtime.ranks.memory import GroupSizes, RankMemory

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


class _Opener(Protocol):
    """Opens a session for one rank: its logits are this rank's share of the vocabulary."""

    def __call__(
        self, bundle: Bundle, group: Group, *, batch: int, max_length: int, threads: int
    ) -> RowSession: ...


def main() -> None:
    """Be a rank until the parent has no more use for one."""
    end, memory_file, parent = map(int, sys.argv[1:])
    if parent:
        _die_with(parent)
    channel = Channel(socket.socket(fileno=end))
    try:
        _serve(channel, memory_file)
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, ExportGrokError) else f"{_name(error)}: {error}"
        with contextlib.suppress(OSError):
            channel.send({"say": "error", "kind": _name(error), "text": text[:LONGEST_TEXT]})
            channel.receive()  # let the parent read it before it sees that this process ended
        sys.exit(1)


def _serve(channel: Channel, memory_file: int) -> None:
    spec = channel.receive()
    if spec is None:
        return
    memory = RankMemory(memory_file, GroupSizes(**spec["sizes"]))
    os.close(memory_file)
    rank = spec["rank"]
    session = _open(spec, RankGroup(rank, memory, channel))
    channel.send({"say": "ready", "prefill_rows": session.prefill_rows})
    while (command := channel.receive()) is not None:
        logits = _run(session, memory, command)
        if logits is not None:
            memory.logits(rank, logits.shape)[:] = logits
        channel.send({"say": "done", "shape": None if logits is None else list(logits.shape)})


def _open(spec: Message, group: Group) -> RowSession:
    folder = Path(spec["folder"])
    # Its files were held to the manifest by the parent.
    manifest = Manifest.from_dict(read_json(folder / MANIFEST), source=folder / MANIFEST)
    bundle = Bundle(folder=folder, weights_root=Path(spec["weights_root"]), manifest=manifest)
    module, _, name = spec["opener"].partition(":")
    opener: _Opener = getattr(importlib.import_module(module), name)
    return opener(
        bundle,
        group,
        batch=spec["sizes"]["batch"],
        max_length=spec["sizes"]["max_length"],
        threads=spec["threads"],
    )


def _run(session: RowSession, memory: RankMemory, command: Message) -> NDArray[np.float32] | None:
    if "copy" in command:
        session.copy(*command["copy"])
        return None
    tokens = memory.tokens(tuple(command["shape"]))
    start = np.array(command["start"], np.int64)
    if command["all"]:
        return session.forward_all(tokens, start)
    last, rows = (
        None if command[name] is None else np.array(command[name], np.int64)
        for name in ("last", "rows")
    )
    return session.forward(tokens, start, last, rows)


def _die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, in whichever way (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        sys.exit()


def _name(error: Exception) -> str:
    return type(error).__name__


if __name__ == "__main__":
    main()
