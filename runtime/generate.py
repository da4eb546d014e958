"""Text in, text out: a bundle with its tokenizer, answers streamed in whole characters."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import Bundle, open_bundle
from export_grok.engines.demand import Demand
from export_grok.errors import BundleError, RequestError
from export_grok.needs import OnNeeds
from export_grok.runtime.decode import CHUNK, FinishReason, Request, check_requests, decode
from export_grok.runtime.needs import session_needs
from export_grok.runtime.open import open_session
from export_grok.runtime.params import SamplingParams
from export_grok.runtime.tokenizer import StreamDecoder, Tokenizer

__all__ = ["Piece", "Usage", "stream", "tokenizer_of"]


GREEDY = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New text of one prompt.

    Attributes:
        row: number of the prompt.
        text: whole characters; may be empty while a character is incomplete.
        token: the id it came with; None for the end by a stop token.
        finished: why the answer ended here; None while it goes on.
    """

    row: int
    text: str
    token: int | None
    finished: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How long the last run of all prompts took.

    Attributes:
        load_seconds: from files to a session that can run.
        prefill_seconds: until the first tokens were there.
        decode_seconds: from there to the end.
        decoded_tokens: new tokens after the first of each prompt.
    """

    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decoded_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all rows together, the prompts' own time left out."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else 0.0


def tokenizer_of(bundle: Bundle) -> Tokenizer:
    """Return the bundle's tokenizer.

    Raises:
        BundleError: it has none, or one of more pieces than the model has.
    """
    if bundle.tokenizer is None:
        raise BundleError(
            f"{bundle.folder} has no tokenizer.model; put it beside the checkpoint and build again"
        )
    tokenizer = Tokenizer(bundle.tokenizer)
    if tokenizer.vocab_size > bundle.config.vocab_size:
        raise BundleError(
            f"{bundle.tokenizer} has {tokenizer.vocab_size} pieces, the model knows "
            f"{bundle.config.vocab_size}: it is the tokenizer of another model"
        )
    return tokenizer


def stream(
    folder: Path,
    prompts: Sequence[str],
    *,
    sampling: Sequence[SamplingParams] | SamplingParams = GREEDY,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
    on_needs: OnNeeds = lambda needs: None,
    on_usage: Callable[[Usage], None] = lambda usage: None,
) -> Iterator[Piece]:
    """Yield the answers to all prompts, piece by piece as they are made.

    Args:
        folder: of a bundle.
        prompts: texts to continue, run together in one batch.
        sampling: how to choose tokens, for all or for each.
        max_new_tokens: longest answer; to the end of the cache by default.
        max_length: longest prompt and answer together; the model's own limit by default.
        threads: to compute with; as many as there are cores by default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.
        on_needs: gets what that needs at the most, before anything is loaded.
        on_usage: gets the times at the end.

    Raises:
        BundleError: the bundle is unfinished or damaged.
        ConfigError: it is for another number of ranks.
        RankError: one of its ranks died or stalled.
        RequestError: there is no prompt, or one is empty or does not fit the cache.
    """
    if not prompts:
        raise RequestError("there is no prompt; give one or more")
    began = time.perf_counter()
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    tokenizer = tokenizer_of(bundle)
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    requests = [
        Request(
            prompt=tuple(tokenizer.encode(prompt)),
            sampling=params,
            max_new_tokens=max_new_tokens,
            stop=frozenset({bundle.config.eos_token}),
        )
        for prompt, params in zip(prompts, each, strict=True)
    ]
    length = _cache_length(bundle, requests, max_length)
    check_requests(requests, batch=len(requests), max_length=length)
    prefill = max(len(request.prompt) for request in requests)
    demand = Demand(
        batch=len(requests),
        max_length=length,
        prefill=prefill,
        decode=min(length - prefill, max_new_tokens or length),
        chunk=CHUNK,
        threads=threads,
    )
    on_needs(session_needs(bundle, demand, tensor_parallel=tensor_parallel))
    decoders = [StreamDecoder(tokenizer, request.prompt) for request in requests]
    made = 0
    begun: set[int] = set()
    with open_session(
        bundle,
        batch=len(requests),
        max_length=length,
        threads=threads,
        tensor_parallel=tensor_parallel,
    ) as session:
        loaded = first = time.perf_counter()
        for step in decode(session, requests):
            if not made:
                first = time.perf_counter()
            text = ""
            if step.token is not None:
                made += 1
                begun.add(step.row)
                text = decoders[step.row].push(step.token)
            if step.finished:
                text += decoders[step.row].finish()
            yield Piece(row=step.row, text=text, token=step.token, finished=step.finished)
        ended = time.perf_counter()
    on_usage(
        Usage(
            load_seconds=loaded - began,
            prefill_seconds=first - loaded,
            decode_seconds=ended - first,
            decoded_tokens=made - len(begun),
        )
    )


def _cache_length(bundle: Bundle, requests: Sequence[Request], asked: int | None) -> int:
    """Return the slots a row needs: no more than the longest request, if that has an end."""
    trained = bundle.config.sequence_len
    if asked is not None:
        if not 1 <= asked <= trained:
            raise RequestError(f"max_length is {asked}; this model takes 1 to {trained} tokens")
        return asked
    if any(request.max_new_tokens is None for request in requests):
        return trained
    return min(trained, max(len(r.prompt) + (r.max_new_tokens or 0) for r in requests))
