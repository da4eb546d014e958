"""Requests drawn by chance, and what each is answered with nothing else running: the oracle."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from export_grok.runtime.conversation import Conversation
from export_grok.runtime.handle import Handle, Result
from export_grok.runtime.model import Model, Prompt
from export_grok.runtime.params import GenerationParams

__all__ = ["PATIENCE", "Case", "Say", "Turn", "drawn_cases", "on_cases", "said"]

TEXT = (
    "In the beginning was made light and darkness was upon waters of earth, and he said unto "
    "them: wisdom is better than rubies; the words of wise men are as goads! Why? "
    "café Ελλάδα 曲 👍"
)
WORDS = TEXT.split()
STOPS = ("and", "the ", ", ", ".", "LORD", "ing", "e of t")
SHARED_PREFIXES = 4
PATIENCE = 120.0  # seconds for an answer; beyond that the request is lost
CONVERSATIONS = 0.15  # part of all cases

Say = Callable[[Prompt, GenerationParams], Handle]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One thing that is asked.

    Attributes:
        prompt: text or token ids; behind the first turn of a conversation, text.
        rewind: so many turns are taken back before it.
        alone: what it is answered with nothing else running.
    """

    prompt: Prompt
    params: GenerationParams
    rewind: int = 0
    alone: Result | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request of one turn, or a conversation."""

    turns: tuple[Turn, ...]

    @property
    def is_conversation(self) -> bool:
        """Whether it has more than one turn."""
        return len(self.turns) > 1


def drawn_cases(model: Model, count: int, random: Random) -> list[Case]:
    """Return requests of every kind, each with its answer alone."""
    prefixes = [_ids(model, random, _share(model, random, 0.5)) for _ in range(SHARED_PREFIXES)]
    cases = []
    for _ in range(count):
        if random.random() < CONVERSATIONS:
            turns = _conversation(model, random)
        else:
            turns = [
                Turn(
                    prompt=_prompt(model, random, prefixes),
                    params=_params(random, _length(random, model.max_length // 3)),
                )
            ]
        cases.append(on_cases(model, Case(turns=tuple(turns))))
    return cases


def on_cases(model: Model, case: Case) -> Case:
    """Return the case with the answers that the model gives now."""
    answered = []
    with said(model, case) as say:
        for turn in case.turns:
            answered.append(dataclasses.replace(turn, alone=say(turn).result(PATIENCE)))
    return Case(turns=tuple(answered))


@contextmanager
def said(model: Model, case: Case) -> Iterator[Callable[[Turn], Handle]]:
    """Give the way to ask for the turns of a case, one after the other."""
    if not case.is_conversation:
        yield lambda turn: model.submit(turn.prompt, turn.params, wait=True)
        return
    chat: Conversation = model.conversation()

    def say(turn: Turn) -> Handle:
        chat.rewind(turn.rewind)
        return chat.say(str(turn.prompt), turn.params)

    yield say


def _conversation(model: Model, random: Random) -> list[Turn]:
    """Return turns that fit the cache together, whatever is answered."""
    count = random.randint(2, 4)
    most = model.max_length // (2 * count)
    turns = []
    for number in range(count):
        text = _text(model, random, random.randint(1, most))
        rewind = random.choice((0, 0, 1)) if number > 1 else 0
        turns.append(Turn(prompt=text, params=_params(random, most), rewind=rewind))
    return turns


def _prompt(model: Model, random: Random, prefixes: list[list[int]]) -> Prompt:
    kind = random.random()
    length = _share(model, random, 0.95)
    if kind < 0.3:
        return _text(model, random, length)
    if kind < 0.6:
        prefix = random.choice(prefixes)
        return [*prefix, *_ids(model, random, random.randint(1, 40))]
    if kind < 0.65:
        return _ids(model, random, model.max_length - random.randint(1, 3))
    return _ids(model, random, length)


def _share(model: Model, random: Random, most: float) -> int:
    """Return a length: many are short, some nearly as long as the cache."""
    return max(1, int(model.max_length * most * random.random() ** 2))


def _length(random: Random, mean: int) -> int | None:
    if random.random() < 0.02:
        return None  # as long as the cache allows
    return 1 + int(random.expovariate(1 / mean))


def _ids(model: Model, random: Random, length: int) -> list[int]:
    return [random.randrange(model.config.vocab_size) for _ in range(length)]


def _text(model: Model, random: Random, length: int) -> str:
    """Return words of up to so many tokens, one word at least."""
    text = random.choice(WORDS)
    while len(model.tokenizer.encode(text)) < length:
        text, before = f"{text} {random.choice(WORDS)}", text
        if len(model.tokenizer.encode(text)) > length:
            return before
    return text


def _params(random: Random, most: int | None) -> GenerationParams:
    greedy = random.random() < 0.4
    return GenerationParams(
        temperature=0 if greedy else random.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=random.choice((0, 0, 5, 40)),
        top_p=random.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=random.choice((0.0, 0.0, 0.05)),
        repetition_penalty=random.choice((1.0, 1.0, 1.1, 1.5)),
        logit_bias=random.choice(({}, {}, {2: -float("inf"), 300: 2.5})),
        seed=random.randrange(1 << 64),
        logprobs=random.choice((None, 0, 3)),
        max_new_tokens=most,
        stop=random.sample(STOPS, random.choice((0, 0, 0, 1, 2))),
        ignore_eos=random.random() < 0.2,
    )
