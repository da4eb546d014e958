"""One check of a model against the golden arrays of a fixture: which disagree, and how far.

The goldens were computed by the original program; what each array holds is said where they were
made, and repeated here by the code that computes its counterpart.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export.kv_cache import KVCache
from export_grok.export.model import Grok1, Routing

__all__ = [
    "BFLOAT16_MEAN",
    "FLOAT32_TOLERANCE",
    "Arrays",
    "Difference",
    "differences",
    "disagreeing",
    "forward",
    "int64",
    "observed",
]

Arrays = dict[str, NDArray[Any]]

# Differences of a right float32 implementation stay below; they come from the order of sums.
FLOAT32_TOLERANCE = 1e-4

# Mean difference of any bfloat16 array: at most 0.0097 was measured. The mean distance of the
# bfloat16 from the float32 logits is 0.027, 0.062 and 0.123.
BFLOAT16_MEAN = 2**-6


class Difference(NamedTuple):
    """How far an array is from its golden.

    Attributes:
        largest: absolute difference; infinite where whole numbers differ or a value is no number.
        argmax: the largest element of the last axis stands at the same place everywhere.
    """

    largest: float
    argmax: bool


def int64(values: Any) -> Tensor:
    """Return token ids or positions as the model takes them."""
    return torch.as_tensor(np.asarray(values), dtype=torch.int64)


def forward(model: Grok1, tokens: Any, start: Any, cache: KVCache) -> NDArray[np.float32]:
    """Return the logits [B, S, V] as an array."""
    logits: NDArray[np.float32] = model(int64(tokens), int64(start), cache).numpy()
    return logits


def observed(model: Grok1, goldens: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    """Return what the model computes in place of every array `<prefix>/...` of the goldens.

    Both rows of the prompt go through prefill and eight decode steps as one batch; the short
    prompt goes through three, after a prefill that was padded on the right.
    """
    return {
        **_prompt(model, goldens, prefix),
        **_without_memory(model, goldens),
        **_padded_prompt(model, goldens, prefix),
    }


def differences(
    arrays: Arrays, goldens: Mapping[str, NDArray[Any]], prefix: str
) -> dict[str, Difference]:
    """Return the difference of each of `arrays` that has a golden `<prefix>/<name>`."""
    return {
        name: _difference(array, goldens[f"{prefix}/{name}"])
        for name, array in arrays.items()
        if f"{prefix}/{name}" in goldens
    }


def disagreeing(
    model: Grok1, goldens: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Hold a float32 model to every float32 golden.

    Returns:
        The arrays that disagree, and all arrays; each with its largest difference.
    """
    found = differences(observed(model, goldens, "f32"), goldens, "f32")
    every = {name: difference.largest for name, difference in found.items()}
    wrong = {name: largest for name, largest in every.items() if largest > FLOAT32_TOLERANCE}
    return wrong, every


def _difference(array: NDArray[Any], golden: NDArray[Any]) -> Difference:
    if array.shape != golden.shape:
        raise ValueError(f"shape {array.shape} against a golden of {golden.shape}")
    same_argmax = bool((array.argmax(-1) == golden.argmax(-1)).all())
    if golden.dtype.kind == "i":
        return Difference(0.0 if (array == golden).all() else np.inf, same_argmax)
    distance = np.abs(array.astype(np.float64) - golden)
    return Difference(float(np.nan_to_num(distance, nan=np.inf).max()), same_argmax)


def _cache(config: GrokConfig, model: Grok1, batch: int, length: int) -> KVCache:
    return KVCache.allocate(config, batch=batch, length=length, dtype=model.dtype)


def _keys_and_values(cache: KVCache, length: int, suffix: str) -> Arrays:
    """Return the first `length` slots of the first and last layer, position before head."""
    return {
        f"kv_{layer}_{letter}{suffix}": tensor[:, :, :length]
        .transpose(1, 2)
        .float()
        .numpy()
        .copy()
        for letter, tensors in (("k", cache.keys), ("v", cache.values))
        for layer, tensor in (("first", tensors[0]), ("last", tensors[-1]))
    }


def _prompt(model: Grok1, goldens: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    tokens = goldens["tokens"]
    rows, length = tokens.shape
    cache = _cache(model.config, model, rows, model.config.sequence_len)
    routings, hidden = [], []

    def routed(_module: Any, _inputs: Any, output: Routing) -> None:
        routings.append(output)

    def embedded(_module: Any, _inputs: Any, output: Tensor) -> None:
        hidden.append(output)

    def passed(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden.append(output[0])

    hooks = [model.embedding.register_forward_hook(embedded)]
    for layer in model.layers:
        hooks += [
            layer.get_submodule("router").register_forward_hook(routed),
            layer.register_forward_hook(passed),
        ]
    logits = forward(model, tokens, [0] * rows, cache)
    for hook in hooks:
        hook.remove()

    def by_layer(part: Callable[[Routing], Tensor]) -> NDArray[Any]:
        return torch.stack([part(routing) for routing in routings], dim=1).numpy()

    arrays: Arrays = {
        "prefill_logits": logits,
        "hidden": torch.stack(hidden, dim=1).float().numpy(),
        "router_logits": by_layer(lambda routing: routing.logits),
        "router_probs": by_layer(lambda routing: routing.probabilities),
        "expert_gate": by_layer(lambda routing: routing.gates),
        "expert_index": by_layer(lambda routing: routing.experts),
        **_keys_and_values(cache, length, ""),
    }
    steps = [
        forward(model, fed[:, None], [length + step] * rows, cache)[:, 0]
        for step, fed in enumerate(goldens[f"{prefix}/decode_tokens"].T)
    ]
    greedy = [logits[:, -1].argmax(-1), *(step.argmax(-1) for step in steps[:-1])]
    return {
        **arrays,
        "decode_logits": np.stack(steps, axis=1),
        "decode_tokens": np.stack(greedy, axis=1),
        "decode_step_after": np.full(rows, length + len(steps)),
        **_keys_and_values(cache, length + len(steps), "_after_decode"),
    }


def _without_memory(model: Grok1, goldens: Mapping[str, NDArray[Any]]) -> Arrays:
    """A prompt that fills its cache to the last slot remembers nothing from before."""
    rows, length = goldens["tokens"].shape
    cache = _cache(model.config, model, rows, length)
    return {"nocache_logits": forward(model, goldens["tokens"], [0] * rows, cache)}


def _padded_prompt(model: Grok1, goldens: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    short = goldens["short_tokens"]
    length = len(short)
    padded = np.pad(short, (0, 5), constant_values=model.config.pad_token)
    cache = _cache(model.config, model, 1, model.config.sequence_len)
    logits = forward(model, padded[None], [0], cache)[0, length - 1]
    caches = {
        f"padded_{name}": array[0]
        for name, array in _keys_and_values(cache, length, "").items()
        if name.endswith("_k")
    }
    fed = goldens[f"{prefix}/padded_decode_tokens"]
    steps = [
        forward(model, [[token]], [length + step], cache)[0, 0] for step, token in enumerate(fed)
    ]
    return {
        "padded_logits": logits,
        **caches,
        "padded_decode_logits": np.stack(steps),
    }
