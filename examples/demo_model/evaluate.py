"""How well a model reads a held-out text: perplexity, bits for a byte, use of the experts.

Windows lie side by side. Each is read from its first token, and all its tokens but that one are
guessed. Float and int8 models get the same windows, so their figures can be compared.
"""

import math
from collections.abc import Callable

import torch
from model import TrainedGrok1
from text import Tokens
from torch import Tensor
from torch.nn import functional

from export_grok.export.kv_cache import KVCache
from export_grok.export.model import Grok1

__all__ = ["bits_per_byte", "byte_count", "cached_logits", "expert_shares", "nats", "windows"]

BATCH = 16

Logits = Callable[[Tensor], Tensor]  # tokens [B, S] -> [B, S, V]


def windows(text: Tokens, length: int, every: int = 1) -> Tensor:
    """Return every so many-th window of the text, [B, length]; a rest that is shorter is left."""
    count = len(text.ids) // length
    return torch.from_numpy(text.ids[: count * length].reshape(count, length)[::every])


def byte_count(text: Tokens, length: int) -> int:
    """Return how many bytes the guessed tokens of all windows stand for."""
    count = len(text.ids) // length
    return int(text.byte_lengths[: count * length].reshape(count, length)[:, 1:].sum())


@torch.no_grad()
def nats(logits: Logits, rows: Tensor) -> float:
    """Return the mean surprise at a token; its exponential is the perplexity."""
    total = 0.0
    for part in torch.split(rows, BATCH):
        guesses = logits(part)[:, :-1].flatten(0, 1)
        total += functional.cross_entropy(guesses, part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.numel() - len(rows))


def bits_per_byte(nats_per_token: float, rows: Tensor, nbytes: int) -> float:
    """Return the surprise at a byte, in bits."""
    return nats_per_token * (rows.numel() - len(rows)) / nbytes / math.log(2)


def cached_logits(model: Grok1) -> Logits:
    """Return the logits of the project's own model, which needs a cache."""

    def logits(tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        cache = KVCache.allocate(model.config, batch=batch, length=length, dtype=model.dtype)
        y: Tensor = model(tokens, torch.zeros(batch, dtype=torch.int64), cache)
        return y

    return logits


@torch.no_grad()
def expert_shares(model: TrainedGrok1, rows: Tensor) -> Tensor:
    """Return which share of the tokens chose each expert, [layers, E]; a row's sum is C."""
    config = model.config
    counts = torch.zeros(config.num_layers, config.num_experts)
    for part in torch.split(rows, BATCH):
        for layer, routing in enumerate(model(part)[1]):
            counts[layer] += torch.bincount(routing.experts.flatten(), minlength=len(counts[0]))
    return counts / rows.numel()
