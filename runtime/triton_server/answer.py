"""What goes back: the tensors of a response, and the code of an error."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from export_grok.errors import BundleError, BusyError, ClosedError, RequestError
from export_grok.runtime.handle import Piece
from export_grok.runtime.observer import Usage
from export_grok.runtime.triton_server.api import Response, TritonTensor, Utils
from export_grok.runtime.triton_server.tensors import OUTPUTS

__all__ = ["Part", "error_response", "parts_of", "response"]

DTYPES: Final = {"TYPE_STRING": np.object_, "TYPE_INT64": np.int64, "TYPE_INT32": np.int32}
DTYPES_OF: Final = {port.name: DTYPES.get(port.data_type, np.float32) for port in OUTPUTS}

# Of errors that a request can be told; all others are the server's.
CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (RequestError, "INVALID_ARG"),
    (BusyError, "UNAVAILABLE"),
    (ClosedError, "UNAVAILABLE"),
    (BundleError, "UNSUPPORTED"),  # of a request: it asks for text, and there is no tokenizer
)


@dataclass(frozen=True)
class Part:
    """Pieces of an answer that go back as one response."""

    pieces: Sequence[Piece]

    @property
    def text(self) -> str:
        """Of all its pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def last(self) -> bool:
        """Whether the answer ends with it."""
        return self.pieces[-1].finish_reason is not None


def parts_of(pieces: Iterable[Piece], *, stream: bool, texts: bool) -> Iterator[Part]:
    """Yield an answer in parts.

    Args:
        pieces: of the answer, to its end.
        stream: a part for every piece with text, which takes the pieces before it along; else
            one for all.
        texts: whether the bundle has texts; if not, every piece is a part.
    """
    kept: list[Piece] = []
    for piece in pieces:
        kept.append(piece)
        if piece.finish_reason is not None or (stream and (piece.text or not texts)):
            yield Part(kept)
            kept = []


def response(utils: Utils, part: Part, usage: Usage) -> Response:
    """Return a part as a response. A tensor that would be empty is left out.

    Args:
        utils: Triton's.
        part: of an answer.
        usage: so far; told with the last part.
    """
    told = [piece for piece in part.pieces if piece.token is not None]
    logprobs = [piece.logprobs for piece in told if piece.logprobs is not None]
    values: dict[str, list[Any]] = {
        "text_output": [part.text.encode()],
        "output_ids": [piece.token for piece in told],
        "output_log_probs": [entry.logprob for entry in logprobs],
        "logprobs": [
            json.dumps({str(top.token): top.logprob for top in entry.top}).encode()
            for entry in logprobs
        ],
    }
    if part.last:
        values |= {
            "finish_reason": [str(part.pieces[-1].finish_reason).encode()],
            "num_input_tokens": [usage.prompt_tokens],
            "num_cached_tokens": [usage.cached_tokens],
            "num_output_tokens": [usage.new_tokens],
        }
    return utils.InferenceResponse(
        output_tensors=[
            _tensor(utils, name, entries) for name, entries in values.items() if entries
        ]
    )


def error_response(utils: Utils, error: Exception) -> Response:
    """Return an error as a response."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), "INTERNAL")
    return utils.InferenceResponse(
        error=utils.TritonError(str(error), getattr(utils.TritonError, code))
    )


def _tensor(utils: Utils, name: str, entries: list[Any]) -> TritonTensor:
    return utils.Tensor(name, np.array(entries, DTYPES_OF[name]))
