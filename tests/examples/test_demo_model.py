"""The demo model's training: what it trains is Grok-1, and what it writes is what it trained."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.demo_model.model import Experts, TrainedGrok1, balance_loss, capped_attention
from examples.demo_model.quantise import (
    dequantised,
    quantise,
    quantised_weights,
    write_checkpoint,
)
from examples.demo_model.text import chapters, split, tokenizer_model, tokens
from export_grok.config import GrokConfig
from export_grok.errors import BuildError, CheckpointError
from export_grok.export.checkpoint import open_weights
from export_grok.export.kv_cache import KVCache
from export_grok.export.load import model_from_index
from export_grok.export.model import Routing
from export_grok.plugins.int8_linear.reference import dequantise
from export_grok.plugins.softcap_attention.reference import attend
from export_grok.runtime.text.tokenizer import Tokenizer

SMALL = GrokConfig(
    num_layers=2,
    emb_size=24,
    num_q_heads=12,
    num_kv_heads=2,
    key_size=8,
    ffn_size=40,
    vocab_size=67,
    sequence_len=96,
    attn_output_multiplier=8**-0.5,
    embedding_multiplier_scale=24**0.5,
    output_multiplier_scale=3**-0.5,
)


def random_model(seed: int = 0) -> TrainedGrok1:
    torch.manual_seed(seed)
    model = TrainedGrok1(SMALL)
    model.initialise()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):  # norms that differ by channel, as learnt ones do
                parameter.uniform_(0.5, 1.5)
            elif ".query" in name or ".key" in name:  # logits that feel the cap
                parameter.mul_(6)
    return model.eval()


@pytest.fixture
def learning() -> Iterator[None]:
    with torch.enable_grad():
        yield


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the training script, for the small model. It finds its parts as a script does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "demo_model"))
    for name in ("evaluate", "model", "quantise", "text", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("train")
    for name in ("evaluate", "model", "quantise", "text", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(module, "CONFIG", dataclasses.replace(SMALL, vocab_size=300))
    monkeypatch.setattr(module, "LENGTHS", ((0.0, 8), (0.5, 16)))
    monkeypatch.setattr(module, "BATCH_TOKENS", 32)
    return module


@pytest.mark.usefixtures("learning")
def test_an_interrupted_training_gives_the_same_model(trainer: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text(verses(40))
    whole = chapters(path)
    text = tokens(whole, tokenizer_model(whole, trainer.CONFIG))
    options = trainer.Options(steps=4, seed=7)

    def fresh() -> TrainedGrok1:
        torch.manual_seed(1)
        model: TrainedGrok1 = trainer.TrainedGrok1(trainer.CONFIG)
        model.initialise()
        return model

    once = fresh()
    assert trainer.train(once, text, text, tmp_path / "once.pt", options, math.inf)
    for stop in (1, 2, 3, 4):  # with no time left, a call makes one step
        again = fresh()
        state = tmp_path / "again.pt"
        assert trainer.train(again, text, text, state, options, 0.0) == (stop == 4)
    for name, weight in once.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=1e-6)
    assert not torch.equal(once.final_norm.scale, fresh().final_norm.scale)

    other = dataclasses.replace(options, seed=8)
    with pytest.raises(BuildError, match=r"'seed': 7.*repeat these options"):
        trainer.train(fresh(), text, text, state, other, math.inf)


def test_the_report_tells_perplexity_and_use_of_experts(
    trainer: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text(verses(40))
    whole = chapters(path)
    tokenizer = tokenizer_model(whole, trainer.CONFIG)
    model = trainer.TrainedGrok1(trainer.CONFIG)
    model.initialise()
    model.final_norm.scale.zero_()  # every token is as likely as the others
    weights = quantised_weights(trainer.CONFIG, model.state_dict())
    write_checkpoint(tmp_path / "checkpoint", trainer.CONFIG, weights, tokenizer)
    figures = trainer.report(model, tokens(whole, tokenizer), tmp_path / "checkpoint")
    assert figures["perplexity"] == pytest.approx({"float": 300, "int8": 300})
    for layer in figures["expert_shares"]:
        assert sum(layer) == pytest.approx(SMALL.num_selected_experts, abs=0.01)


def test_the_twin_with_dequantised_weights_is_the_projects_model(tmp_path: Path) -> None:
    twin = random_model()
    weights = quantised_weights(SMALL, dict(twin.named_parameters()))
    write_checkpoint(tmp_path, SMALL, weights, b"no tokenizer")
    config, index = open_weights(tmp_path)
    assert config == SMALL
    model = model_from_index(config, index, "float32")
    twin.load_state_dict(dequantised(weights))

    rows = torch.randint(0, SMALL.vocab_size, (3, 71))
    cache = KVCache.allocate(SMALL, batch=3, length=71, dtype="float32")
    expected = model(rows, torch.zeros(3, dtype=torch.int64), cache)
    logits, _ = twin(rows)
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [1, 9, 32, 33, 81])
@pytest.mark.usefixtures("learning")
def test_attention_and_its_gradients_are_those_of_the_reference(length: int) -> None:
    torch.manual_seed(length)
    query = torch.randn(2, length, 2, 3, 8) * 20
    key, value = torch.randn(2, 2, length, 2, 8)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    upstream = torch.randn_like(query)

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((y * upstream).sum(), inputs)

    y = capped_attention(query, key, value, 0.4, 30.0)
    keys, values = key.transpose(1, 2), value.transpose(1, 2)
    expected = attend(query, keys, values, torch.zeros(2, dtype=torch.int64), 0.4, 30.0)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-4)
    for ours, theirs in zip(gradients(y), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("learning")
def test_every_parameter_learns() -> None:
    model = random_model()
    logits, routings = model(torch.randint(0, SMALL.vocab_size, (4, 40)))
    (logits.square().mean() + balance_loss(routings)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_experts_that_no_token_chose_add_nothing() -> None:
    experts = Experts(SMALL)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
        experts.down.weight[2:] = torch.nan
    chosen = torch.tensor([0, 1]).expand(1, 5, 2)
    y = experts(torch.randn(1, 5, SMALL.emb_size), torch.full((1, 5, 2), 0.4), chosen)
    assert y.isfinite().all()


def test_balance_loss_is_one_for_even_use_and_grows_with_one_favourite() -> None:
    even = torch.full((1, 8, 8), 1 / 8)
    chosen = torch.stack((torch.arange(8), (torch.arange(8) + 1) % 8), dim=-1)[None]
    same = torch.tensor([0, 1]).expand(1, 8, 2)
    skewed = torch.softmax(torch.tensor([5.0, 4, 0, 0, 0, 0, 0, 0]), 0).expand(1, 8, 8)
    assert balance_loss([Routing(even, even, even[..., :2], chosen)]).item() == pytest.approx(1)
    assert balance_loss([Routing(skewed, skewed, skewed[..., :2], same)]).item() > 3


@pytest.mark.parametrize("groups", [1, 8])
def test_int8_is_within_half_a_step_and_never_saturates(groups: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, 40, 7) * torch.logspace(-6, 3, 7)
    matrix[0, :, 0] = 0
    weight, scales = quantise(matrix, groups)
    assert weight.shape == matrix.shape and scales.shape == (3, groups, 7)
    assert weight.min() >= -127
    error = (dequantise(weight, scales, torch.float32) - matrix).view(3, groups, -1, 7).abs()
    assert (error <= 0.5001 * scales.float().unsqueeze(2)).all()


def test_weights_of_another_config_are_refused() -> None:
    weights = dict(random_model().named_parameters())
    wider = dataclasses.replace(SMALL, ffn_size=48)
    with pytest.raises(CheckpointError, match=r"experts\.gate\.weight is of shape"):
        quantised_weights(wider, weights)
    del weights["final_norm.scale"]
    with pytest.raises(CheckpointError, match=r"final_norm\.scale is missing"):
        quantised_weights(SMALL, weights)


def verses(count: int) -> str:
    books = ["Ge"] * 30 + ["1Sa"] * (count - 30)
    return "".join(
        f"{book}{chapter}:{verse} And  he said, Behold {chapter} oxen.\n"
        for chapter, book in enumerate(books[:count], 1)
        for verse in (1, 2)
    )


def test_every_twentieth_chapter_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text(verses(40))
    whole = chapters(path)
    assert whole[34] == ("And he said, Behold 35 oxen.",) * 2
    training, held_out = split(whole)
    assert held_out == [whole[9], whole[29]]
    assert len(training) == 38 and not set(training) & set(held_out)


def test_a_line_that_is_no_verse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text("Ge1:1 In the beginning\nnothing\n")
    with pytest.raises(BuildError, match="line 2: 'nothing' is no verse"):
        chapters(path)


def test_tokens_of_verses_are_those_of_their_chapter(tmp_path: Path) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text(verses(20))
    whole = chapters(path)
    config = dataclasses.replace(SMALL, vocab_size=300)
    model = tokenizer_model(whole, config)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(model)
    tokenizer = Tokenizer(file)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)

    stream = tokens(whole, model)
    text = [" ".join(chapter) for chapter in whole]
    ends = np.flatnonzero(stream.ids == tokenizer.eos_id)
    assert stream.ids[: ends[0]].tolist() == tokenizer.encode(text[0])
    assert stream.byte_lengths.sum() == sum(len(f" {line}".encode()) for line in text)
    assert len(stream.starts) == 40 and stream.starts[2] == ends[0] + 1
