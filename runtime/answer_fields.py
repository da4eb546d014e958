"""An answer as the fields of a JSON object."""

import dataclasses
from typing import Any

from export_grok.runtime.handle import Result
from export_grok.runtime.observer import Usage
from export_grok.runtime.sampling.logprobs import TokenLogprobs

__all__ = ["answer_fields", "error_fields", "usage_fields"]


def answer_fields(result: Result) -> dict[str, Any]:
    """Return text, tokens, why it ended, and `logprobs` if they were asked for.

    These are one object a token: its own `logprob`, and `top`, the most probable tokens.
    """
    fields: dict[str, Any] = {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
    }
    if result.logprobs is not None:
        fields["logprobs"] = [_logprob_fields(logprobs) for logprobs in result.logprobs]
    return fields


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return what a request took: tokens, and seconds."""
    return {**dataclasses.asdict(usage), "tokens_per_second": usage.tokens_per_second}


def error_fields(error: Exception) -> dict[str, str]:
    """Return which error it is, and what it says."""
    return {"type": type(error).__name__, "message": str(error)}


def _logprob_fields(logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "logprob": logprobs.logprob,
        "top": [{"token": each.token, "logprob": each.logprob} for each in logprobs.top],
    }
