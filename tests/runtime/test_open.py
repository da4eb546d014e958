"""What is in a bundle is opened, or refused with what is wrong."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from export_grok.artifacts import Bundle
from export_grok.config import EngineOptions
from export_grok.engines.pipeline import engine_from_source
from export_grok.errors import BundleError
from export_grok.runtime import GenerationParams, load
from export_grok.runtime.text.tokenizer import tokenizer_of
from tests.bundles import BundleOf, checkpoint_copy

SHORT = GenerationParams(max_new_tokens=4)


def test_a_bundle_without_a_tokenizer_is_told_so(bundle_of: BundleOf) -> None:
    with pytest.raises(BundleError, match=r"has no tokenizer\.model"):
        tokenizer_of(bundle_of("tiny"))


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
    with pytest.raises(BundleError, match=rf"{tokenizer_of(demo).vocab_size} pieces.* 256"):
        load(bundle.folder)


def test_a_tokenizer_with_fewer_pieces_than_the_model_is_taken(demo: Bundle) -> None:
    config = dataclasses.replace(demo.config, vocab_size=tokenizer_of(demo).vocab_size + 1)
    larger = dataclasses.replace(demo, manifest=dataclasses.replace(demo.manifest, config=config))
    assert tokenizer_of(larger).encode("a") == tokenizer_of(demo).encode("a")


def test_graphs_without_an_engine_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="build-engine"):
        load(tmp_path)
    with pytest.raises(BundleError, match="no folder"):
        load(tmp_path / "none")


def test_weights_that_were_moved_are_taken_from_where_they_are_said_to_be(
    demo: Bundle, tmp_path: Path
) -> None:
    folder, weights = tmp_path / "a" / "bundle", tmp_path / "b"
    shutil.copytree(demo.folder, folder)
    shutil.copytree(demo.weights_root, weights)
    with load(demo.folder, batch=1) as model:
        (wanted,) = model.generate("The lamp", SHORT)
    with load(folder, batch=1, weights_root=weights) as model:
        (found,) = model.generate("The lamp", SHORT)
    assert found.tokens == wanted.tokens
    with pytest.raises(BundleError, match="--weights-root"):
        load(folder, weights_root=tmp_path / "nowhere")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_answer(demo: Bundle, threads: int) -> None:
    answers = []
    for count in (None, threads):
        with load(demo.folder, batch=1, threads=count) as model:
            answers.append(model.generate("The lamp", SHORT)[0].tokens)
    assert answers[0] == answers[1]
