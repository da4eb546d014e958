"""Requests are held to a model before it is loaded, for no more than they need."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from export_grok.artifacts import Bundle
from export_grok.errors import BundleError, RequestError
from export_grok.needs import Needs
from export_grok.runtime.model_to_load import ModelToLoad, Reach
from export_grok.runtime.params import GenerationParams
from tests.bundles import BundleOf
from tests.runtime.fake_session import FakeSession


def test_a_request_reaches_to_the_end_of_its_longest_answer(demo: Bundle) -> None:
    model = ModelToLoad.of(demo.folder, max_length=100)
    for made, whole in ((4, 7), (97, 100), (98, 100), (None, 100)):
        params = GenerationParams(max_new_tokens=made)
        assert model.check([5, 6, 7], params, "it") == Reach(prompt=3, whole=whole)
    reaches = [Reach(prompt=3, whole=9), Reach(prompt=5, whole=6)]
    assert Reach.over(reaches) == Reach(prompt=5, whole=9)


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], {}, "no tokens"),
        ([5] * 10, {}, "it has 10 tokens; a cache of 10 takes 9"),
        ([5, 1024], {}, "it has token id 1024; this model knows 0 to 1023"),
        ([5], {"logit_bias": {1024: 1.0}}, "logit_bias has 1024"),
    ],
)
def test_what_does_not_go_with_the_model_is_refused(
    prompt: list[int], params: dict[str, Any], said: str, demo: Bundle
) -> None:
    model = ModelToLoad.of(demo.folder, max_length=10)
    with pytest.raises(RequestError, match=said):
        model.check(prompt, GenerationParams(**params), "it")


@pytest.mark.parametrize("length", [-1, 0, 1, 257])
def test_a_cache_longer_than_the_model_was_trained_for_is_refused(
    demo: Bundle, length: int
) -> None:
    with pytest.raises(RequestError, match=f"max_length is {length}; this model takes 2 to 256"):
        ModelToLoad.of(demo.folder, max_length=length)


def test_a_bundle_without_a_tokenizer_is_refused(bundle_of: BundleOf) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.model"):
        ModelToLoad.of(bundle_of("tiny").folder)


def test_rows_are_those_asked_for_else_no_more_than_needed_or_built_for(demo: Bundle) -> None:
    model = ModelToLoad.of(demo.folder)
    assert [model.batch(None, requests) for requests in (0, 1, 5, 8, 99)] == [1, 1, 5, 8, 8]
    assert model.batch(20, 1) == 20
    engine = {**demo.manifest.engine, "sizes": {"batch": 4, "max_length": 100}}
    built = dataclasses.replace(demo, manifest=dataclasses.replace(demo.manifest, engine=engine))
    assert dataclasses.replace(model, bundle=built).batch(None, 99) == 4
    assert dataclasses.replace(model, bundle=built).batch(None, 1) == 4  # plans take no fewer


def test_the_cache_is_no_longer_than_the_longest_request(
    demo: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_fake(bundle: Bundle, **sizes: Any) -> Iterator[FakeSession]:
        yield FakeSession(bundle.config, batch=sizes["batch"], max_length=sizes["max_length"])

    monkeypatch.setattr("export_grok.runtime.model.open_session", open_fake)
    model = ModelToLoad.of(demo.folder)
    told: list[Needs] = []
    for whole in (20, 200):
        with model.load(
            Reach(prompt=9, whole=whole), batch=3, max_waiting=1, on_needs=told.append
        ) as loaded:
            assert (loaded.batch, loaded.max_length) == (3, whole)
            (result,) = loaded.generate([[5, 6]], GenerationParams(ignore_eos=True))
            assert len(result.tokens) == whole - 2
    assert 0 < told[0].memory < told[1].memory
