"""Answers on a terminal: each streamed as it is made, the first one first; then what it took."""

import json
import sys
import time
from collections.abc import Sequence

from export_grok.errors import ExportGrokError
from export_grok.needs import OnNeeds
from export_grok.runtime.answer_fields import answer_fields, error_fields, usage_fields
from export_grok.runtime.handle import Handle, Result
from export_grok.runtime.model_to_load import ModelToLoad, Reach
from export_grok.runtime.params import GenerationParams

__all__ = ["print_answers", "usage_line"]


def print_answers(
    model: ModelToLoad,
    texts: Sequence[str],
    params: Sequence[GenerationParams],
    *,
    batch: int | None = None,
    as_json: bool = False,
    on_needs: OnNeeds = lambda needs: None,
) -> None:
    """Print the answers to stdout in the order of their prompts, and what they took to stderr.

    Args:
        model: that is loaded for them.
        texts: prompts, one or more.
        params: how to continue each.
        batch: rows that run at once; up to 8 by default.
        as_json: print one JSON object a prompt instead, with all of it.
        on_needs: gets what that needs, before anything is loaded.

    Raises:
        ExportGrokError: some answers ended by an error; said when all are at their end.
        RequestError: a prompt is empty or does not fit, or a parameter does not fit the model.
    """
    prompts = [model.tokenizer.encode(text) for text in texts]
    names = ["the prompt"] if len(texts) == 1 else [f"prompt {n + 1}" for n in range(len(texts))]
    reach = Reach.over(list(map(model.check, prompts, params, names)))
    began = time.perf_counter()
    with model.load(
        reach,
        batch=model.batch(batch, len(prompts)),
        max_waiting=len(prompts),
        on_needs=on_needs,
    ) as loaded:
        load_seconds = time.perf_counter() - began
        handles = list(map(loaded.submit, prompts, params))
        if as_json:
            for text, handle in zip(texts, handles, strict=True):
                print(_json(text, handle, load_seconds), flush=True)
        else:
            _print_texts(handles, load_seconds)
    errors = {
        name: handle.error for name, handle in zip(names, handles, strict=True) if handle.error
    }
    if errors:
        raise _told(errors, len(handles))


def usage_line(result: Result) -> str:
    """Return in a few words what an answer took."""
    usage = result.usage
    cached = f" ({usage.cached_tokens} of them in the cache)" if usage.cached_tokens else ""
    return (
        f"{usage.new_tokens} tokens ({result.finish_reason}); {usage.tokens_per_second:.1f} "
        f"tokens/s, the first after {usage.first_token_seconds:.2f} s; prompt of "
        f"{usage.prompt_tokens} tokens{cached}"
    )


def _print_texts(handles: Sequence[Handle], load_seconds: float) -> None:
    try:
        for number, handle in enumerate(handles):
            print("\n\n" if number else "", end="")
            for piece in handle.pieces():
                print(piece.text, end="", flush=True)
    finally:
        print(flush=True)  # Ctrl-C or not, what follows begins a line
    for handle in handles:
        print(usage_line(handle.partial()), file=sys.stderr)
    print(f"loaded in {load_seconds:.2f} s", file=sys.stderr)


def _json(text: str, handle: Handle, load_seconds: float) -> str:
    for _ in handle.pieces():
        pass
    answer = {"prompt": text, **answer_fields(handle.partial())}
    if handle.error is not None:
        answer["error"] = error_fields(handle.error)
    answer |= {"usage": usage_fields(handle.usage), "load_seconds": load_seconds}
    return json.dumps(answer, ensure_ascii=False)


def _told(errors: dict[str, ExportGrokError], answers: int) -> ExportGrokError:
    """Return one error for all; those that say the same, as of an engine that died, once."""
    if answers == 1:
        return next(iter(errors.values()))
    by_text: dict[str, list[str]] = {}
    for name, error in errors.items():
        by_text.setdefault(str(error), []).append(name)
    lines = [f"{', '.join(names)}: {text}" for text, names in by_text.items()]
    return ExportGrokError(
        "\n  ".join([f"{len(errors)} of {answers} answers ended by an error:", *lines])
    )
