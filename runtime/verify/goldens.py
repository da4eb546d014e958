"""Results that the original program computed, in a file, as what an engine is held to.

The file is one `goldens.npz` of the reference models: arrays `tokens` [B, S] and `f32/...`, among
them `hidden` [B, L+1, S, M], `expert_index` and `expert_gate` [B, L, S, C], `router_probs`
[B, L, S, E], `kv_first_k` ... `kv_last_v` [B, S, Hkv, D], `prefill_logits` [B, S, V],
`decode_tokens` [B, N] and `decode_logits` [B, N, V].
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.engines.probe import GraphName, Run
from export_grok.errors import RequestError
from export_grok.runtime.verify.free_run import Heard, lead
from export_grok.runtime.verify.steps import Step

__all__ = ["GOLDENS", "Goldens", "read_goldens"]

GOLDENS = "goldens.npz"

Arrays = dict[str, NDArray[Any]]

# Of a layer: its array, and what a tap is called.
_TAPS = {"expert_index": "experts", "expert_gate": "gates", "router_probs": "probabilities"}


def read_goldens(path: Path, config: GrokConfig) -> "Goldens":
    """Return the results in a file, as a probe and as what was heard.

    Raises:
        RequestError: it is missing, no such file, or of another model.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {
                name.removeprefix("f32/"): file[name]
                for name in file.files
                if name == "tokens" or name.startswith("f32/")
            }
    except FileNotFoundError as error:
        raise RequestError(
            f"there are no results of the original program: {path} is missing. Say where they "
            "are, --against FILE.npz, or compare with --against torch"
        ) from error
    except Exception as error:  # a damaged file raises what its bytes lead numpy to
        raise RequestError(f"{path} cannot be read as .npz: {error}") from error
    missing = {"tokens", "hidden", "prefill_logits", "decode_tokens", "decode_logits"} - {*arrays}
    if missing:
        raise RequestError(
            f"{path} has no {', '.join(sorted(missing))} of the original program in float32; "
            f"its arrays are {', '.join(sorted(arrays)) or 'of other names'}"
        )
    for name, shape in _shapes(config, arrays).items():
        if name in arrays and arrays[name].shape != shape:
            raise RequestError(
                f"{path} is of another model: the shape of its {name} is {arrays[name].shape}, of "
                f"this model it would be {shape}"
            )
    return Goldens(config=config, arrays=arrays)


def _shapes(config: GrokConfig, arrays: Arrays) -> dict[str, tuple[int, ...]]:
    """Return the shapes that all arrays must have beside prompts and answers of these lengths."""
    rows, length = (*arrays["tokens"].shape, 0, 0)[:2]
    decoded = (*arrays["decode_tokens"].shape, 0, 0)[1]
    layers = (rows, config.num_layers, length)
    cache = (rows, length, config.num_kv_heads, config.key_size)
    return {
        "tokens": (rows, length),
        "decode_tokens": (rows, decoded),
        "prefill_logits": (rows, length, config.vocab_size),
        "decode_logits": (rows, decoded, config.vocab_size),
        "hidden": (rows, config.num_layers + 1, length, config.emb_size),
        "expert_index": (*layers, config.num_selected_experts),
        "expert_gate": (*layers, config.num_selected_experts),
        "router_probs": (*layers, config.num_experts),
        **{f"kv_{end}_{letter}": cache for end in ("first", "last") for letter in "kv"},
    }


@dataclass(frozen=True, kw_only=True)
class Goldens:
    """The results of the original program; see `engines.probe.Probe`.

    As a probe it computes nothing: each graph gives what the original had there, for one step, the
    whole prompt of every row.

    Attributes:
        config: of the model.
        arrays: by their names less `f32/`.
        name: what ran.
        dtype: in which it computed.
    """

    config: GrokConfig
    arrays: Mapping[str, NDArray[Any]]
    name: str = "the original program, float32"
    dtype: Dtype = "float32"

    @property
    def rows(self) -> list[list[int]]:
        """The prompts, each with the tokens that were decoded after it."""
        prompts, answers = self.arrays["tokens"], self.arrays["decode_tokens"]
        rows: list[list[int]] = np.concatenate([prompts, answers], axis=1).tolist()
        return rows

    @property
    def decoded(self) -> int:
        """How many tokens of each row were decoded singly."""
        return int(self.arrays["decode_tokens"].shape[1])

    @property
    def steps(self) -> tuple[Step, ...]:
        """The one step whose inside is known: all prompts, whole."""
        tokens = self.arrays["tokens"].astype(np.int64)
        rows, length = tokens.shape
        return (
            Step(
                name="prefill",
                tokens=tokens,
                start=np.zeros(rows, np.int64),
                length=np.full(rows, length),
            ),
        )

    def heard(self, steps: tuple[Step, ...]) -> Heard:
        """Return the logits of all positions as if the steps had been said, and greedy answers."""
        logits = np.concatenate([self.arrays["prefill_logits"], self.arrays["decode_logits"]], 1)
        picked = []
        for step in steps:
            rows, places = np.nonzero(step.counts)
            picked.append(logits[rows, step.positions[rows, places]])
        length = self.arrays["tokens"].shape[1]
        before = logits[:, length - 1 : length - 1 + self.decoded]
        return Heard(
            logits=tuple(picked),
            greedy=self.arrays["decode_tokens"].astype(np.int64),
            margins=lead(before.reshape(-1, before.shape[-1])).reshape(before.shape[:2]),
        )

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        """Yield what gives the outputs of a graph, as far as they are known."""

        def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
            if name.kind == "embedding":
                return {"h": self.arrays["hidden"][:, 0]}
            if name.kind == "head":
                rows = np.arange(len(inputs["last"]))
                return {"logits": self.arrays["prefill_logits"][rows, inputs["last"]]}
            if name.kind == "head_all":
                return {"logits": self.arrays["prefill_logits"]}
            return self._layer(name.layer or 0, inputs)

        yield run

    def _layer(self, layer: int, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        found: Arrays = {"h_out": self.arrays["hidden"][:, layer + 1]}
        for array, tap in _TAPS.items():
            if array in self.arrays:
                found[tap] = self.arrays[array][:, layer]
        ends = {0: "first", self.config.num_layers - 1: "last"}
        for letter in ("k", "v"):
            array = f"kv_{ends.get(layer)}_{letter}"
            if array in self.arrays:
                cache = inputs[f"{letter}_cache"].copy()
                written = self.arrays[array].transpose(0, 2, 1, 3)
                cache[:, :, : written.shape[2]] = written
                found[f"{letter}_out"] = cache
        return found
