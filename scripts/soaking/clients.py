"""Clients that load a model: they wait, stream, cancel, walk away, converse, come too often."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from export_grok.errors import BusyError
from export_grok.runtime.handle import Handle, Piece
from export_grok.runtime.model import Model
from scripts.soaking.cases import PATIENCE, Case, Turn, said
from scripts.soaking.compare import Answers

__all__ = ["Client"]

LONGEST_WAIT = 0.3  # before a request is cancelled
CANCELLED_TURNS = 0.05  # part of all turns of conversations


@dataclass
class Client:
    """Asks one thing after the other until it is time.

    Attributes:
        model: that is loaded.
        cases: to choose from.
        answers: take what comes.
        random: decides everything.
        ends: when to begin nothing more, by `time.monotonic`.
    """

    model: Model
    cases: list[Case]
    answers: Answers
    random: Random
    ends: float

    def run(self) -> None:
        """Ask until it is time; whatever goes wrong is a fault."""
        ways: dict[Callable[[Case], None], int] = {
            self._whole: 45,
            self._streamed: 20,
            self._cancelled: 15,
            self._walked_away: 5,
            self._forgotten: 3,
            self._listed: 7,
        }
        try:
            while time.monotonic() < self.ends:
                case = self.random.choice(self.cases)
                if case.is_conversation:
                    self._conversation(case)
                else:
                    (way,) = self.random.choices(list(ways), list(ways.values()))
                    way(case)
                    self.answers.count(way.__name__.strip("_"))
                if self.random.random() < 0.1:
                    time.sleep(self.random.uniform(0, 0.05))
        except Exception as error:
            self.answers.fault(f"a client met {error!r}")

    def _whole(self, case: Case) -> None:
        handle = self._submit(case.turns[0])
        self.answers.take(case.turns[0], handle.result(PATIENCE))

    def _streamed(self, case: Case) -> None:
        handle = self._submit(case.turns[0])
        pieces = self._pieces(handle)
        self.answers.take(case.turns[0], handle.result(PATIENCE), pieces)

    def _cancelled(self, case: Case) -> None:
        handle = self._submit(case.turns[0])
        if self.random.random() < 0.5:
            time.sleep(self.random.choice((0, self.random.uniform(0, LONGEST_WAIT))))
        else:
            wanted = self.random.randint(1, 40)
            for number, _ in enumerate(handle, 1):
                if number == wanted:
                    break
        for _ in range(self.random.randint(1, 2)):
            handle.cancel()
        self.answers.take(case.turns[0], handle.result(PATIENCE), self._pieces(handle))

    def _walked_away(self, case: Case) -> None:
        """Stop reading a stream, which cancels it."""
        turn = case.turns[0]
        stream = self.model.stream(turn.prompt, turn.params)
        for _ in zip(range(self.random.randint(1, 20)), stream, strict=False):
            pass
        del stream

    def _forgotten(self, case: Case) -> None:
        """Never look at the answer, which nobody cancels."""
        self._submit(case.turns[0])

    def _listed(self, case: Case) -> None:
        single = [other for other in self.cases if not other.is_conversation]
        turns = [case.turns[0], *(self.random.choice(single).turns[0] for _ in range(3))]
        results = self.model.generate(
            [turn.prompt for turn in turns], [turn.params for turn in turns]
        )
        for turn, result in zip(turns, results, strict=True):
            self.answers.take(turn, result)

    def _conversation(self, case: Case) -> None:
        """Say all turns, unless an answer is another one: then the next turn is no more the same.

        A turn may be cancelled, taken back and said again.
        """
        with said(self.model, case) as say:
            for turn in case.turns:
                handle = say(turn)
                if self.random.random() < CANCELLED_TURNS:
                    time.sleep(self.random.uniform(0, LONGEST_WAIT))
                    handle.cancel()
                    self.answers.take(turn, handle.result(PATIENCE))
                    handle = say(dataclasses.replace(turn, rewind=1))
                if not self.answers.take(turn, handle.result(PATIENCE)):
                    return
        self.answers.count("conversation")

    def _submit(self, turn: Turn) -> Handle:
        """Submit, and as often again as the model is busy; or wait for room."""
        while self.random.random() < 0.8:
            try:
                return self.model.submit(turn.prompt, turn.params)
            except BusyError:
                self.answers.count("busy")
                time.sleep(self.random.uniform(0, 0.02))
        return self.model.submit(turn.prompt, turn.params, wait=True, timeout=PATIENCE)

    @staticmethod
    def _pieces(handle: Handle) -> list[Piece]:
        return list(handle)
