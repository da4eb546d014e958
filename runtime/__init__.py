"""Drives what `engines` built: prompt in, text out.

    from export_grok.runtime import GenerationParams, load

What is named here is loaded when it is asked for: the command line starts without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from export_grok.runtime.conversation import Conversation as Conversation
    from export_grok.runtime.handle import Handle as Handle
    from export_grok.runtime.handle import Piece as Piece
    from export_grok.runtime.handle import Result as Result
    from export_grok.runtime.model import Model as Model
    from export_grok.runtime.model import load as load
    from export_grok.runtime.observer import Load as Load
    from export_grok.runtime.observer import Observer as Observer
    from export_grok.runtime.observer import Usage as Usage
    from export_grok.runtime.params import GenerationParams as GenerationParams

_WHERE = {
    "Conversation": "conversation",
    "GenerationParams": "params",
    "Handle": "handle",
    "Load": "observer",
    "Model": "model",
    "Observer": "observer",
    "Piece": "handle",
    "Result": "handle",
    "Usage": "observer",
    "load": "model",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
