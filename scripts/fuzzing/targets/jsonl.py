"""A file of requests, and what a run that was broken off left of answers; without a model."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from export_grok.artifacts import TOKENIZER, read_bundle
from export_grok.errors import ExportGrokError, NumericsError, OutputError
from export_grok.export.demo import DEMO_MODEL
from export_grok.needs import Needs
from export_grok.runtime.handle import Handle, Piece, Result
from export_grok.runtime.jsonl.keys import Keys
from export_grok.runtime.jsonl.requests import FIELDS, PARAMETERS, LineRequest, Requests
from export_grok.runtime.jsonl.run import Answered, answer_file, part_of
from export_grok.runtime.jsonl.source import open_source
from export_grok.runtime.model_to_load import ModelToLoad
from export_grok.runtime.observer import Usage
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.sampling.adjust import adjusted
from export_grok.runtime.sampling.draw import sample
from export_grok.runtime.text.answer_text import AnswerText
from export_grok.runtime.text.tokenizer import Tokenizer
from scripts.fuzzing.edits import odd_entry
from scripts.fuzzing.files import Files, Placed
from scripts.fuzzing.line_edits import edited_lines
from scripts.fuzzing.target import Case, Target
from scripts.fuzzing.targets.bundle_files import write_bundle
from scripts.fuzzing.targets.released import SMALL

__all__ = ["RequestsTarget", "ResultsTarget"]

REQUESTS = "in.jsonl"
OUT = "out"
PART = part_of(Path(OUT)).name
LINES: tuple[Mapping[str, Any], ...] = (
    {"id": 1, "prompt": "In the beginning é 日本語"},
    {
        "tokens": [5, 6, 7],
        "id": "b",
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "logit_bias": {"4": -1.5, "900": 2},
        "seed": 3,
        "logprobs": 2,
        "max_new_tokens": 4,
        "stop": ["\n", "語 x"],
        "ignore_eos": True,
    },
    {"prompt": "x", "stop": "y", "max_new_tokens": None, "logprobs": None},
    {"prompt": "and so on", "id": None},
)
DEFAULTS = GenerationParams(temperature=0.25, seed=7)
LENGTH, VOCABULARY = 64, 1024
# What one wrong line may say at most.
MOST_SAID = 2000


class RequestsTarget(Target):
    """A file of requests: all are checked, before a model is loaded."""

    name = "requests"
    inputs: ClassVar[int] = 500

    def __init__(self, folder: Path) -> None:
        self.beside = _bundle(folder)
        self._model = _model(ModelToLoad, self.beside)
        self._outside = folder / "outside"
        self._outside.write_bytes(_lines(LINES[:1]))
        self._logits = np.random.default_rng(0).normal(size=(1, VOCABULARY)).astype(np.float32)
        self.placed = Placed(folder / "requests", {REQUESTS: _lines(LINES)})

    def edit(self, files: Files, random: Random) -> None:
        """Change a line, or what is between lines; seldom the whole file."""
        content = files.get(REQUESTS)
        if isinstance(content, bytes) and random.randrange(12):
            files[REQUESTS] = edited_lines(content, random)
        elif files:
            odd_entry(files, random, str(self._outside))

    def read(self) -> list[LineRequest]:
        """Check all requests, and read them again as for a run."""
        with open_source(self.folder / REQUESTS, self.folder) as source:
            keys, requests = Keys(b""), Requests(source, self._model, DEFAULTS)
            reach = requests.check(keys)
            found = list(requests.without(keys, lambda number: False))
        assert keys.requests == len(found)
        assert 2 <= reach.whole <= LENGTH
        return found

    def hold(self, said: list[LineRequest]) -> None:
        """See that each is what its line says, and that a token can be drawn as it wants."""
        lines = (self.folder / REQUESTS).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        wanted = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
        assert [request.number for request in said] == list(wanted)
        for request in said:
            values = json.loads(wanted[request.number].strip().decode())
            assert values.keys() <= set(FIELDS)
            assert values.get("id") == request.id
            tokens = values.get("tokens") or self._model.tokenizer.encode(values["prompt"])
            assert tuple(tokens) == request.tokens
            assert 0 < len(tokens) < LENGTH
            for name in PARAMETERS:
                default = getattr(DEFAULTS, name)
                if name == "seed":
                    default += request.number - 1
                assert getattr(request.params, name) == _of_json(name, values.get(name, default))
            AnswerText(self._model.tokenizer, tokens, request.params.stop)
            with contextlib.suppress(NumericsError):
                sample(adjusted(self._logits, [request.params], [tokens]), [request.params], [0])

    def told(self, error: ExportGrokError) -> bool:
        """Return whether file and lines are named, and not each with all that it holds."""
        where, *lines = str(error).split("\n")
        assert max(map(len, lines), default=0) < MOST_SAID, f"{len(str(error))} characters"
        return super().told(error) and ("cannot be read" in where or "line " in str(error))


class ResultsTarget(Target):
    """What is left of a run, OUT and OUT.part: the run goes on, with answers that are made up."""

    name = "results"
    inputs: ClassVar[int] = 500

    def __init__(self, folder: Path) -> None:
        self.beside = _bundle(folder)
        self._model = _model(_Instant, self.beside)
        self._outside = folder / "outside"
        self._given: Files = {}
        self.placed = Placed(folder / "results", {REQUESTS: _lines(LINES)})
        self._run()
        self._right = (self.folder / OUT).read_bytes()
        answers = self._right.splitlines(keepends=True)
        self._keys = [json.loads(line)["key"] for line in answers]
        torn = answers[2] + answers[0] + answers[3][:50]
        self.placed.whole = {REQUESTS: self.placed.whole[REQUESTS], PART: torn}
        self.leave()

    def edit(self, files: Files, random: Random) -> None:
        """Change an answer, lines, or what stands in the place of one of the two files."""
        name = random.choice((PART, PART, OUT))
        content = files.setdefault(name, self._right)
        if isinstance(content, bytes) and random.randrange(10):
            if random.randrange(4) == 0:
                content = self._right
            files[name] = edited_lines(content, random)
            return
        places = {place: files.pop(place) for place in (OUT, PART) if place in files}
        odd_entry(places, random, random.choice((str(self._outside), REQUESTS, OUT, PART)))
        files |= places

    def files_of(self, case: Case) -> Files:
        """Return the files of one input, and remember them: a run changes them."""
        self._given = super().files_of(case)
        return self._given

    def read(self) -> Answered:
        """Go on with the run; if it is refused, so that what is there is replaced."""
        try:
            return self._run()
        except OutputError:
            self._run(overwrite=True)
            self._hold_whole()
            raise

    def hold(self, said: Answered) -> None:
        """See that all answers are there, those that were there too, and nothing else is lost."""
        self._hold_whole()
        before, content = self._given.get(OUT), (self.folder / OUT).read_bytes()
        assert not (isinstance(before, bytes) and before) or content == before, "OUT is lost"
        left = before or self._given.get(PART, b"")
        if isinstance(left, bytes):
            right, found = set(self._right.split(b"\n")), left.split(b"\n")
            assert said.found >= len(right & set(found[:-1]) - {b""}), "answers are lost"
            assert right.issuperset(set(content.split(b"\n")) - set(found))
        assert said.answers == len(LINES)
        # What was there beside answers to all may be somebody's.
        assert before or not os.path.lexists(self.folder / PART), "OUT.part is left"

    def leave(self) -> None:
        """See that the requests are as they were; take away what a run has made."""
        requests = (self.folder / REQUESTS).read_bytes()
        self._outside.write_bytes(b"text of somebody's")
        self.placed.renew()
        assert requests == _lines(LINES), "the requests are lost"

    def _run(self, *, overwrite: bool = False) -> Answered:
        return answer_file(
            self._model, self.folder / REQUESTS, self.folder / OUT, DEFAULTS, overwrite=overwrite
        )

    def _hold_whole(self) -> None:
        """See that OUT has one answer to each request, in their order, and nothing else."""
        content = (self.folder / OUT).read_bytes().removesuffix(b"\n")
        found = [json.loads(line.decode()) for line in content.split(b"\n")]
        numbers = range(1, len(LINES) + 1)
        assert [record["line"] for record in found] == list(numbers)
        assert [bytes.fromhex(record["key"]).hex() for record in found] == self._keys


class _Instant(ModelToLoad):
    """A model that is loaded at once, and has answered what is submitted."""

    @contextlib.contextmanager
    def load(self, *_: Any, on_needs: Any, **__: Any) -> Iterator[Any]:  # type: ignore[override]
        on_needs(Needs())
        yield self

    def submit(self, tokens: Sequence[int], _params: Any, *, wait: bool) -> Handle:
        assert wait
        usage = Usage(prompt_tokens=len(tokens), new_tokens=1)
        handle = Handle("1", usage, lambda _: None)
        result = Result(
            id="1",
            prompt_tokens=tuple(tokens),
            text="é\n",
            tokens=(5,),
            logprobs=None,
            finish_reason="length",
            usage=usage,
            shown_tokens=1,
            shown_rest="",
        )
        handle.put(Piece(text="é\n", finish_reason="length"), usage, result=result)
        return handle


def _bundle(folder: Path) -> Path:
    """Return the folder of a new bundle of made-up graphs."""
    bundle = folder / "bundle"
    bundle.mkdir()
    (folder / "checkpoint").mkdir()
    write_bundle(bundle, folder / "checkpoint", dataclasses.replace(SMALL, vocab_size=VOCABULARY))
    return bundle


def _model(kind: type[ModelToLoad], bundle: Path) -> ModelToLoad:
    """Return what loads such a bundle, with the demo's tokenizer."""
    tokenizer = Tokenizer(DEMO_MODEL / TOKENIZER)
    return kind(bundle=read_bundle(bundle), tokenizer=tokenizer, max_length=LENGTH)


def _lines(values: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def _of_json(name: str, value: Any) -> Any:
    """Return a value of JSON as a parameter has it."""
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    return {int(key): bias for key, bias in value.items()} if name == "logit_bias" else value
