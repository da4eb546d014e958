"""What a request asks for: its prompt and parameters, out of Triton's tensors."""

from dataclasses import dataclass
from typing import Any

from export_grok.errors import RequestError
from export_grok.runtime.model import Prompt
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.triton_server.api import Request, Utils
from export_grok.runtime.triton_server.tensors import INPUTS, Port

__all__ = ["Asked", "read_request"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request.

    Attributes:
        prompt: text or token ids.
        params: how to continue it.
        stream: whether its pieces are wanted one by one; else the whole answer at its end.
    """

    prompt: Prompt
    params: GenerationParams
    stream: bool


def read_request(utils: Utils, request: Request) -> Asked:
    """Return what a request asks for: copies, as its tensors are gone behind `execute`.

    Raises:
        RequestError: there is not one prompt, a text is no UTF-8, or a value is out of range.
    """
    values = {
        port.name: _value(port, tensor.as_numpy().reshape(-1).tolist())
        for port in INPUTS
        if (tensor := utils.get_input_tensor_by_name(request, port.name)) is not None
    }
    prompts = [values[name] for name in ("text_input", "input_ids") if name in values]
    if len(prompts) != 1:
        said = "both text_input and input_ids" if prompts else "neither text_input nor input_ids"
        raise RequestError(f"the request has {said}; give one of them")
    params = {
        port.parameter: values[port.name]
        for port in INPUTS
        if port.parameter is not None and port.name in values
    }
    return Asked(
        prompt=prompts[0],
        params=GenerationParams(**params),
        stream=values.get("stream", False),
    )


def _value(port: Port, entries: list[Any]) -> Any:
    if port.data_type == "TYPE_STRING":
        entries = [_text(port.name, entry) for entry in entries]
    if port.many:
        return entries
    if len(entries) != 1:
        raise RequestError(f"{port.name} has {len(entries)} values; it takes one")
    return entries[0]


def _text(name: str, entry: bytes | str) -> str:
    if isinstance(entry, str):
        return entry
    try:
        return entry.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is no UTF-8 at byte {error.start}; encode the text as UTF-8"
        ) from error
