"""A bundle that answers: load it, hand it prompts from any thread, take text as it is made."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from export_grok.artifacts import Bundle, open_bundle
from export_grok.engines.demand import Demand
from export_grok.errors import BundleError, ExportGrokError, RequestError
from export_grok.needs import OnNeeds
from export_grok.runtime.admission import Limits
from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.batch import CHUNK
from export_grok.runtime.conversation import Conversation
from export_grok.runtime.engine_thread import EngineThread
from export_grok.runtime.handle import Handle, Piece, Result
from export_grok.runtime.needs import session_needs
from export_grok.runtime.observer import Load, Observer, Observers, Usage
from export_grok.runtime.open import open_session
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.request import Request, request_of
from export_grok.runtime.text.tokenizer import Tokenizer, tokenizer_of
from export_grok.runtime.work import Work

__all__ = ["BATCH", "Model", "Prompt", "load"]

Prompt = str | Sequence[int]

GREEDY = GenerationParams()

# Requests that run at once if neither the caller nor the engine says how many.
BATCH = 8


def load(
    folder: Path | str,
    *,
    batch: int | None = None,
    max_length: int | None = None,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
    chunk: int = CHUNK,
    max_waiting: int = 64,
    max_waiting_tokens: int | None = None,
    observers: Sequence[Observer] = (),
    prefill: int | None = None,
    decode: int = 0,
    on_needs: OnNeeds = lambda needs: None,
) -> "Model":
    """Return the model of a bundle, loaded; close it, or use it as a context manager.

    Args:
        folder: of a bundle with an engine.
        batch: requests that run at once, each in a row of the cache; as many as the plans of a
            GPU are for, or 8, by default.
        max_length: longest prompt and answer together, in tokens; what the plans are for, or the
            model's own limit, by default. Memory is taken as rows are filled.
        threads: to compute with; as many as there are cores by default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.
        chunk: tokens of prompts that go through the layers at once. Others wait so long for their
            next token: smaller is smoother, larger reads weights less often.
        max_waiting: requests that may wait for a row; more are refused.
        max_waiting_tokens: tokens of their prompts together; any number by default.
        observers: of all that happens: metrics, logs.
        prefill: longest prompt that it will be asked, for the needs; by default a full row.
        decode: longest answer, for the needs.
        on_needs: gets what that needs at the most, before anything is loaded.

    Raises:
        BundleError: the bundle is unfinished or damaged.
        ConfigError: it is for another number of ranks, or a number is out of range.
        RankError: one of its ranks died or stalled.
        RequestError: `max_length` or a limit is out of range.
    """
    bundle = open_bundle(Path(folder), kind="engine", weights_root=weights_root)
    tokenizer = tokenizer_of(bundle) if bundle.tokenizer is not None else None
    longest = bundle.sizes.get("max_length", bundle.config.sequence_len)
    length = longest if max_length is None else max_length
    rows = bundle.sizes.get("batch", BATCH) if batch is None else batch
    if not 1 < length <= longest:
        raise RequestError(f"max_length is {length}; this model takes 2 to {longest} tokens")
    limits = Limits(
        batch=rows, chunk=chunk, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens
    )
    demand = Demand(
        batch=rows,
        max_length=length,
        prefill=length - 1 if prefill is None else prefill,
        decode=decode,
        chunk=max(1, chunk // rows),  # a chunk is of all rows together
        threads=threads,
    )
    on_needs(session_needs(bundle, demand, tensor_parallel=tensor_parallel))
    observer = Observers(observers)
    engine = EngineThread(
        lambda: open_session(
            bundle,
            batch=rows,
            max_length=length,
            threads=threads,
            tensor_parallel=tensor_parallel,
        ),
        limits=limits,
        observer=observer,
    )
    return Model(
        bundle, engine, tokenizer=tokenizer, batch=rows, max_length=length, observer=observer
    )


class Model:
    """A loaded model. Any thread may call any of this, at any time.

    Made by `load`. Requests that are submitted share the engine: each gets a row of the cache when
    one is free, first come, first served, and its answer is what it would be alone.

    Attributes:
        bundle: that it was loaded from.
        config: of the model.
        batch: requests that run at once.
        max_length: longest prompt and answer together, in tokens.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: EngineThread,
        *,
        tokenizer: Tokenizer | None,
        batch: int,
        max_length: int,
        observer: Observer,
    ) -> None:
        self.bundle = bundle
        self.config = bundle.config
        self.batch = batch
        self.max_length = max_length
        self._engine = engine
        self._tokenizer = tokenizer
        self._observer = observer
        self._numbers = itertools.count(1)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the bundle's tokenizer.

        Raises:
            BundleError: it has none: prompts must be token ids, and answers have no text.
        """
        if self._tokenizer is None:
            return tokenizer_of(self.bundle)  # raises
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] = GREEDY,
    ) -> list[Result]:
        """Return the answers to prompts, in their order.

        Args:
            prompts: texts, or sequences of token ids; any number. A text is one prompt.
            params: how to continue them, for all or for each.

        Raises:
            ExportGrokError: an error ended one; the others are cancelled.
            RequestError: a prompt is empty or does not fit, or there are not as many `params`.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [params] * len(prompts) if isinstance(params, GenerationParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts have {len(each)} params; give one for all, or as many"
            )
        handles: list[Handle] = []
        try:
            for prompt, how in zip(prompts, each, strict=True):
                handles.append(self.submit(prompt, how, wait=True))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def stream(self, prompt: Prompt, params: GenerationParams = GREEDY) -> Iterator[Piece]:
        """Yield the pieces of an answer as they are made; it is cancelled if nobody takes them.

        Raises:
            ExportGrokError: an error ended it; raised behind the last piece.
            RequestError: the prompt is empty or does not fit.
        """
        handle = self.submit(prompt, params, wait=True)
        try:
            yield from handle
        finally:
            handle.cancel()

    def submit(
        self,
        prompt: Prompt,
        params: GenerationParams = GREEDY,
        *,
        wait: bool = False,
        timeout: float | None = None,
        name: str | None = None,
    ) -> Handle:
        """Begin to answer a prompt, and return at once what gives the answer.

        Args:
            prompt: text or token ids.
            params: how to continue it.
            wait: for room, if as many requests wait as may.
            timeout: seconds to wait for it; without end by default.
            name: id for logs and results; a number by default.

        Raises:
            BusyError: there is no room, or none after the timeout.
            ClosedError: the model is closed, or an error of its engine ended it.
            RequestError: the prompt is empty or does not fit.
        """
        try:
            work = self._work(self._request(prompt, params), params, name)
            return self._engine.submit(work, wait=wait, timeout=timeout)
        except ExportGrokError as error:
            self._observer.refused(error)
            raise

    def conversation(self) -> Conversation:
        """Return a conversation without a turn."""
        return Conversation(self)

    def current_load(self) -> Load:
        """Return how busy the model is."""
        return self._engine.load()

    def close(self) -> None:
        """Cancel all that is under way and let the engine go. May be called again."""
        self._engine.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: GenerationParams) -> Request:
        if isinstance(prompt, int):
            raise RequestError(
                f"a prompt is {prompt}, a single token; give texts, or a sequence of ids for each"
            )
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        known = self.config if self._tokenizer is None else self._tokenizer
        request = request_of(
            tokens, params, self.config, known=known.vocab_size, max_length=self.max_length
        )
        if params.stop and self._tokenizer is None:
            raise BundleError(
                f"{self.bundle.folder} has no tokenizer.model, so its answers have no text for "
                "stop strings; put it beside the checkpoint and build again"
            )
        return request

    def _work(self, request: Request, params: GenerationParams, name: str | None) -> Work:
        usage = Usage(prompt_tokens=len(request.prompt))
        return Work(
            Answer(request, self.max_length),
            Handle(name or str(next(self._numbers)), usage, self._engine.cancel),
            tokenizer=self._tokenizer,
            stop=params.stop,
        )
