"""A model: prompts from any thread, pieces as they come, an end for each, whatever happens."""

import contextlib
import gc
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.errors import (
    BundleError,
    BusyError,
    ClosedError,
    ConfigError,
    ExportGrokError,
    NumericsError,
    RequestError,
)
from export_grok.runtime import GenerationParams, Piece, load
from export_grok.runtime.engine_thread import EngineThread, Limits
from export_grok.runtime.observer import Observers
from tests.bundles import BundleOf
from tests.runtime.fake_model import StoppedSession, model_of, session_of
from tests.runtime.fake_session import logits_after

PROMPTS = ["The lamp", "On the second night the wind", "é"]
SHORT = GenerationParams(max_new_tokens=6, ignore_eos=True)
LONG = GenerationParams(ignore_eos=True)


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    return bundle_of("demo")


@pytest.fixture
def stopped(demo: Bundle) -> Iterator[StoppedSession]:
    session = StoppedSession(demo.config, batch=2, max_length=64)
    yield session
    session.let_all()


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


# Many at once.


def test_more_than_may_wait_are_refused_with_the_figures(
    demo: Bundle, stopped: StoppedSession
) -> None:
    with model_of(demo, stopped, max_waiting=3) as model:
        handles = [model.submit([5, 6], SHORT) for _ in range(5)]
        with pytest.raises(BusyError, match=r"tokens wait for 2 rows.*3 may wait"):
            model.submit([5], SHORT)
        with pytest.raises(BusyError):
            model.submit([5], SHORT, wait=True, timeout=0.01)
        stopped.let_all()
        assert {handle.result().finish_reason for handle in handles} == {"length"}
        model.submit([5], SHORT).result()  # there is room again


def test_tokens_that_wait_are_bounded_too(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped, max_waiting_tokens=10) as model:
        for _ in range(2):
            model.submit([5] * 20, SHORT)  # a row is free: nothing waits
        stopped.entered.wait()
        model.submit([5] * 7, SHORT)
        with pytest.raises(BusyError, match="of 10 tokens together"):
            model.submit([5] * 4, SHORT)
        model.submit([5] * 3, SHORT)
        stopped.let_all()


def test_who_waits_for_room_gets_it(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped, max_waiting=0) as model:
        first = [model.submit([5], SHORT) for _ in range(2)]
        threading.Timer(0.05, stopped.let_all).start()
        late = model.submit([7], SHORT, wait=True)
        assert any(handle.done for handle in first)
        assert late.result().finish_reason == "length"


def test_threads_may_submit_cancel_and_read_at_once(demo: Bundle) -> None:
    wrong: list[object] = []
    with model_of(demo, session_of(demo, batch=3), max_waiting=100) as model:
        wanted = {n: model.generate([[n, 5]], SHORT)[0].tokens for n in range(1, 9)}

        def client(n: int) -> None:
            for turn in range(20):
                handle = model.submit([n, 5], SHORT)
                if turn % 3 == n % 3:
                    handle.cancel()
                result = handle.result()
                good = result.tokens == wanted[n][: len(result.tokens)]
                whole = len(result.tokens) == 6 or result.finish_reason == "cancelled"
                if not (good and whole):
                    wrong.append(result)

        clients = [threading.Thread(target=client, args=(n,)) for n in range(1, 9)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        load = model.current_load()
    assert wrong == []
    assert (load.running, load.waiting, load.cache_tokens) == (0, 0, 0)


# Cancelling.


def test_a_cancelled_answer_ends_with_what_it_has(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped) as model:
        handle = model.submit("The lamp", LONG)
        stopped.let(3)
        pieces = iter(handle)
        for _ in range(3):
            next(pieces)
        handle.cancel()
        stopped.let(1)  # the turn that was under way is computed to its end
        result = handle.result()
        assert result.finish_reason == "cancelled"
        assert 3 <= len(result.tokens) <= 4
        handle.cancel()
        assert model.current_load().running == 0


def test_a_request_that_waits_can_be_cancelled(demo: Bundle, stopped: StoppedSession) -> None:
    with model_of(demo, stopped) as model:
        running = [model.submit([5], SHORT) for _ in range(2)]
        waiting = model.submit([6], SHORT)
        waiting.cancel()
        stopped.let(1)
        assert waiting.result().finish_reason == "cancelled"
        assert waiting.result().tokens == ()
        assert not any(handle.done for handle in running)
        stopped.let_all()


def test_a_stream_that_nobody_takes_any_more_is_cancelled(demo: Bundle) -> None:
    with model_of(demo, session_of(demo, max_length=200)) as model:
        for _ in model.stream("The lamp", LONG):
            break
        gc.collect()
        wait_for(lambda: model.current_load().running == 0)


def test_closing_cancels_what_is_under_way(demo: Bundle, stopped: StoppedSession) -> None:
    model = model_of(demo, stopped)
    handles = [model.submit([5], LONG) for _ in range(4)]
    stopped.let(3)
    next(iter(handles[0]))
    threading.Timer(0.05, stopped.let_all).start()
    model.close()
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    model.close()
    with pytest.raises(ClosedError, match="closed"):
        model.submit([5])
    load = model.current_load()
    assert (load.running, load.waiting) == (0, 0)


# Errors.


def broken_after(length: int, begins: int) -> Any:
    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = logits_after(tokens, vocabulary)
        if tokens[0] == begins and len(tokens) >= length:
            logits[3] = np.nan
        return logits

    return logits_of


def test_an_error_of_one_answer_is_its_own(demo: Bundle) -> None:
    session = session_of(demo, logits_of=broken_after(4, begins=2))
    with model_of(demo, session) as model:
        good, bad = model.submit([1, 9], SHORT), model.submit([2, 9], SHORT)
        with pytest.raises(NumericsError, match="step 2"):
            bad.result()
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, NumericsError)
        assert len(bad.partial().tokens) == 2
        pieces: list[Piece] = []
        with pytest.raises(NumericsError):
            pieces.extend(bad)
        assert good.result().finish_reason == "length"
        with pytest.raises(NumericsError):
            model.generate([[2, 9], [1, 9]], SHORT)
        wait_for(lambda: model.current_load().running == 0)


def test_an_error_of_the_engine_ends_all_and_is_told_to_each(
    demo: Bundle, stopped: StoppedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(demo, stopped) as model:
        handles = [model.submit([5], SHORT) for _ in range(3)]
        stopped.let(2)
        next(iter(handles[0]))

        def fail(*arguments: Any) -> Any:
            raise BundleError("the disk is gone")

        monkeypatch.setattr(stopped, "forward", fail)
        stopped.let_all()
        for handle in handles:
            with pytest.raises(BundleError, match="the disk is gone"):
                handle.result()
        with pytest.raises(ClosedError, match=r"the disk is gone.*load it again"):
            model.submit([5])


def test_an_error_that_nobody_foresaw_reaches_who_waits(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(demo)
    monkeypatch.setattr(session, "forward", lambda *arguments: 1 / 0)
    with model_of(demo, session) as model:
        handle = model.submit([5], SHORT)
        with pytest.raises(ExportGrokError, match="ZeroDivisionError") as error:
            handle.result()
        assert isinstance(error.value.__cause__, ZeroDivisionError)


class Failing(Observers):
    """An observer that fails from some call on."""

    def __init__(self, method: str) -> None:
        super().__init__(())
        setattr(self, method, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise ValueError("no more disk for logs")


@pytest.mark.parametrize("method", ["submitted", "started", "token", "finished", "stepped"])
def test_an_observer_that_fails_keeps_nobody_waiting(demo: Bundle, method: str) -> None:
    with model_of(demo, session_of(demo), observers=[Failing(method)]) as model:
        handles = [model.submit([5, 1], SHORT)]
        with contextlib.suppress(ClosedError):
            handles += [model.submit([5, n], SHORT) for n in (2, 3)]
        for handle in handles:
            with contextlib.suppress(ExportGrokError):
                handle.result(timeout=20)
        with pytest.raises(ClosedError, match="no more disk"):
            model.submit([5])


def test_a_session_that_does_not_open_is_told_and_leaves_no_thread(demo: Bundle) -> None:
    @contextmanager
    def broken() -> Iterator[Any]:
        raise BundleError("no such graph")
        yield

    with pytest.raises(BundleError, match="no such graph"):
        EngineThread(
            broken, batch=1, limits=Limits(chunk=1, max_waiting=1), observer=Observers(())
        )
    assert "export-grok engine" not in {thread.name for thread in threading.enumerate()}


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)
