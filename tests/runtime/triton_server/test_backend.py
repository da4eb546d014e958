"""Under a made-up Triton: every answer ends once, says what it is, and lets its row go."""

import dataclasses
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.artifacts import TOKENIZER, Bundle
from export_grok.runtime.model import Model, load
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.text.tokenizer import tokenizer_of
from export_grok.runtime.triton_server import backend
from export_grok.runtime.triton_server.backend import TritonPythonModel
from export_grok.runtime.triton_server.repository import CONFIG, MODEL, write_model
from export_grok.runtime.triton_server.settings import Settings
from tests.bundles import BundleOf, bundle_of
from tests.runtime.fake_model import StoppedSession, model_of, session_of
from tests.runtime.fake_session import LogitsOf
from tests.runtime.triton_server.fake_triton import (
    FakeModelError,
    FakeRequest,
    FakeResponse,
    FakeSender,
    FakeUtils,
    installed,
)
from tests.runtime.triton_server.pbtxt import read

__all__ = ["bundle_of"]

Start = Callable[..., TritonPythonModel]


def arguments(config: str, **others: str) -> dict[str, str]:
    """Return what Triton hands to `initialize`: of the configuration, what is looked at."""
    message = read(config)
    value: dict[str, Any] = {
        "model_transaction_policy": {
            name: values == ["true"]
            for policy in message.get("model_transaction_policy", [])
            for name, values in policy.items()
        },
        "parameters": {
            entry["key"][0]: {"string_value": entry["value"][0]["string_value"][0]}
            for entry in message.get("parameters", [])
        },
    }
    kind = message["instance_group"][0]["kind"][0].removeprefix("KIND_")
    fixed = {"model_config": json.dumps(value), "model_instance_kind": kind, "model_name": "grok"}
    return {**fixed, "model_instance_device_id": "0", **others}


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo")


@pytest.fixture
def folder(demo: Bundle, tmp_path: Path) -> Path:
    """Return a model in a repository."""
    return write_model(tmp_path, "grok", demo, Settings(bundle=str(demo.folder), threads=1))


@pytest.fixture
def utils(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUtils:
    """Return Triton's module, made up."""
    return installed(monkeypatch, (folder / MODEL).parent)


@pytest.fixture
def start(
    folder: Path, utils: FakeUtils, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Model], TritonPythonModel]]:
    """Return what makes Triton's model of one of ours; it is finalised behind the test."""
    started = []

    def start(model: Model) -> TritonPythonModel:
        monkeypatch.setattr(backend, "load", lambda **_: model)
        made = TritonPythonModel()
        made.initialize(arguments((folder / CONFIG).read_text()))
        started.append(made)
        return made

    yield start
    for made in started:
        made.finalize()
    assert [each for each in threading.enumerate() if each.name.startswith("export-grok")] == []


def module_of(folder: Path) -> ModuleType:
    """Return `model.py`, loaded from its file."""
    spec = importlib.util.spec_from_file_location("model", folder / MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(model: TritonPythonModel, request: FakeRequest) -> FakeSender:
    """Have a request begun; its inputs are gone then, as they are under Triton."""
    assert model.execute([request]) is None  # type: ignore[func-returns-value, list-item]
    request.free()
    return request.sender


def error_of(sender: FakeSender) -> tuple[str, str]:
    """Return code and text of the error that a request ended with."""
    error = sender.wait()[-1].error
    assert error is not None
    return error.kind, error.text


def slow(demo: Bundle) -> StoppedSession:
    return StoppedSession(demo.config, batch=2, max_length=64)


def test_the_model_in_the_repository_answers_as_the_engine_does(
    demo: Bundle, folder: Path, utils: FakeUtils
) -> None:
    params = GenerationParams(max_new_tokens=12, temperature=0.5, seed=7, logprobs=2)
    with load(demo.folder, threads=1) as engine:
        (wanted,) = engine.generate("In the beginning", params)
    model = module_of(folder).TritonPythonModel()
    model.initialize(arguments((folder / CONFIG).read_text()))
    try:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.5, "seed": 7, "logprobs": 2}
        for stream in (True, False):
            asked = FakeRequest(text_input="In the beginning", stream=stream, **options)
            sender = ask(model, asked)
            responses = sender.wait()
            assert (len(responses) > 1) == stream
            assert sender.text == wanted.text
            last = responses[-1].outputs
            assert last["finish_reason"] == [wanted.finish_reason]
            assert last["num_input_tokens"] == [len(wanted.prompt_tokens)]
            assert last["num_output_tokens"] == [len(wanted.tokens)]
            assert "num_cached_tokens" in last
            assert all("finish_reason" not in each.outputs for each in responses[:-1])
            told = [each.outputs for each in responses]
            ids = [token for each in told for token in each.get("output_ids", [])]
            assert ids == list(wanted.tokens)
            assert wanted.logprobs is not None
            chosen = [value for each in told for value in each.get("output_log_probs", [])]
            assert chosen == pytest.approx([entry.logprob for entry in wanted.logprobs])
            tops = [json.loads(text) for each in told for text in each.get("logprobs", [])]
            assert tops == [
                {str(top.token): pytest.approx(top.logprob) for top in entry.top}
                for entry in wanted.logprobs
            ]
    finally:
        model.finalize()
    assert utils.log == []


def test_token_ids_are_a_prompt_too(demo: Bundle, start: Start) -> None:
    model = start(model_of(demo, session_of(demo)))
    prompt = model._model.tokenizer.encode("The")
    by_text = ask(model, FakeRequest(text_input="The", max_tokens=5))
    by_ids = ask(model, FakeRequest(input_ids=prompt, max_tokens=5))
    assert by_text.wait()[0].outputs["output_ids"] == by_ids.wait()[0].outputs["output_ids"]


def test_every_response_but_the_last_has_text_and_no_character_is_cut(
    demo: Bundle, start: Start
) -> None:
    text = "日本語 👩‍👩‍👧 é"
    logits_of, tokens = says(demo, text)
    model = start(model_of(demo, session_of(demo, logits_of=logits_of)))
    asked = FakeRequest(text_input="a", stream=True, ignore_eos=True, max_tokens=tokens)
    responses = ask(model, asked).wait()
    assert asked.sender.text.lstrip() == text
    assert all(each.outputs["text_output"] != [""] for each in responses[:-1])


def test_execute_waits_for_nothing(demo: Bundle, start: Start) -> None:
    held = slow(demo)
    model = start(model_of(demo, held))
    senders = [ask(model, FakeRequest(text_input="The", max_tokens=3)) for _ in range(4)]
    assert all(sender.responses == [] for sender in senders)
    held.let_all()
    assert {sender.wait()[0].outputs["finish_reason"][0] for sender in senders} <= {
        "stop",
        "length",
    }


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "neither text_input nor input_ids"),
        ({"text_input": "a", "input_ids": [5]}, "both text_input and input_ids"),
        ({"text_input": b"\xff"}, "text_input is no UTF-8 at byte 0"),
        ({"text_input": "a", "stop_words": [b"\xff"]}, "stop_words is no UTF-8"),
        ({"text_input": "a", "temperature": -1.0}, "temperature is -1.0"),
        ({"text_input": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"text_input": "a", "max_tokens": 0}, "max_new_tokens is 0"),
        ({"text_input": "a", "logprobs": 21}, "logprobs is 21"),
        ({"text_input": "The " * 500}, "shorten the prompt"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [10**9]}, "1000000000"),
    ],
)
def test_what_cannot_be_asked_is_the_client_s_error(
    inputs: dict[str, Any], said: str, demo: Bundle, start: Start
) -> None:
    model = start(model_of(demo, session_of(demo)))
    sender = FakeSender()
    good = FakeRequest(text_input="The", max_tokens=2)
    model.execute([FakeRequest(sender, **inputs), good])  # type: ignore[list-item]
    code, text = error_of(sender)
    assert (code, said in text) == ("INVALID_ARG", True), text
    assert good.sender.wait()[0].error is None


def test_a_full_queue_is_no_fault_of_the_request(demo: Bundle, start: Start) -> None:
    held = slow(demo)
    model = start(model_of(demo, held, max_waiting=0))
    senders = [ask(model, FakeRequest(text_input="The")) for _ in range(3)]
    assert error_of(senders[2])[0] == "UNAVAILABLE"
    held.let_all()
    assert senders[0].wait()[0].error is None


def test_an_engine_that_fails_is_told_and_makes_the_model_unready(
    demo: Bundle, start: Start
) -> None:
    class Failing(StoppedSession):
        def forward(self, *arguments: Any) -> Any:
            raise RuntimeError("the GPU fell off the bus")

    model = start(model_of(demo, Failing(demo.config, batch=2, max_length=64)))
    assert model.is_ready()
    code, text = error_of(ask(model, FakeRequest(text_input="a")))
    assert (code, "fell off the bus" in text) == ("INTERNAL", True)
    assert error_of(ask(model, FakeRequest(text_input="a")))[0] == "UNAVAILABLE"
    assert not model.is_ready()


def test_logits_that_are_no_numbers_end_one_request(demo: Bundle, start: Start) -> None:
    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        return np.full(vocabulary, np.nan if len(tokens) > 6 else 1, np.float32)

    model = start(model_of(demo, session_of(demo, logits_of=logits_of)))
    code, text = error_of(ask(model, FakeRequest(text_input="a", ignore_eos=True)))
    assert (code, "logits are NaN" in text) == ("INTERNAL", True), text
    assert model.is_ready()


def test_a_bundle_without_a_tokenizer_takes_and_gives_ids(demo: Bundle, start: Start) -> None:
    files = {name: file for name, file in demo.manifest.files.items() if name != TOKENIZER}
    manifest = dataclasses.replace(demo.manifest, files=files)
    mute = dataclasses.replace(demo, manifest=manifest)
    model = start(model_of(mute, session_of(mute)))
    assert error_of(ask(model, FakeRequest(text_input="a")))[0] == "UNSUPPORTED"
    asked = FakeRequest(input_ids=[5, 6], stream=True, max_tokens=4, ignore_eos=True)
    responses = ask(model, asked).wait()
    assert [len(each.outputs["output_ids"]) for each in responses] == [1, 1, 1, 1]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_request_that_nobody_waits_for_gives_its_place_back(
    waiting: bool, demo: Bundle, start: Start
) -> None:
    held = slow(demo)
    model = start(model_of(demo, held))
    senders = [ask(model, FakeRequest(text_input="The", stream=True)) for _ in range(3)]
    gone = senders[2 if waiting else 0]
    gone.cancelled = True
    seen = gone.looks
    until(lambda: gone.looks >= seen + 2)
    held.let(2)
    assert error_of(gone)[0] == "CANCELLED"
    held.let_all()
    assert all(sender.wait()[-1].error is None for sender in senders if sender is not gone)


def test_a_hundred_cancelled_requests_leave_nothing(
    demo: Bundle, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LOOK", 0.001)
    model = start(model_of(demo, session_of(demo), max_waiting=200))
    random = np.random.default_rng(0)
    senders = []
    for _ in range(100):
        sender = ask(model, FakeRequest(text_input="The", stream=True, ignore_eos=True))
        senders.append(sender)
        if random.random() < 0.7:
            sender.cancelled = True
    for sender in senders:
        last = sender.wait()[-1]
        assert last.error is None or (last.error.kind == "CANCELLED" and sender.cancelled)
    after = ask(model, FakeRequest(text_input="The", max_tokens=3)).wait()[0]
    alone = model_of(demo, session_of(demo))
    (wanted,) = alone.generate("The", GenerationParams(max_new_tokens=3))
    alone.close()
    assert after.outputs["output_ids"] == list(wanted.tokens)
    assert model._model.current_load().running == 0
    until(lambda: not model._exchanges)


def test_nobody_asks_behind_the_last_response_or_while_it_is_sent(
    demo: Bundle, start: Start
) -> None:
    held = slow(demo)
    model = start(model_of(demo, held))

    class Asked(FakeSender):
        def is_cancelled(self) -> bool:
            held.let_all()
            until(lambda: exchange._handle.done)
            sleep(0.05)  # in which a last response that does not wait would be sent
            return super().is_cancelled()

    sender = Asked()
    ask(model, FakeRequest(sender, text_input="The", max_tokens=3))
    (exchange,) = model._exchanges
    sender.wait()
    looks = sender.looks
    exchange.look()
    assert (sender.looks, sender.faults) == (looks, [])
    assert looks > 0


def test_a_server_that_is_gone_ends_the_answer(
    demo: Bundle, start: Start, utils: FakeUtils
) -> None:
    held = slow(demo)
    model = start(model_of(demo, held))
    sender = FakeSender(breaks=0)
    ask(model, FakeRequest(sender, text_input="The", stream=True, ignore_eos=True))
    (exchange,) = model._exchanges
    while model._exchanges:
        held.let(1)
        sleep(0.01)
    assert "Failed to send" in utils.log[0]
    held.let_all()
    until(lambda: exchange._handle.done)
    assert exchange._handle.finish_reason == "cancelled"


def test_the_end_tells_those_that_are_under_way(demo: Bundle, start: Start) -> None:
    class Slow(FakeSender):
        def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
            sleep(0.05)
            super().send(response, flags)

    held = slow(demo)
    model = start(model_of(demo, held))
    senders = [ask(model, FakeRequest(Slow(), text_input="The")) for _ in range(3)]
    end = threading.Thread(target=model.finalize)
    end.start()
    held.let_all()
    end.join(20)
    assert all(sender.ended.is_set() for sender in senders)
    assert [error_of(sender)[0] for sender in senders] == ["CANCELLED"] * 3
    assert error_of(ask(model, FakeRequest(text_input="The")))[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("change", "others", "said"),
    [
        (("decoupled: true", "decoupled: false"), {}, "no model_transaction_policy"),
        (('"bundle"', '"bumble"'), {}, "has a parameter bumble"),
        (('"bundle" value { string_value: "', '"bundle" value { string_value: "/no'), {}, "/no"),
        (("KIND_CPU", "KIND_GPU"), {"model_instance_device_id": "1"}, "asks for GPU 1"),
    ],
)
def test_a_model_that_cannot_be_is_refused_with_the_reason(
    change: tuple[str, str], others: dict[str, str], said: str, folder: Path, utils: FakeUtils
) -> None:
    config = (folder / CONFIG).read_text().replace(*change)
    assert config != (folder / CONFIG).read_text()
    with pytest.raises(FakeModelError, match=said):
        TritonPythonModel().initialize(arguments(config, **others))


def test_a_python_without_the_package_is_told_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, backend.__name__, None)
    with pytest.raises(ModuleNotFoundError, match=r"install export-grok .* EXECUTION_ENV_PATH"):
        module_of(folder)


def until(true: Callable[[], object]) -> None:
    """Wait until something is true."""
    for _ in range(2000):
        if true():
            return
        sleep(0.01)
    raise AssertionError("it never came true")


def says(demo: Bundle, text: str) -> tuple[LogitsOf, int]:
    """Return logits by which the answer to "a" is a text, and how many tokens it has."""
    tokenizer = tokenizer_of(demo)
    prompt, answer = tokenizer.encode("a"), tokenizer.encode(text)

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary, np.float32)
        logits[answer[len(tokens) - len(prompt)]] = 1
        return logits

    return logits_of, len(answer)
