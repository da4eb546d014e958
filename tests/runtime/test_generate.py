"""Text in, text out: the pieces joined are the answer, and none holds half a character."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import EngineOptions
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import BundleError, ConfigError, ExportGrokError, RequestError
from export_grok.runtime import generate as generate_module
from export_grok.runtime.answers import print_answers
from export_grok.runtime.generate import Piece, Usage, stream, tokenizer_of
from export_grok.runtime.params import SamplingParams
from tests.bundles import BundleOf, checkpoint_copy
from tests.runtime.fake_session import FakeSession

PROMPTS = ["The lamp", "On the second night the wind", "é"]


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    return bundle_of("demo")


def texts(pieces: Sequence[Piece], rows: int) -> list[str]:
    return ["".join(piece.text for piece in pieces if piece.row == row) for row in range(rows)]


def tokens_of(pieces: Sequence[Piece], row: int) -> list[int]:
    return [piece.token for piece in pieces if piece.row == row and piece.token is not None]


def check_pieces(bundle: Bundle, prompts: Sequence[str], pieces: Sequence[Piece]) -> None:
    """Hold the pieces to the tokenizer's own decoding of prompt and answer."""
    tokenizer = tokenizer_of(bundle)
    for row, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        whole = tokenizer.decode([*ids, *tokens_of(pieces, row)])
        assert whole == tokenizer.decode(ids) + texts(pieces, len(prompts))[row]
        shown = tokenizer.decode(ids)
        for piece in pieces:
            if piece.row == row:
                shown += piece.text
                assert whole.startswith(shown)  # nothing shown is taken back
    ends = [piece.row for piece in pieces if piece.finished]
    assert sorted(ends) == list(range(len(prompts)))


def speaking(
    monkeypatch: pytest.MonkeyPatch, bundle: Bundle, answers: Sequence[Sequence[int]]
) -> list[FakeSession]:
    """Let a fake session answer PROMPTS with these tokens; return the list of those it opens."""
    tokenizer = tokenizer_of(bundle)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary, np.float32)
        for prompt, answer in zip(prompts, answers, strict=True):
            if tokens[: len(prompt)] == prompt:
                said = [*answer, bundle.config.eos_token]
                logits[said[min(len(tokens) - len(prompt), len(answer))]] = 1
        return logits

    opened: list[FakeSession] = []

    @contextmanager
    def open_fake(
        bundle: Bundle, *, batch: int, max_length: int, **_: Any
    ) -> Iterator[FakeSession]:
        opened.append(
            FakeSession(bundle.config, batch=batch, max_length=max_length, logits_of=logits_of)
        )
        yield opened[-1]

    monkeypatch.setattr(generate_module, "open_session", open_fake)
    return opened


# Pieces.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_pieces_joined_are_the_decoded_answer(demo: Bundle, temperature: float) -> None:
    sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    pieces = list(stream(demo.folder, PROMPTS, sampling=sampling, max_new_tokens=24))
    check_pieces(demo, PROMPTS, pieces)
    assert max(len(tokens_of(pieces, row)) for row in range(3)) == 24


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_together_are_answered_as_alone(demo: Bundle, temperature: float) -> None:
    sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    together = list(stream(demo.folder, PROMPTS, sampling=sampling, max_new_tokens=12))
    for row, prompt in enumerate(PROMPTS):
        alone = list(stream(demo.folder, [prompt], sampling=sampling[row], max_new_tokens=12))
        assert tokens_of(alone, 0) == tokens_of(together, row)
        assert texts(alone, 1)[0] == texts(together, 3)[row]


def test_one_sampling_serves_all_prompts(demo: Bundle) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    one = list(stream(demo.folder, PROMPTS, sampling=params, max_new_tokens=6))
    each = list(stream(demo.folder, PROMPTS, sampling=[params] * 3, max_new_tokens=6))
    assert one == each
    assert one != list(stream(demo.folder, PROMPTS, max_new_tokens=6))


ANSWERS = ["naïve 👩‍🚀 and Ω.", "", "日本語"]


def test_no_piece_holds_half_a_character(demo: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(demo)
    ids = [tokenizer.encode(answer) for answer in ANSWERS]
    assert len(ids[2]) > len(ANSWERS[2])  # characters of several tokens
    speaking(monkeypatch, demo, ids)
    pieces = list(stream(demo.folder, PROMPTS))
    check_pieces(demo, PROMPTS, pieces)
    assert not [piece for piece in pieces if "\ufffd" in piece.text]
    assert [text.strip() for text in texts(pieces, 3)] == ANSWERS


def test_a_broken_character_at_the_end_is_shown_as_such(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = tokenizer_of(demo).encode("日本")[:-1]
    speaking(monkeypatch, demo, [cut, [], []])
    pieces = list(stream(demo.folder, PROMPTS))
    check_pieces(demo, PROMPTS, pieces)
    assert texts(pieces, 3)[0].strip() == "日\ufffd\ufffd"


def test_the_end_of_text_stops_and_is_not_shown(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer_of(demo).encode("a ship")
    speaking(monkeypatch, demo, [ids, [], ids])
    pieces = list(stream(demo.folder, PROMPTS))
    ends = {piece.row: (piece.token, piece.finished) for piece in pieces if piece.finished}
    assert ends == dict.fromkeys(range(3), (None, "stop"))
    assert [tokens_of(pieces, row) for row in range(3)] == [ids, [], ids]


def test_the_number_of_new_tokens_is_a_limit(demo: Bundle) -> None:
    pieces = list(stream(demo.folder, PROMPTS, max_new_tokens=1))
    assert [(piece.row, piece.finished) for piece in pieces] == [
        (row, "length") for row in range(3)
    ]


# The cache.


def test_the_cache_is_no_longer_than_the_longest_request(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = speaking(monkeypatch, demo, [[5] * 600] * 3)
    longest = max(len(tokenizer_of(demo).encode(prompt)) for prompt in PROMPTS)
    cases: list[tuple[Any, int]] = [
        ({"max_new_tokens": 4}, longest + 4),
        ({"max_new_tokens": 4, "max_length": 100}, 100),
        ({"max_new_tokens": 10_000}, demo.config.sequence_len),
        ({}, demo.config.sequence_len),
    ]
    for options, length in cases:
        pieces = list(stream(demo.folder, PROMPTS, **options))
        assert opened[-1].max_length == length
        assert opened[-1].batch == 3
        assert {piece.finished for piece in pieces} == {None, "length"}


def test_prompt_and_answer_end_with_the_cache(demo: Bundle) -> None:
    length = len(tokenizer_of(demo).encode(PROMPTS[0]))
    pieces = list(stream(demo.folder, PROMPTS[:1], max_length=length + 3))
    assert len(tokens_of(pieces, 0)) <= 3
    assert pieces[-1].finished == ("length" if len(tokens_of(pieces, 0)) == 3 else "stop")
    with pytest.raises(RequestError, match=rf"{length} tokens; a cache of {length} "):
        list(stream(demo.folder, PROMPTS[:1], max_length=length))


@pytest.mark.parametrize("length", [0, -1, 257])
def test_a_cache_longer_than_the_model_was_trained_for_is_refused(
    demo: Bundle, length: int
) -> None:
    with pytest.raises(RequestError, match=f"max_length is {length}; this model takes 1 to 256"):
        list(stream(demo.folder, PROMPTS, max_length=length))


# Usage.


def test_usage_is_told_once_at_the_end(demo: Bundle) -> None:
    told: list[Usage] = []
    pieces = []
    for piece in stream(demo.folder, PROMPTS, max_new_tokens=5, on_usage=told.append):
        assert not told
        pieces.append(piece)
    (usage,) = told
    made = sum(piece.token is not None for piece in pieces)
    assert usage.decoded_tokens == made - 3
    assert min(usage.load_seconds, usage.prefill_seconds, usage.decode_seconds) >= 0
    assert usage.tokens_per_second == usage.decoded_tokens / usage.decode_seconds


def test_without_a_second_token_there_is_no_speed(demo: Bundle) -> None:
    told: list[Usage] = []
    list(stream(demo.folder, PROMPTS, max_new_tokens=1, on_usage=told.append))
    assert (told[0].decoded_tokens, told[0].tokens_per_second) == (0, 0.0)


def test_rows_that_stop_at_once_take_nothing_from_the_count(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaking(monkeypatch, demo, [[5, 6, 7, 8], [], []])
    told: list[Usage] = []
    list(stream(demo.folder, PROMPTS, on_usage=told.append))
    assert told[0].decoded_tokens == 3  # after the first of the only row that has one


# What is refused.


def refusal(kind: type[ExportGrokError], call: Callable[[], Iterator[Piece]]) -> str:
    with pytest.raises(kind) as error:
        list(call())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_empty_prompt_is_refused(demo: Bundle) -> None:
    assert "no tokens" in refusal(RequestError, lambda: stream(demo.folder, ["a", ""]))


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 3}, {"max_length": 9}])
def test_no_prompt_at_all_is_refused(demo: Bundle, options: Any) -> None:
    assert "prompt" in refusal(RequestError, lambda: stream(demo.folder, [], **options))


def test_a_prompt_longer_than_the_model_was_trained_for_is_refused(demo: Bundle) -> None:
    told = refusal(RequestError, lambda: stream(demo.folder, ["ship " * 600], max_new_tokens=2))
    assert "a cache of 256" in told


def test_a_bundle_without_a_tokenizer_is_refused(bundle_of: BundleOf) -> None:
    told = refusal(BundleError, lambda: stream(bundle_of("tiny").folder, ["a"]))
    assert "tokenizer.model" in told


@pytest.mark.usefixtures("traced_once")
def test_the_tokenizer_of_another_model_is_refused_with_both_numbers(
    demo: Bundle, tmp_path: Path
) -> None:
    checkpoint = checkpoint_copy("deep13", tmp_path / "checkpoint")
    assert demo.tokenizer is not None
    shutil.copy(demo.tokenizer, checkpoint)
    bundle = engine_from_source(
        checkpoint, tmp_path / "bundle", backend="ort", engine=EngineOptions(allow_functions=True)
    )
    told = refusal(BundleError, lambda: stream(bundle.folder, ["a"]))
    assert str(tokenizer_of(demo).vocab_size) in told
    assert "256" in told


def test_a_tokenizer_with_fewer_pieces_than_the_model_is_taken(demo: Bundle) -> None:
    config = dataclasses.replace(demo.config, vocab_size=tokenizer_of(demo).vocab_size + 1)
    larger = dataclasses.replace(demo, manifest=dataclasses.replace(demo.manifest, config=config))
    assert tokenizer_of(larger).encode("a") == tokenizer_of(demo).encode("a")


def test_graphs_without_an_engine_and_no_folder_are_refused(tmp_path: Path) -> None:
    assert "build-engine" in refusal(BundleError, lambda: stream(tmp_path, ["a"]))
    assert "no folder" in refusal(BundleError, lambda: stream(tmp_path / "none", ["a"]))


def test_weights_that_were_moved_are_taken_from_where_they_are_said_to_be(
    demo: Bundle, tmp_path: Path
) -> None:
    folder, weights = tmp_path / "a" / "bundle", tmp_path / "b"
    shutil.copytree(demo.folder, folder)
    shutil.copytree(demo.weights_root, weights)
    options: dict[str, Any] = {"max_new_tokens": 4}
    wanted = list(stream(demo.folder, PROMPTS, **options))
    assert list(stream(folder, PROMPTS, weights_root=weights, **options)) == wanted
    with pytest.raises(BundleError, match="--weights-root"):
        list(stream(folder, PROMPTS, weights_root=tmp_path / "nowhere", **options))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_answer(demo: Bundle, threads: int) -> None:
    wanted = list(stream(demo.folder, PROMPTS, max_new_tokens=6))
    assert list(stream(demo.folder, PROMPTS, max_new_tokens=6, threads=threads)) == wanted


# On a terminal.


def scripted(pieces: Sequence[Piece]) -> Callable[[Callable[[Usage], None]], Iterator[Piece]]:
    def run(on_usage: Callable[[Usage], None]) -> Iterator[Piece]:
        yield from pieces
        on_usage(
            Usage(load_seconds=1.0, prefill_seconds=2.0, decode_seconds=4.0, decoded_tokens=2)
        )

    return run


SCRIPT = [
    Piece(row=0, text=" one", token=5, finished=None),
    Piece(row=1, text=" eins", token=7, finished=None),
    Piece(row=0, text=" two", token=6, finished="length"),
    Piece(row=1, text="", token=None, finished="stop"),
]


def test_answers_are_printed_and_the_usage_apart_from_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_answers(["a", "b"], scripted(SCRIPT), as_json=False)
    out, err = capsys.readouterr()
    assert out == " one two\n\n eins\n"
    assert "2 tokens (length), 1 tokens (stop); 0.5 tokens/s" in err


def test_answers_are_printed_as_one_object_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    print_answers(["a", "é"], scripted(SCRIPT), as_json=True)
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["text"], first["tokens"], first["finish_reason"]) == (
        " one two",
        [5, 6],
        "length",
    )
    assert (second["prompt"], second["tokens"], second["finish_reason"]) == ("é", [7], "stop")
    assert err == ""


def test_a_number_of_threads_below_one_is_refused(demo: Bundle) -> None:
    told = refusal(ConfigError, lambda: stream(demo.folder, ["a"], threads=0))
    assert "threads is 0" in told
