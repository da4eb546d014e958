"""Requests as lines of JSON: what each asks for, held to the model and to the fields there are."""

import codecs
import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from export_grok.errors import RequestError
from export_grok.progress import progress_bar
from export_grok.runtime.jsonl.keys import Keys
from export_grok.runtime.jsonl.source import Source
from export_grok.runtime.model_to_load import ModelToLoad, Reach
from export_grok.runtime.params import GenerationParams

__all__ = ["LineRequest", "Requests"]

PARAMETERS = tuple(field.name for field in dataclasses.fields(GenerationParams))
FIELDS = ("id", "prompt", "tokens", *PARAMETERS)

# Lines with faults that one message names, and unknown fields of a line; of the others it gives
# the number.
NAMED = 100
NAMED_FIELDS = 10
# Characters that it has for one line: what is wrong may be a value of megabytes.
MOST_SAID = 1000


@dataclass(frozen=True, kw_only=True)
class LineRequest:
    """What one line asks for.

    Attributes:
        number: of the line, from 1.
        id: that the user gave it, if any.
        tokens: of its prompt.
        params: its own, the defaults where it has none.
        reach: how far it goes.
    """

    number: int
    id: str | int | None
    tokens: tuple[int, ...]
    params: GenerationParams
    reach: Reach


class Requests:
    """All requests of a file. They are read again each time: none is kept.

    Args:
        source: of the lines.
        model: that they are for.
        defaults: parameters of a line that does not say its own. Their seed is that of line 1;
            line n has n - 1 more.
    """

    def __init__(self, source: Source, model: ModelToLoad, defaults: GenerationParams) -> None:
        self._source = source
        self._model = model
        self._defaults = defaults

    def check(self, keys: Keys) -> Reach:
        """Check all requests, add their keys, and return how far they go.

        Raises:
            RequestError: lines are wrong; all faults are told, with the numbers of their lines.
        """
        reach = Reach.over([])
        faults: list[str] = []
        wrong = 0
        with progress_bar("checking", self._source.nbytes, unit="bytes") as advance:
            for number, line in self._source:
                advance(len(line) + 1)
                keys.add(number, line)
                try:
                    reach = Reach.over([reach, self._read(number, line).reach])
                except RequestError as error:
                    wrong += 1
                    if wrong <= NAMED:
                        faults.append(f"line {number}: {_cut(str(error))}")
        if wrong > NAMED:
            faults.append(f"and {wrong - NAMED} more")
        if faults:
            said = "1 line is" if wrong == 1 else f"{wrong} lines are"
            raise RequestError(
                "\n  ".join([f"{said} wrong in {self._source.name}; nothing was run:", *faults])
            )
        return reach

    def without(self, keys: Keys, answered: Callable[[int], bool]) -> Iterator[LineRequest]:
        """Yield the requests whose lines are not answered, by number.

        Raises:
            RequestError: the file has changed since it was checked.
        """
        for number, line in self._source:
            if keys.of(number, line) != keys.get(number):
                raise RequestError(
                    f"{self._source.name} has changed at line {number} since it was checked; "
                    "run the command again"
                )
            if not answered(number):
                yield self._read(number, line)

    def _read(self, number: int, line: bytes) -> LineRequest:
        values = _object(number, line)
        unknown = [key for key in values if key not in FIELDS]
        faults = list(map(_unknown, unknown[:NAMED_FIELDS]))
        if len(unknown) > NAMED_FIELDS:
            faults.append(f"{len(unknown) - NAMED_FIELDS} more unknown fields")
        tokens = self._collected(faults, lambda: self._tokens(values)) or ()
        name = self._collected(faults, lambda: _id(values))
        params = self._collected(faults, lambda: self._params(number, values))
        if params is None or faults:
            raise RequestError("; ".join(faults))
        reach = self._model.check(tokens, params, "the prompt")
        return LineRequest(number=number, id=name, tokens=tokens, params=params, reach=reach)

    @staticmethod
    def _collected(faults: list[str], read: Callable[[], Any]) -> Any:
        try:
            return read()
        except RequestError as error:
            faults.append(str(error))
            return None

    def _tokens(self, values: dict[str, Any]) -> tuple[int, ...]:
        if ("prompt" in values) == ("tokens" in values):
            said = "both prompt and tokens" if "prompt" in values else "neither prompt nor tokens"
            raise RequestError(f"it has {said}; give one of them")
        if "tokens" in values:
            tokens = values["tokens"]
            # True is an int.
            if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
                raise RequestError("tokens must be a list of token ids, whole numbers")
            return tuple(tokens)
        if not isinstance(values["prompt"], str):
            raise RequestError(f"prompt is {values['prompt']!r:.40}; it must be a text")
        return tuple(self._model.tokenizer.encode(values["prompt"]))

    def _params(self, number: int, values: dict[str, Any]) -> GenerationParams:
        given = {name: values[name] for name in PARAMETERS if name in values}
        given.setdefault("seed", self._defaults.seed + number - 1)
        if isinstance(given.get("logit_bias"), dict):  # JSON has texts for keys
            given["logit_bias"] = {_number(key): v for key, v in given["logit_bias"].items()}
        return dataclasses.replace(self._defaults, **given)


def _object(number: int, line: bytes) -> dict[str, Any]:
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        values = json.loads(line.decode(), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise RequestError(f"it is no UTF-8 at byte {error.start}") from error
    except (RecursionError, ValueError) as error:
        raise RequestError(f"it is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"it is a {type(values).__name__}; it must be an object")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r:.40} stands there twice")
    return values


def _cut(said: str) -> str:
    """Return it, if it is too long its ends: behind a value stands what would be right."""
    half = MOST_SAID // 2
    return said if len(said) <= MOST_SAID else f"{said[:half]} ... {said[-half:]}"


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, FIELDS, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FIELDS)}"
    return f"unknown field {key!r:.40}, {advice}"


def _id(values: dict[str, Any]) -> str | int | None:
    name = values.get("id")
    if name is None or type(name) is int:
        return name
    if not isinstance(name, str):
        raise RequestError(f"id is {name!r:.40}; it must be a text or a whole number")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RequestError("id has half of a surrogate pair; it must be Unicode text") from error
    return name


def _number(key: str) -> int | str:
    """Return the token id that a key is; the key itself for who refuses it with its value."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 20 else key
