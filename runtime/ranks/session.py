"""A session whose work is done by ranks: it hands out tokens, adds sums, and joins logits.

Each rank is a process (`process`); this one computes nothing but sums. All ranks wait while it
adds, and read one total: they agree bit for bit, whatever the number of runs.
"""

import contextlib
import math
import os
from collections.abc import Callable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import GrokConfig
from export_grok.engines.arguments import check_copy, check_tokens, checked_last, checked_rows
from export_grok.errors import ConfigError, RequestError
from export_grok.progress import progress_bar
from export_grok.runtime.ranks.channel import Message
from export_grok.runtime.ranks.crew import MEETINGS, Crew, meeting
from export_grok.runtime.ranks.memory import GroupSizes, RankMemory, shared_file
from export_grok.runtime.ranks.watch import PATIENCE, Patience

__all__ = ["RankedSession"]


class RankedSession:
    """An `engines.backend.RowSession` of several ranks. Close it: it is a context manager too.

    Args:
        bundle: with an engine for so many ranks.
        ranks: how many.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
        threads: of each rank.
        opener: of a rank's session, as "module:function"; see `process`.
        patience: how long a rank is waited for.

    Raises:
        ConfigError: this system cannot run ranks.
        ExportGrokError: a rank could not open its part; the error is of the rank's own class.
        RankError: a rank died or stalled at its start.
    """

    config: GrokConfig
    batch: int
    max_length: int
    prefill_rows: int

    def __init__(
        self,
        bundle: Bundle,
        *,
        ranks: int,
        batch: int,
        max_length: int,
        threads: int,
        opener: str,
        patience: Patience = PATIENCE,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("ranks share memory as Linux offers it; run this bundle on Linux")
        self.config = bundle.config
        self.batch = batch
        self.max_length = max_length
        self._ranks = ranks
        self._steps = 0
        sizes = GroupSizes(
            ranks=ranks,
            batch=batch,
            max_length=max_length,
            width=bundle.config.emb_size,
            vocabulary=bundle.config.vocab_size,
        )
        spec = {
            "sizes": vars(sizes),
            "folder": str(bundle.folder.absolute()),
            "weights_root": str(bundle.weights_root.absolute()),
            "threads": threads,
            "opener": opener,
        }
        memory_file = shared_file(sizes)
        try:
            self._memory = RankMemory(memory_file, sizes)
            specs = [spec | {"rank": rank} for rank in range(ranks)]
            self._crew = Crew(specs, memory_file, patience)
        finally:
            os.close(memory_file)
        with self._crew.ended_by_errors(), progress_bar("loading", ranks, unit="ranks") as advance:
            ready = self._serve({"say": "ready"}, "loaded its part", advance)
        self.prefill_rows = ready["prefill_rows"]

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [R, V].

        Raises:
            ExportGrokError: a rank failed; all are ended.
            RequestError: the tokens do not fit, a row is none of the session's or named twice,
                or the ranks were ended before.
        """
        asked = checked_rows(self, rows)
        check_tokens(self, tokens, start, asked)
        if last is None:
            self._run(tokens, start, asked)
            return None
        last = checked_last(self, last, tokens, asked)
        return self._run(tokens, start, asked, last=last.tolist(), lead=(len(asked),))

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V].

        Raises:
            ExportGrokError: a rank failed; all are ended.
            RequestError: the tokens do not fit, or the ranks were ended before.
        """
        check_tokens(self, tokens, start)
        return self._run(tokens, start, checked_rows(self, None), lead=tokens.shape)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens that a row holds those of another, as if computed for it.

        Raises:
            ExportGrokError: a rank failed; all are ended.
            RequestError: a row is none of the session's, both are one, the cache is shorter, or
                the ranks were ended before.
        """
        check_copy(self, source, target, length)
        self._command("copy", {"copy": [int(source), int(target), int(length)]}, shape=None)

    def close(self) -> None:
        """End all ranks, and wait until their processes are gone. May be called again."""
        self._crew.end()

    def __enter__(self) -> "RankedSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        last: list[int] | None = None,
        lead: tuple[int, ...] | None = None,
    ) -> NDArray[np.float32]:
        """Return logits [*lead, V]; none of them without `lead`."""
        command = {
            "shape": tokens.shape,
            "start": start.tolist(),
            "last": last,
            "rows": rows.tolist(),
            "all": lead is not None and len(lead) > 1,
        }
        stage = "decode" if tokens.shape[1] == 1 and start.min() > 0 else "prefill"
        shape = None if lead is None else (*lead, self.config.vocab_size // self._ranks)
        self._command(stage, command, shape=shape, tokens=tokens)
        if shape is None:
            return np.empty(0, np.float32)
        parts = [self._memory.logits(rank, shape) for rank in range(self._ranks)]
        return np.concatenate(parts, axis=-1)

    def _command(
        self,
        stage: str,
        command: Message,
        *,
        shape: tuple[int, ...] | None,
        tokens: NDArray[np.int64] | None = None,
    ) -> None:
        """Have all ranks do something, with tokens or without; their logits are of a shape."""
        if self._crew.ended:
            raise RequestError("the ranks of this session were ended; open another session")
        self._steps += 1
        self._crew.doing = f"in {stage} (step {self._steps})"
        with self._crew.ended_by_errors():
            if tokens is not None:
                self._memory.tokens(tokens.shape)[:] = tokens
            self._crew.tell(command)
            self._serve({"say": "done", "shape": shape and list(shape)}, "ended its step")

    def _serve(
        self, end: Message, last: str, on_end: Callable[[int], None] = lambda count: None
    ) -> Message:
        """Give the ranks what they ask for until all say `end`, which is what they did `last`.

        Returns:
            What they said, with what it holds beside `end`.
        """
        while (message := self._agreed(on_end))["say"] in MEETINGS:
            if message["say"] == "sum":
                self._add(tuple(message["shape"]))
            self._note(f"had {meeting(message)}")
            self._crew.tell({"data": message.get("data")})
        if not end.items() <= message.items():
            raise self._crew.fault(
                0, f"{_told(message)}, where it should say that it {_told(end)}"
            )
        self._note(last)
        return message

    def _agreed(self, on_end: Callable[[int], None]) -> Message:
        """Return the next message of rank 0, which must be the one of all; data are only its."""
        messages: dict[int, Message] = {}
        with contextlib.closing(self._crew.hear()) as heard:
            for rank, message in heard:
                messages[rank] = message
                other, first = next(iter(messages.items()))
                if message | {"data": None} != first | {"data": None}:
                    raise self._crew.fault(
                        rank,
                        f"does not agree with rank {other}: "
                        f"it {_told(message)}, the other {_told(first)}",
                    )
                if message["say"] not in MEETINGS:
                    on_end(1)
        return messages[0]

    def _add(self, shape: tuple[int, ...]) -> None:
        room = self._memory.sizes.stream
        if math.prod(shape) > room:
            raise self._crew.fault(0, f"asks for a sum of {list(shape)}, beyond {room} numbers")
        self._memory.add(shape)

    def _note(self, last: str) -> None:
        for worker in self._crew.workers:
            worker.last = last


def _told(message: Message) -> str:
    if message["say"] in MEETINGS:
        return f"asks for {meeting(message)} {message.get('shape', '')}".rstrip()
    if message["say"] == "done":
        return f"gives logits {message['shape']}" if message["shape"] else "gives no logits"
    return "is ready"
