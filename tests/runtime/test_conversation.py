"""A conversation: what was said is not computed again, and can be taken back."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.errors import RequestError
from export_grok.runtime import GenerationParams
from tests.runtime.fake_model import StoppedSession, model_of, session_of

SHORT = GenerationParams(max_new_tokens=4, ignore_eos=True)


def test_a_turn_computes_only_what_is_new(demo: Bundle) -> None:
    session = session_of(demo)
    with model_of(demo, session) as model:
        chat = model.conversation()
        first = chat.say("In the beginning", SHORT).result()
        session.calls.clear()
        handle = chat.say(" and then", SHORT)
        result = handle.result()
        said = (*first.prompt_tokens, *first.tokens)
        assert result.prompt_tokens[: len(said)] == said
        # All but the last token of the answer, which nobody had fed, is there.
        assert result.usage.cached_tokens == len(said) - 1
        assert session.calls[0] == len(result.prompt_tokens) - len(said) + 1
        assert chat.turns == 2
        assert chat.tokens == (*result.prompt_tokens, *result.tokens)


def test_an_answer_is_the_one_to_all_that_was_said(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        chat = model.conversation()
        for text in ("In the beginning", " and", " then"):
            result = chat.say(text, SHORT).result()
    with model_of(demo, session_of(demo)) as fresh:
        (wanted,) = fresh.generate([result.prompt_tokens], SHORT)
    assert wanted.tokens == result.tokens
    assert wanted.usage.cached_tokens == 0


def test_turns_can_be_taken_back(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        chat = model.conversation()
        chat.say("In the beginning", SHORT).result()
        before = chat.tokens
        one = chat.say(" and", SHORT).result()
        chat.rewind()
        assert (chat.tokens, chat.turns) == (before, 1)
        again = chat.say(" and", SHORT).result()
        assert again.tokens == one.tokens
        chat.rewind(2)
        assert (chat.tokens, chat.turns) == ((), 0)
        with pytest.raises(RequestError, match=r"1 turns cannot be taken back; .* has 0"):
            chat.rewind()


def test_taking_back_a_turn_ends_its_answer(demo: Bundle) -> None:
    session = StoppedSession(demo.config, batch=1, max_length=64)
    with model_of(demo, session) as model:
        chat = model.conversation()
        handle = chat.say("In the beginning", GenerationParams(ignore_eos=True))
        session.let(2)
        next(iter(handle))
        handle.cancel()
        session.let_all()
        chat.rewind()
        assert handle.finish_reason == "cancelled"
        assert chat.tokens == ()


def test_the_part_of_a_cancelled_answer_was_said(demo: Bundle) -> None:
    session = StoppedSession(demo.config, batch=1, max_length=64)
    with model_of(demo, session) as model:
        chat = model.conversation()
        handle = chat.say("In the beginning", GenerationParams(ignore_eos=True))
        session.let(2)
        next(iter(handle))
        handle.cancel()
        session.let_all()
        part = handle.result()
        result = chat.say(" and", SHORT).result()
        said = (*part.prompt_tokens, *part.tokens)
        assert result.prompt_tokens[: len(said)] == said


def test_a_stop_string_was_not_said(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        tokenizer = model.tokenizer
        ids = tokenizer.encode("one two three four")
        begin = tokenizer.encode("In the beginning")

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary, np.float32)
        logits[ids[min(max(len(tokens) - len(begin), 0), len(ids) - 1)]] = 1
        return logits

    with model_of(demo, session_of(demo, logits_of=logits_of)) as model:
        chat = model.conversation()
        shown = chat.say("In the beginning", GenerationParams(stop=("hree",))).result().text
        assert shown.endswith("two t")
        assert tokenizer.decode(chat.tokens).endswith("two t")


def test_a_row_that_others_took_changes_the_saving_and_not_the_answer(demo: Bundle) -> None:
    with model_of(demo, session_of(demo, batch=1)) as model:
        chat = model.conversation()
        chat.say("In the beginning", SHORT).result()
        undisturbed = chat.say(" and", SHORT).result()
        chat.rewind()
        model.generate([[9] * 40], SHORT)
        disturbed = chat.say(" and", SHORT).result()
        assert disturbed.tokens == undisturbed.tokens
        assert disturbed.usage.cached_tokens == 0 < undisturbed.usage.cached_tokens


def test_what_does_not_fit_is_refused_and_the_conversation_is_as_before(demo: Bundle) -> None:
    with model_of(demo, session_of(demo, max_length=24)) as model:
        chat = model.conversation()
        chat.say("In the beginning", SHORT).result()
        before = chat.tokens
        with pytest.raises(RequestError, match="a cache of 24"):
            chat.say(" and" * 30, SHORT)
        assert (chat.tokens, chat.turns) == (before, 1)
        chat.say(" and", SHORT).result()


def test_nothing_can_be_said_at_first_only(demo: Bundle) -> None:
    with model_of(demo, session_of(demo)) as model:
        chat = model.conversation()
        with pytest.raises(RequestError, match="no tokens"):
            chat.say("", SHORT)
        first = chat.say("In the beginning", SHORT).result()
        more = chat.say("", SHORT).result()  # the answer goes on
        assert more.prompt_tokens == (*first.prompt_tokens, *first.tokens)
