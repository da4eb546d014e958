"""What C hands in as values of the runtime, and values as what C gets: by cffi's structures."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_grok.errors import ConfigError, RequestError
from export_grok.runtime.c_library.status import FINISHES, ArgumentError
from export_grok.runtime.handle import Piece
from export_grok.runtime.params import MOST_STOP_STRINGS, GenerationParams

__all__ = ["fill_piece", "options_of", "params_of", "path_of", "text_of", "tokens_of"]


def text_of(ffi: Any, string: Any, name: str) -> str:
    """Return the text of a C string.

    Raises:
        ArgumentError: it is NULL, or no UTF-8.
    """
    if string == ffi.NULL:
        raise ArgumentError(f"{name} is NULL; it must be a string")
    raw: bytes = ffi.string(string)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{name} is no UTF-8: {error.reason} at byte {error.start}; encode it"
        ) from error


def path_of(ffi: Any, string: Any, name: str) -> Path:
    """Return the path that a C string is, whatever encoding a host's interpreter has for files.

    Raises:
        ArgumentError: it is no UTF-8.
    """
    return Path(os.fsdecode(text_of(ffi, string, name).encode()))


def tokens_of(ffi: Any, tokens: Any, count: int, most: int) -> list[int]:
    """Return the token ids of an array.

    Raises:
        RequestError: it has more than `most`; a wrong count reads no memory of others.
    """
    if count > most:
        raise RequestError(f"the prompt has {count} tokens; this model takes at most {most}")
    return ffi.unpack(tokens, count) if count else []


def options_of(ffi: Any, options: Any) -> dict[str, Any]:
    """Return the arguments of `load` that an `eg_options` stands for.

    Raises:
        ArgumentError: the path is no UTF-8.
        ConfigError: a number is below 0.
    """
    numbers = {
        name: getattr(options, name)
        for name in ("batch", "max_length", "threads", "tensor_parallel", "chunk")
    }
    faults = [f"{name} is {number}" for name, number in numbers.items() if number < 0]
    if options.max_waiting < -1:
        faults.append(f"max_waiting is {options.max_waiting}")
    if faults:
        raise ConfigError(
            f"{', '.join(faults)}; it must not be negative (max_waiting: -1 is the default)"
        )
    chosen: dict[str, Any] = {name: number for name, number in numbers.items() if number}
    if options.max_waiting >= 0:
        chosen["max_waiting"] = options.max_waiting
    if options.weights_root != ffi.NULL:
        chosen["weights_root"] = path_of(ffi, options.weights_root, "weights_root")
    return chosen


def params_of(ffi: Any, params: Any, vocab_size: int) -> GenerationParams:
    """Return what an `eg_params` stands for.

    Raises:
        ArgumentError: an array is NULL and has a length, or a stop string is no UTF-8.
        RequestError: a value is out of range.
    """
    return GenerationParams(
        max_new_tokens=params.max_new_tokens or None,
        top_k=params.top_k,
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        ignore_eos=bool(params.ignore_eos),
        logprobs=None if params.logprobs == -1 else params.logprobs,
        stop=_stop_of(ffi, params),
        logit_bias=_bias_of(ffi, params, vocab_size),
    )


def _stop_of(ffi: Any, params: Any) -> tuple[str, ...]:
    count = _count(ffi, params.stop, params.stop_count, "stop", MOST_STOP_STRINGS)
    return tuple(text_of(ffi, params.stop[at], f"stop[{at}]") for at in range(count))


def _bias_of(ffi: Any, params: Any, vocab_size: int) -> Mapping[int, float]:
    count = _count(ffi, params.bias, params.bias_count, "bias", vocab_size)
    return {params.bias[at].token: params.bias[at].value for at in range(count)}


def _count(ffi: Any, array: Any, count: int, name: str, most: int) -> int:
    if count and array == ffi.NULL:
        raise ArgumentError(f"{name} is NULL and {name}_count is {count}; give both, or neither")
    if count > most:
        raise RequestError(f"{name}_count is {count}; it must be at most {most}")
    return count


def fill_piece(ffi: Any, piece: Piece, out: Any) -> tuple[Any, ...]:
    """Write a piece to an `eg_piece`; return the memory that it points at, to be kept."""
    raw = piece.text.encode()
    text = ffi.new("char[]", raw)  # with a zero behind it
    out.text, out.length = text, len(raw)
    out.token = -1 if piece.token is None else piece.token
    out.finish = FINISHES[piece.finish_reason]
    if piece.logprobs is None:
        return (text,)
    out.logprob = piece.logprobs.logprob
    top = ffi.new("eg_logprob[]", [(each.token, each.logprob) for each in piece.logprobs.top])
    out.top, out.top_count = top, len(piece.logprobs.top)
    return text, top
