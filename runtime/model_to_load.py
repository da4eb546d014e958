"""A model before it is loaded: what requests are held to, and how much of it they need."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import Bundle, read_bundle
from export_grok.errors import RequestError
from export_grok.needs import OnNeeds
from export_grok.runtime.model import BATCH, Model, load
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.request import request_of
from export_grok.runtime.text.tokenizer import Tokenizer, tokenizer_of

__all__ = ["ModelToLoad", "Reach"]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far a request goes: tokens of its prompt, and of prompt and longest answer together."""

    prompt: int
    whole: int

    @classmethod
    def over(cls, reaches: Sequence["Reach"]) -> "Reach":
        """Return the farthest of each; of no request, the least there can be."""
        return cls(
            prompt=max((reach.prompt for reach in reaches), default=1),
            whole=max((reach.whole for reach in reaches), default=2),
        )


@dataclass(frozen=True, kw_only=True)
class ModelToLoad:
    """A bundle, and how it is to be loaded.

    Attributes:
        bundle: whose manifest was read; its other files are checked when it is loaded.
        tokenizer: of it.
        max_length: longest prompt and answer together, in tokens.
        threads: to compute with; as many as there are cores by default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    max_length: int
    threads: int | None = None
    tensor_parallel: int | None = None
    weights_root: Path | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        *,
        max_length: int | None = None,
        threads: int | None = None,
        tensor_parallel: int | None = None,
        weights_root: Path | None = None,
    ) -> "ModelToLoad":
        """Return that of a folder; `max_length` is the model's own limit by default.

        Raises:
            BundleError: it is no bundle, has no engine or no tokenizer, or another model's.
            RequestError: `max_length` is out of range.
        """
        bundle = read_bundle(folder, kind="engine", weights_root=weights_root)
        most = bundle.sizes.get("max_length", bundle.config.sequence_len)
        length = most if max_length is None else max_length
        if not 1 < length <= most:
            raise RequestError(f"max_length is {length}; this model takes 2 to {most} tokens")
        return cls(
            bundle=bundle,
            tokenizer=tokenizer_of(bundle),
            max_length=length,
            threads=threads,
            tensor_parallel=tensor_parallel,
            weights_root=weights_root,
        )

    def check(self, prompt: Sequence[int], params: GenerationParams, name: str) -> Reach:
        """Return how far a request goes, once it is held to the model.

        Args:
            prompt: token ids.
            params: how it is answered.
            name: of the prompt, for messages.

        Raises:
            RequestError: the prompt is empty, does not fit, or an id is outside the vocabulary.
        """
        request = request_of(
            prompt,
            params,
            self.bundle.config,
            known=self.tokenizer.vocab_size,
            max_length=self.max_length,
            name=name,
        )
        return Reach(prompt=len(prompt), whole=len(prompt) + request.limit(self.max_length))

    def batch(self, asked: int | None, requests: int) -> int:
        """Return the rows for so many requests: those asked for, else 8 or as few as will do.

        Plans are for one number of rows.
        """
        if asked is not None:
            return asked
        return self.bundle.sizes.get("batch") or max(1, min(requests, BATCH))

    def load(self, reach: Reach, *, batch: int, max_waiting: int, on_needs: OnNeeds) -> Model:
        """Return the model, loaded with a cache no longer than requests reach.

        Args:
            reach: over all requests.
            batch: rows that run at once.
            max_waiting: requests that may wait for a row.
            on_needs: gets what `batch` requests need, before anything is loaded.

        Raises:
            BundleError: the bundle is unfinished or damaged.
            ConfigError: it is for another number of ranks, or a number is out of range.
            RankError: one of its ranks died or stalled.
        """
        return load(
            self.bundle.folder,
            batch=batch,
            max_length=reach.whole,
            threads=self.threads,
            tensor_parallel=self.tensor_parallel,
            weights_root=self.weights_root,
            max_waiting=max_waiting,
            prefill=reach.prompt,
            decode=reach.whole - reach.prompt,
            on_needs=on_needs,
        )
