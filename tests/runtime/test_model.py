"""A model: prompts from any thread, pieces as they come, an end for each, whatever happens."""

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.errors import (
    BundleError,
    ConfigError,
    ExportGrokError,
    RequestError,
)
from export_grok.runtime import GenerationParams, Piece, load
from tests.bundles import BundleOf
from tests.runtime.fake_model import StoppedSession, model_of, session_of

PROMPTS = ["The lamp", "On the second night the wind", "é"]
SHORT = GenerationParams(max_new_tokens=6, ignore_eos=True)
LONG = GenerationParams(ignore_eos=True)


def saying(bundle: Bundle, answer: Sequence[int]) -> Callable[..., NDArray[np.float32]]:
    """Return logits that answer every prompt of one token with these tokens, then the end."""

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        said = [*answer, bundle.config.eos_token]
        logits = np.zeros(vocabulary, np.float32)
        logits[said[min(len(tokens) - 1, len(answer))]] = 1
        return logits

    return logits_of


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


# Answers.


def test_answers_come_in_the_order_of_the_prompts(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        results = model.generate(PROMPTS * 3, SHORT)
        alone = [model.generate(prompt, SHORT)[0] for prompt in PROMPTS]
    assert [result.tokens for result in results] == [result.tokens for result in alone] * 3
    for prompt, result in zip(PROMPTS * 3, results, strict=True):
        assert result.prompt_tokens == tuple(model.tokenizer.encode(prompt))
        assert result.finish_reason == "length"
        assert result.usage.new_tokens == len(result.tokens) == 6


def test_a_text_is_one_prompt_and_ids_are_as_good(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        (text,) = model.generate("The lamp", SHORT)
        (ids,) = model.generate([model.tokenizer.encode("The lamp")], SHORT)
        assert text.tokens == ids.tokens
        assert model.generate([], SHORT) == []


def test_each_prompt_may_have_its_own_params(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        each = [GenerationParams(max_new_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
        results = model.generate(PROMPTS, each)
        assert [len(result.tokens) for result in results] == [1, 2, 3]
        with pytest.raises(RequestError, match="3 prompts have 2 params"):
            model.generate(PROMPTS, each[:2])


def test_the_pieces_joined_are_the_text_of_the_result(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        handle = model.submit("The lamp", LONG)
        pieces = list(handle)
        assert text_of(pieces) == handle.result().text
        assert [piece.token for piece in pieces] == list(handle.result().tokens)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert list(handle) == pieces  # from the first on, however often


def test_pieces_can_be_had_before_the_answer_has_ended(
    demo: Bundle, stopped: StoppedSession
) -> None:
    with model_of(demo, stopped) as model:
        handle = model.submit("The lamp", SHORT)
        stopped.let(1)
        pieces = iter(handle)
        assert next(pieces).token is not None
        assert not handle.done
        assert handle.usage.new_tokens == 1
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        stopped.let_all()
        assert len(list(pieces)) == 5


def test_characters_are_whole_and_the_end_token_has_no_text(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        ids = model.tokenizer.encode("日本語 👩‍👩‍👧 é")
    with model_of(demo, session_of(demo, logits_of=saying(demo, ids))) as model:
        pieces = list(model.stream([5]))
    assert text_of(pieces).strip() == "日本語 👩‍👩‍👧 é"
    assert not [piece for piece in pieces if "\ufffd" in piece.text]
    assert pieces[-1] == Piece(text="", token=None, finish_reason="stop")


def test_a_stop_string_ends_the_answer_and_is_not_shown(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        ids = model.tokenizer.encode("one two three four")
    session = session_of(demo, logits_of=saying(demo, ids))
    with model_of(demo, session) as model:
        params = GenerationParams(stop=("o th",))
        handle = model.submit([5], params)
        result = handle.result()
        assert result.text.strip() == "one tw"
        assert result.finish_reason == "stop"
        assert text_of(list(handle)) == result.text
        assert len(result.tokens) < len(ids)  # it was not computed to its end
        assert model.current_load().running == 0


def test_logprobs_are_those_of_each_token(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        params = GenerationParams(max_new_tokens=3, logprobs=1, ignore_eos=True)
        (result,) = model.generate("The lamp", params)
        assert result.logprobs is not None
        assert [each.top[0].token for each in result.logprobs] == list(result.tokens)
        assert model.generate("The lamp", SHORT)[0].logprobs is None


def test_a_bundle_without_a_tokenizer_answers_in_tokens(bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny")
    with load(bundle.folder, batch=1, max_length=20) as model:
        (result,) = model.generate([[5, 6, 7]], SHORT)
        assert (len(result.tokens), result.text) == (6, "")
        with pytest.raises(BundleError, match=r"tokenizer\.model"):
            model.generate("text", SHORT)
        with pytest.raises(BundleError, match="stop strings"):
            model.generate([[5]], GenerationParams(stop=("a",)))


# The limit of the cache.


@pytest.mark.parametrize(("tokens", "new"), [(62, 2), (63, 1)])
def test_prompt_and_answer_together_fill_the_cache_and_no_more(
    demo: Bundle, tokens: int, new: int
) -> None:
    with model_of(demo, session_of(demo, max_length=64)) as model:
        (result,) = model.generate([[5] * tokens], LONG)
        assert (len(result.tokens), result.finish_reason) == (new, "length")


@pytest.mark.parametrize("tokens", [64, 65, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(demo: Bundle, tokens: int) -> None:
    with model_of(demo, session_of(demo, max_length=64)) as model:
        with pytest.raises(RequestError, match=f"the prompt has {tokens} tokens; a cache of 64"):
            model.submit([5] * tokens)
        assert model.current_load().waiting == 0


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([1, 1024], "1024"),
        ([-1], "-1"),
        (5, "a single token"),
    ],
)
def test_a_prompt_that_is_none_is_refused(demo: Bundle, prompt: Any, told: str) -> None:
    with model_of(demo, session_of(demo)) as model, pytest.raises(RequestError, match=told):
        model.submit(prompt)


def test_a_bias_on_a_token_the_model_does_not_know_is_refused(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model, pytest.raises(RequestError, match="5000"):
        model.submit("a", GenerationParams(logit_bias={5000: 1.0}))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_length": 1}, "max_length is 1; this model takes 2 to 256"),
        ({"max_length": 257}, "max_length is 257"),
        ({"batch": 0}, "batch is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"max_waiting_tokens": 0}, "max_waiting_tokens is 0"),
        ({"tensor_parallel": 2}, "--tp 2"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(
    demo: Bundle, options: dict[str, Any], told: str
) -> None:
    with pytest.raises((RequestError, ConfigError), match=told):
        load(demo.folder, **options)
    assert "export-grok engine" not in {thread.name for thread in threading.enumerate()}


def test_a_bundle_that_does_not_load_is_refused_where_it_is_loaded(
    demo: Bundle, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(demo.folder, folder)
    for graph in folder.glob("layer_01*.onnx"):
        graph.write_bytes(graph.read_bytes()[:-20])
    with pytest.raises(ExportGrokError, match="layer_01"):
        load(folder)
