"""What is used of `triton_python_backend_utils`, the module that Triton's Python backend gives.

Only the process that Triton starts for a model has it. Sources: triton-inference-server/
python_backend at f9088ff, README.md ("Decoupled mode", "Error Handling", "Request Cancellation
Handling") and src/pb_stub.cc (names and arguments).
"""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from numpy.typing import NDArray

__all__ = ["Errors", "Log", "Request", "Response", "Sender", "TritonTensor", "Utils", "utils"]


class TritonTensor(Protocol):
    """An input or output."""

    def name(self) -> str:
        """Return its name."""

    def as_numpy(self) -> NDArray[Any]:
        """Return its values; of TYPE_STRING, objects that are bytes."""


class Response(Protocol):
    """What is sent: tensors, or an error."""


class Sender(Protocol):
    """The way back to who asked. It may be used by any thread."""

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        """Send a response; the last one, and no other, with COMPLETE_FINAL for flags."""

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the answer any more. Ask it before the last response."""


class Request(Protocol):
    """What was asked."""

    def request_id(self) -> str:
        """Return what the client calls it; may be empty, and is not unique."""

    def get_response_sender(self) -> Sender:
        """Return the way back."""


class Errors(Protocol):
    """`TritonError`: makes an error of a text and one of its codes."""

    INTERNAL: Any
    INVALID_ARG: Any
    UNAVAILABLE: Any
    UNSUPPORTED: Any
    CANCELLED: Any

    def __call__(self, message: str, code: Any) -> object:
        """Return the error."""


class Log(Protocol):
    """`Logger`: Triton's log."""

    def log_error(self, message: str) -> None:
        """Write a line."""


class Utils(Protocol):
    """The module."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int
    TritonError: Errors
    TritonModelException: type[Exception]
    Logger: Log

    def Tensor(self, name: str, values: NDArray[Any], /) -> TritonTensor:  # noqa: N802 (Triton's name)
        """Return an output."""

    def InferenceResponse(  # noqa: N802 (Triton's name)
        self, output_tensors: Sequence[TritonTensor] = ..., error: object = ...
    ) -> Response:
        """Return a response."""

    def get_input_tensor_by_name(
        self, inference_request: Request, name: str
    ) -> TritonTensor | None:
        """Return an input of a request; None if it was not given."""

    def get_model_dir(self) -> str:
        """Return the folder that `model.py` is in."""


def utils() -> Utils:
    """Return the module."""
    return cast(Utils, importlib.import_module("triton_python_backend_utils"))
