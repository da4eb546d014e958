"""What is wrong, in words for who ports a model: where, by how much, and where to look."""

import math
from collections.abc import Sequence

from export_grok.engines.probe import GraphName
from export_grok.runtime.verify.result import Deviation, GraphResult, Verification
from export_grok.runtime.verify.wording import (
    counted,
    digits,
    error_words,
    number,
    pair,
    percent,
    place_words,
)

__all__ = ["MADE_BY", "MEANING", "finding", "headline"]

# In the order of computing.
MEANING = {
    "h": "the embedding of the tokens",
    "k_out": "the cache of keys, rotated",
    "v_out": "the cache of values",
    "heads": "what attention gives, before its output matrix",
    "attention": "what attention gives, after its output matrix",
    "experts": "which experts a token goes to",
    "gates": "the weights of a token's experts",
    "moe": "what the experts give, added up by their gates",
    "h_out": "the residual stream after the layer",
    "logits": "the scores of all tokens of the vocabulary",
}

# What makes a tensor of those before it: where to look if it is the first that is wrong.
MADE_BY = {
    "h": ("the embedding's rows", "its multiplier"),
    "k_out": (
        "the norm before attention",
        "the key matrix and its scales",
        "the rotary embedding and its positions",
        "the slot that is written",
    ),
    "v_out": ("the value matrix and its scales", "the slot that is written"),
    "heads": (
        "the query matrix and its scales",
        "the rotary embedding of queries",
        "the multiplier and the cap of the scores",
        "the mask",
        "the softmax",
        "which key/value head a query head reads",
    ),
    "attention": ("the output matrix of attention and its scale groups", "the sum over ranks"),
    "experts": (
        "the norm after attention",
        "the residual sum",
        "the norm before the experts",
        "the router's matrix",
    ),
    "gates": ("the softmax over all experts, not only the chosen", "the router's matrix"),
    "moe": (
        "the experts' matrices and their scale groups",
        "the activation",
        "the gates as weights",
        "the sum over ranks",
    ),
    "h_out": ("the norm after the experts", "the residual sum"),
    "logits": ("the final norm", "the output matrix", "the multiplier", "which token is taken"),
}


def headline(result: Verification) -> str:
    """Return what came out in a sentence, without its full stop."""
    graph, free = result.failed, result.free_run
    if graph is not None:
        return f"{graph.graph} does not compute what the reference does: {_what(graph)}"
    graphs = f"in {counted(len(result.graphs), 'graph')} one by one"
    if free is not None and not free.passed:
        but = f", but {graphs}" if result.graphs else ""
        return f"it does not compute what the reference does running free{but}"
    parts = [graphs] if result.graphs else []
    parts += [] if free is None else ["running free"]
    if not parts:
        return "nothing was compared"
    return f"it computes what the reference does, {' and '.join(parts)}"


def finding(result: Verification) -> list[str]:
    """Return what is wrong, where, how much and where to look; nothing if all is right.

    The first line is the headline. All are for people who know the model, not this program.
    """
    graph, free = result.failed, result.free_run
    lines = [] if result.passed else [headline(result)]
    if result.cause is not None:
        cause = result.cause
        lines.append(
            f"likely cause: {cause.title.rstrip('.')}; with that mistake ({cause.fault}) the "
            f"reference agrees with the engine to {number(cause.error)} of the tolerance"
        )
    if graph is not None:
        first = _first(graph)
        lines += [_where(first), *_how_far(first, result.dtype), *_around(first, graph)]
        lines += _elsewhere(graph, result)
    if free is not None and not free.passed:
        if graph is None:
            lines.append(
                "look at what goes from graph to graph: the order of layers, caches, positions; "
                "and at layers that were not compared"
            )
        lines += [f"running free: {failure}" for failure in free.failures]
    return lines


def _what(graph: GraphResult) -> str:
    first = _first(graph)
    if _touched(first):
        return f"it changes a slot of {first.tensor} that it has to leave as it is"
    if first.tensor == "experts":
        return f"other experts for {counted(round(first.error), 'token')} in {first.step}"
    if not math.isfinite(first.error):
        return f"{first.tensor} holds what is no finite number in {first.step}"
    times = f"{number(first.ratio)} times the tolerance" if first.tolerance else "more than none"
    return f"{first.tensor} is off by {times} in {first.step}"


def _where(first: Deviation) -> str:
    start = f"{first.tensor} ({MEANING.get(first.tensor, 'a tensor')})"
    place = first.place
    if place is None:
        return start
    both = pair(place.value, place.wanted)
    if _touched(first):
        now, before = place.value, place.wanted
        both = f"{digits(now, beside=before)} after the step, {digits(before, beside=now)} before"
    return f"{start} at {place_words(first, place)}: {both}"


def _how_far(first: Deviation, dtype: str) -> list[str]:
    if _touched(first):
        return [
            f"no token of the step belongs there; {percent(first.share)} of all slots are changed",
            "look at: the start of each row; where padding is written; whose cache is written",
        ]
    if first.tensor == "experts":
        return [
            f"{percent(first.share)} of the step's tokens chose others where the reference was "
            "not nearly undecided"
        ]
    where = (
        "spread over the token"
        if first.columns is None
        else f"all in the columns {first.columns[0]} to {first.columns[1]}"
    )
    return [
        f"error {number(first.error)}, {number(first.tolerance)} is allowed: {error_words(dtype)}",
        f"differences: largest {number(first.largest)}, mean {number(first.mean)}, median "
        f"{number(first.median)}; too large in {percent(first.share)} of the values, {where}",
    ]


def _around(first: Deviation, graph: GraphResult) -> list[str]:
    """Return what is right before the tensor, and what then is left to be wrong."""
    before = graph.deviations[: graph.deviations.index(first)]
    right = list(dict.fromkeys(one.tensor for one in before if one.step == first.step))
    right = [name for name in right if name != first.tensor]
    lines = [f"right before it: {', '.join(right)}"] if right else []
    if first.tensor not in MADE_BY or _touched(first):
        return lines
    order = [first.tensor] if graph.graph.kind != "layer" else list(MADE_BY)[1:]
    last = max((order.index(name) for name in right if name in order), default=-1)
    between = order[last + 1 : order.index(first.tensor) + 1]
    suspects = dict.fromkeys(part for name in between for part in MADE_BY[name])
    return [*lines, f"look at: {'; '.join(suspects)}"]


def _elsewhere(graph: GraphResult, result: Verification) -> list[str]:
    """Return how far the mistake reaches: tensors and steps of the graph, and other graphs."""
    wrong = [one for one in graph.deviations if not one.passed]
    tensors = ", ".join(dict.fromkeys(one.tensor for one in wrong))
    steps = list(dict.fromkeys(one.step for one in graph.deviations))
    failed = {one.step for one in wrong}
    in_steps = (
        f"all of {counted(len(steps), 'step')}"
        if len(failed) == len(steps)
        else f"{len(failed)} of {counted(len(steps), 'step')}, first in {wrong[0].step}"
    )
    others = [one.graph for one in result.graphs if not one.passed and one is not graph]
    right = counted(len(result.graphs) - 1 - len(others), "other graph")
    besides = f"wrong too: {_names(others)}; " if others else ""
    return [
        f"wrong in {graph.graph}: {tensors}, in {in_steps}",
        f"{besides}right: {right}; all are fed the reference's inputs, so each is right or wrong "
        "by itself",
    ]


def _names(graphs: Sequence[GraphName]) -> str:
    """Return the graphs' names, with layers that follow each other as a range."""
    layers = [graph.layer for graph in graphs if graph.layer is not None]
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    words = [f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(ranges)}"] if runs else []
    return ", ".join(words + [str(graph) for graph in graphs if graph.layer is None])


def _first(graph: GraphResult) -> Deviation:
    return next(found for found in graph.deviations if not found.passed)


def _touched(found: Deviation) -> bool:
    """Whether it tells of a cache slot that no token of the step is written to."""
    return found.tensor in ("k_out", "v_out") and found.tolerance == 0 and found.error == math.inf
