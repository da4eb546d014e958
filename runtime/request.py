"""What is asked for, in tokens: a prompt and how to continue it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from export_grok.config import GrokConfig
from export_grok.errors import RequestError
from export_grok.runtime.params import GenerationParams, SamplingParams

__all__ = ["Request", "check_room", "request_of"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: token ids, one or more.
        sampling: how to choose tokens.
        max_new_tokens: longest answer; as long as the cache allows by default.
        stop: ids that end the answer and are not part of it.

    Raises:
        RequestError: the prompt is empty, or a limit below 1.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens; give at least one character")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")

    def limit(self, max_length: int) -> int:
        """Return how long the answer may be in a cache of `max_length` tokens."""
        room = max_length - len(self.prompt)
        return room if self.max_new_tokens is None else min(room, self.max_new_tokens)


def request_of(
    prompt: Sequence[int],
    params: GenerationParams,
    config: GrokConfig,
    *,
    known: int,
    max_length: int,
    name: str = "the prompt",
) -> Request:
    """Return a request, held to the model that is to answer it.

    Args:
        prompt: token ids.
        params: how to continue it.
        config: of the model.
        known: ids that there are, of the model or of its tokenizer.
        max_length: tokens of a row of the cache.
        name: of the prompt, for messages.

    Raises:
        RequestError: the prompt is empty or does not fit, or an id is outside the vocabulary.
    """
    request = Request(
        prompt=tuple(map(int, prompt)),
        sampling=params,
        max_new_tokens=params.max_new_tokens,
        stop=frozenset() if params.ignore_eos else frozenset({config.eos_token}),
    )
    bad = next((token for token in request.prompt if not 0 <= token < known), None)
    if bad is not None:
        raise RequestError(f"{name} has token id {bad}; this model knows 0 to {known - 1}")
    params.check_vocabulary(config.vocab_size)
    check_room(request, max_length, name=name)
    return request


def check_room(request: Request, max_length: int, *, name: str = "the prompt") -> None:
    """Hold a prompt to the cache: prompt and answer together are no longer than it.

    Raises:
        RequestError: there is no room for an answer of one token.
    """
    if len(request.prompt) >= max_length:
        raise RequestError(
            f"{name} has {len(request.prompt)} tokens; a cache of {max_length} takes "
            f"{max_length - 1} and an answer of one: shorten the prompt or raise max_length"
        )
