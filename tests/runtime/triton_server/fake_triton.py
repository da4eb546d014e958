"""What Triton's Python backend gives a model, made up: strict where the real one is, or crashes.

By triton-inference-server/python_backend at f9088ff: names and arguments of src/pb_stub.cc, what a
response sender refuses of src/response_sender.cc, and types of tensors of
src/resources/triton_python_backend_utils.py.
"""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.runtime.triton_server.tensors import INPUTS, OUTPUTS

__all__ = [
    "TYPES",
    "FakeError",
    "FakeModelError",
    "FakeRequest",
    "FakeResponse",
    "FakeSender",
    "FakeTensor",
    "FakeUtils",
    "installed",
]

TYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP32": np.float32,
    "TYPE_STRING": np.object_,
}
OUTPUT_OF = {port.name: port for port in OUTPUTS}
INPUT_OF = {port.name: port for port in INPUTS}
FINAL = 1


class FakeTensor:
    """An input or an output."""

    def __init__(self, name: str, values: NDArray[Any], /) -> None:
        assert isinstance(values, np.ndarray)
        self._name, self._values = name, values

    def name(self) -> str:
        """See the real one."""
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """See the real one."""
        return self._values


class FakeError:
    """`TritonError`."""

    INTERNAL = "INTERNAL"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        assert isinstance(message, str)
        self.text, self.kind = message, code


class FakeModelError(Exception):
    """`TritonModelException`."""


class FakeResponse:
    """`InferenceResponse`: every output is as the configuration declares it."""

    def __init__(
        self, output_tensors: Sequence[FakeTensor] = (), error: FakeError | None = None
    ) -> None:
        self.error = error
        self.outputs: dict[str, list[Any]] = {}
        for tensor in output_tensors:
            port, values = OUTPUT_OF[tensor.name()], tensor.as_numpy()
            assert values.dtype == TYPES[port.data_type], port
            assert values.ndim == 1 and values.flags.c_contiguous
            assert len(values) > 0 if port.many else len(values) == 1, port
            if port.data_type == "TYPE_STRING":
                assert all(type(value) is bytes for value in values)
                self.outputs[port.name] = [value.decode() for value in values]
            else:
                self.outputs[port.name] = values.tolist()


@dataclass
class FakeSender:
    """`InferenceResponseSender`. What the real one would crash at is a fault that tests look at.

    Attributes:
        responses: that were sent.
        ended: set with the last one.
        cancelled: what the client did.
        breaks: how many responses go through before the server is gone; None for all.
        faults: what must not be.
        looks: how often it was asked whether it is cancelled.
    """

    responses: list[FakeResponse] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    breaks: int | None = None
    faults: list[str] = field(default_factory=list)
    looks: int = 0

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        """See the real one."""
        if self.breaks is not None and len(self.responses) >= self.breaks:
            raise FakeModelError("Failed to send")
        if self.ended.is_set():
            self.faults.append("Response sender has been closed.")
        if flags not in (0, FINAL) or (response is None and not flags):
            self.faults.append("Unable to send response.")
        if response is not None:
            self.responses.append(response)
        if flags:
            self.ended.set()

    def is_cancelled(self) -> bool:
        """See the real one, which looks at memory that is freed with the last response."""
        self.looks += 1
        if self.ended.is_set():
            self.faults.append("is_cancelled behind the last response")
        return self.cancelled

    def wait(self) -> list[FakeResponse]:
        """Return all responses once the last one is there."""
        assert self.ended.wait(20), "there is no last response"
        assert self.faults == []
        return self.responses

    @property
    def text(self) -> str:
        """All text that was sent."""
        return "".join("".join(each.outputs["text_output"]) for each in self.responses)


class FakeRequest:
    """`InferenceRequest`, of inputs by name."""

    def __init__(self, sender: FakeSender | None = None, **inputs: Any) -> None:
        self.sender = sender or FakeSender()
        self._id = ""
        self._tensors = {}
        for name, value in inputs.items():
            port = INPUT_OF[name]
            entries = list(value) if port.many else [value]
            if port.data_type == "TYPE_STRING":
                entries = [e.encode() if isinstance(e, str) else e for e in entries]
            array: NDArray[Any] = np.array(entries, TYPES[port.data_type])
            self._tensors[name] = FakeTensor(name, array)

    def inputs(self) -> list[FakeTensor]:
        """See the real one."""
        return list(self._tensors.values())

    def request_id(self) -> str:
        """See the real one."""
        return self._id

    def get_response_sender(self) -> FakeSender:
        """See the real one."""
        return self.sender

    def free(self) -> None:
        """Make the inputs what they are behind `execute`: other memory."""
        for tensor in self._tensors.values():
            values = tensor.as_numpy()
            values[...] = b"\xff" if values.dtype == np.object_ else 1


class FakeUtils:
    """The module `triton_python_backend_utils`.

    Attributes:
        log: lines of errors.
        folder: of `model.py`.
    """

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonError = FakeError
    TritonModelException = FakeModelError
    Tensor = FakeTensor
    InferenceResponse = FakeResponse

    def __init__(self, folder: str) -> None:
        self.log: list[str] = []
        self.folder = folder
        self.Logger = self

    def log_error(self, message: str) -> None:
        """See the real one."""
        self.log.append(message)

    def get_model_dir(self) -> str:
        """See the real one."""
        return self.folder

    @staticmethod
    def get_input_tensor_by_name(inference_request: FakeRequest, name: str) -> FakeTensor | None:
        """See the real one."""
        found = [each for each in inference_request.inputs() if each.name() == name]
        return found[0] if found else None


def installed(patch: pytest.MonkeyPatch, folder: object) -> FakeUtils:
    """Return the module, which can be imported from now on."""
    utils = FakeUtils(str(folder))
    patch.setitem(sys.modules, "triton_python_backend_utils", utils)
    return utils
