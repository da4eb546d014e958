"""All processes of a group: started together, told and heard together, ended together."""

import contextlib
import selectors
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from time import monotonic

from export_grok import errors
from export_grok.errors import ExportGrokError, RankError
from export_grok.runtime.ranks.channel import Message
from export_grok.runtime.ranks.watch import Patience, Watch
from export_grok.runtime.ranks.worker import Worker

__all__ = ["MEETINGS", "Crew", "meeting"]

# Seconds between two looks at those that are late.
LOOK = 0.25

# What ranks say to meet at a place, where they get an answer.
MEETINGS = ("sum", "data")

_Heard = Mapping[int, Message]


class Crew:
    """The processes of all ranks. What goes wrong with one is one error, and ends them all.

    They are ended by `end`, at the latest when this object or the program comes to its end.

    Args:
        specs: the first message for each.
        memory_file: that they share.
        patience: with each.

    Attributes:
        workers: by rank.
        doing: what they were told to do, in words, e.g. "in decode (step 3)".
    """

    def __init__(self, specs: Sequence[Message], memory_file: int, patience: Patience) -> None:
        self.workers: list[Worker] = []
        self.doing = "at its start"
        self._patience = patience
        self._selector = selectors.DefaultSelector()
        self._end = weakref.finalize(self, _end, self.workers, self._selector)
        with self.ended_by_errors():
            for rank, spec in enumerate(specs):
                worker = Worker(rank, memory_file)
                self.workers.append(worker)
                for source in (worker.channel, worker.output):
                    self._selector.register(source, selectors.EVENT_READ, worker)
                self._send(worker, spec)

    @property
    def ended(self) -> bool:
        """Whether they were ended."""
        return not self._end.alive

    def end(self) -> None:
        """Kill all processes and wait until they are gone; nothing if that was done."""
        self._end()

    @contextlib.contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """End all processes if the block ends by an error, or by Ctrl-C."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def tell(self, message: Message) -> None:
        """Send a message to every rank.

        Raises:
            RankError: one is dead.
        """
        for worker in self.workers:
            self._send(worker, message)

    def hear(self) -> Generator[tuple[int, Message]]:
        """Yield the next message of every rank, with its number, as they come.

        Raises:
            ExportGrokError: a rank ended by an error of this class.
            RankError: one died, stalls, does not come in time, or speaks nonsense.
        """
        heard: dict[int, Message] = {}
        watches: dict[int, Watch] = {}
        next_look = monotonic() + LOOK
        while len(heard) < len(self.workers):
            for key, _ in self._selector.select(LOOK):
                worker: Worker = key.data
                if key.fileobj is not worker.channel:
                    if not worker.listen():
                        self._selector.unregister(worker.output)
                    continue
                message = self._receive(worker, heard)
                heard[worker.rank] = message
                yield worker.rank, message
            now = monotonic()
            if now >= next_look:
                next_look = now + LOOK
                self._look(heard, watches, now)

    def fault(self, rank: int, what: str, heard: _Heard | None = None) -> RankError:
        """Return the error of a rank.

        Args:
            rank: its number.
            what: it did, or did not.
            heard: the messages of those that are not late.
        """
        worker = self.workers[rank]
        heard = heard or {}
        waits = {other: meeting(told) for other, told in heard.items() if "where" in told}
        place = ""
        if rank in waits:
            place = f", waiting for {waits[rank]}"
        elif waits:
            place = f", on its way to {next(iter(waits.values()))}"
        words = worker.last_words()
        return RankError(
            f"rank {rank} of {len(self.workers)} {what}, {self.doing}{place}; before, it "
            f"{worker.last}"
            + (f". Its last words: {words}" if words else "")
            + ". All ranks were ended; run the command again, with --debug for all they print",
            rank=rank,
        )

    def _send(self, worker: Worker, message: Message) -> None:
        try:
            worker.channel.send(message)
        except OSError as error:
            raise self._death(worker, {}) from error

    def _receive(self, worker: Worker, heard: _Heard) -> Message:
        try:
            message = worker.channel.receive()
        except ValueError as error:
            raise self.fault(worker.rank, f"sent what is no message ({error})", heard) from error
        if message is None:
            raise self._death(worker, heard)
        if message.get("say") == "error":
            raise self._told_error(worker, message, heard)
        if worker.rank in heard or not _is_known(message):
            raise self.fault(
                worker.rank, f"sent an unexpected message ({str(message)[:200]})", heard
            )
        return message

    def _death(self, worker: Worker, heard: _Heard) -> RankError:
        ending = worker.ending()
        if ending.endswith("SIGKILL"):
            ending += " (by somebody, or for want of memory: see dmesg)"
        return self.fault(worker.rank, ending, heard)

    def _told_error(self, worker: Worker, message: Message, heard: _Heard) -> ExportGrokError:
        """Return the error that a rank ended by, as this process would have raised it."""
        kind = getattr(errors, str(message.get("kind")), None)
        text = str(message.get("text"))
        if isinstance(kind, type) and issubclass(kind, ExportGrokError) and kind is not RankError:
            return kind(f"rank {worker.rank}: {text}")
        worker.forget_words()  # they are the traceback of the same error
        return self.fault(worker.rank, f"failed ({' '.join(text.split())})", heard)

    def _look(self, heard: _Heard, watches: dict[int, Watch], now: float) -> None:
        complaints: dict[int, str] = {}
        for worker in self.workers:
            if worker.rank in heard:
                continue
            if worker.rank not in watches:
                watches[worker.rank] = Watch(worker.pid, self._patience, now)
            complaint = watches[worker.rank].complaint(now)
            if complaint is not None:
                complaints[worker.rank] = complaint
        if complaints:
            # One that is stopped may be what the others wait for.
            rank = min(complaints, key=lambda rank: not watches[rank].stopped)
            raise self.fault(rank, complaints[rank], heard)


def meeting(message: Message) -> str:
    """Return in words what a rank waits for."""
    where: str = message["where"]
    return f"the sum of {where}" if message["say"] == "sum" else where


def _is_known(message: Message) -> bool:
    """Return whether a message is one that a rank may send."""
    say, shape = message.get("say"), message.get("shape")
    shaped = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if say in MEETINGS:
        data = message.get("data")
        whole = shaped if say == "sum" else data is None or isinstance(data, str)
        return whole and isinstance(message.get("where"), str)
    if say == "ready":
        return type(message.get("prefill_rows")) is int
    return say == "done" and (shaped or shape is None)


def _end(workers: Sequence[Worker], selector: selectors.BaseSelector) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.reap()
    selector.close()
