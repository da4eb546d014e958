"""The whole engine against the whole reference, each on its own from the tokens on.

Here errors of one layer go on into the next, as they do in use, and the engine's real session
runs: its bindings, its cache, its heads. What is judged is the outcome: logits, the likeliest
token, how the distributions differ, perplexity, and where greedy answers part.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import Session
from export_grok.runtime.verify.deviation import token_errors
from export_grok.runtime.verify.result import FreeRun
from export_grok.runtime.verify.steps import Step, steps_of
from export_grok.runtime.verify.tolerances import BFLOAT16_FACTOR

__all__ = ["Heard", "judge", "lead", "listen"]

# Positions that may be beyond the tolerance, one of so many: a choice of experts near a tie can
# fall the other way, and that moves one position by a lot and is no fault.
FEW = 100
# A likeliest token that is ahead by a smaller part of the logits' rms is undecided.
UNDECIDED = 1e-2
# Perplexities of two good float32 engines are nearer than this, as a ratio.
PERPLEXITY = 1e-3


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What one side said.

    Attributes:
        logits: of each step, float32 [positions, V]: of the tokens that count, row by row.
        greedy: the likeliest tokens that each row went on with from its prompt [B, N].
        margins: by how much each was ahead of the next likely one, in rms of the logits [B, N].
    """

    logits: tuple[NDArray[np.float32], ...]
    greedy: NDArray[np.int64]
    margins: NDArray[np.float64]


def listen(
    session: Session,
    steps: Sequence[Step],
    prompts: Sequence[Sequence[int]],
    *,
    greedy: int,
    chunk: int,
    advance: Callable[[int], None] = lambda done: None,
) -> Heard:
    """Return what a session says to the steps, and how it goes on with the prompts by itself.

    Args:
        session: with as many rows; its cache is overwritten.
        steps: to feed. Those of single tokens ask for one row of logits, the others for all.
        prompts: what the rows begin with.
        greedy: tokens that each prompt is continued by.
        chunk: tokens of a prompt that come at once.
        advance: is told of every step that is done.
    """
    logits = []
    for step in steps:
        if step.tokens.shape[1] == 1:
            logits.append(_last_logits(session, step)[step.length > 0])
        else:
            logits.append(session.forward_all(step.tokens, step.start)[step.counts])
        advance(1)
    chosen, margins = [], []
    if greedy:
        current = np.zeros((len(prompts), session.config.vocab_size), np.float32)
        for step in steps_of(prompts, decode=0, chunk=chunk, max_length=session.max_length):
            ending = step.length > 0
            current[ending] = _last_logits(session, step)[ending]
        start = np.array([len(prompt) for prompt in prompts])
        for number in range(greedy):
            chosen.append(current.argmax(-1))
            margins.append(lead(current))
            advance(1)
            if number + 1 < greedy:
                current = _last_logits(
                    session,
                    Step(
                        name="greedy",
                        tokens=chosen[-1][:, np.newaxis],
                        start=start + number,
                        length=np.ones_like(start),
                    ),
                )
    shape = (greedy, len(prompts))
    return Heard(
        logits=tuple(logits),
        greedy=np.array(chosen, np.int64).reshape(shape).T,
        margins=np.array(margins, np.float64).reshape(shape).T,
    )


@np.errstate(over="ignore", invalid="ignore")  # what is no finite number is a failure, not news
def judge(
    steps: Sequence[Step],
    rows: Sequence[Sequence[int]],
    found: Heard,
    wanted: Heard,
    *,
    tolerance: float,
    floor: FreeRun | None = None,
) -> FreeRun:
    """Return how what the engine said compares with what the reference said.

    Args:
        steps: that both were fed.
        rows: all tokens of each row, which tell what came next.
        found: by the engine.
        wanted: by the reference.
        tolerance: of a position's logits, in their rms.
        floor: for a bfloat16 engine, what a bfloat16 computation with the original's roundings
            was judged to be against the same reference.
    """
    pairs = list(zip(found.logits, wanted.logits, strict=True))
    errors = [token_errors(*pair) for pair in pairs]
    ours, theirs = np.concatenate(found.logits), np.concatenate(wanted.logits)
    every = np.concatenate(errors)
    differ = ours.argmax(-1) != theirs.argmax(-1)
    firm = differ & (lead(theirs) >= UNDECIDED)
    divergence = _divergence(theirs, ours)
    targets = _targets(steps, rows)
    parted = _parted(found, wanted)
    result = FreeRun(
        positions=len(every),
        error={step.name: float(error.max()) for step, error in zip(steps, errors, strict=True)},
        mean_error=float(token_errors(ours, theirs, "mean").mean()),
        beyond=int((every > tolerance).sum()),
        allowed=len(every) // FEW,
        tolerance=tolerance,
        top_1=float(1 - differ.mean()),
        undecided=int((differ & ~firm).sum()),
        firm=int(firm.sum()),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        perplexity=_perplexity(ours, targets),
        perplexity_wanted=_perplexity(theirs, targets),
        greedy=wanted.greedy.shape[1],
        parted=parted,
        margin=None if parted is None else float(wanted.margins[parted]),
        floor=floor,
    )
    return dataclasses.replace(result, failures=tuple(_failures(result)))


def _failures(run: FreeRun) -> list[str]:
    without = [step for step, error in run.error.items() if not math.isfinite(error)]
    if without:  # no rounding, no tie excuses that
        return [f"logits in {', '.join(without)} are not finite numbers"]
    if run.floor is not None:
        return _failures_beside(run, run.floor)
    failures = []
    if run.beyond > run.allowed:
        worst = max(run.error, key=lambda step: run.error[step])
        failures.append(
            f"the logits of {run.beyond} of {run.positions} positions are off by more than "
            f"{run.tolerance:.1e} of their rms, and {run.allowed} may be; most in {worst}, by "
            f"{run.error[worst]:.1e}"
        )
    if run.firm > run.allowed:
        failures.append(
            f"another token is the likeliest in {run.firm} of {run.positions} positions where "
            f"the reference was not undecided, and {run.allowed} may be"
        )
    ratio = run.perplexity / run.perplexity_wanted
    if not abs(ratio - 1) <= PERPLEXITY:
        failures.append(
            f"perplexity is {run.perplexity:.4f}, the reference's {run.perplexity_wanted:.4f}: "
            f"they must be within {PERPLEXITY:.1%}"
        )
    if run.margin is not None and run.margin >= UNDECIDED:
        failures.append(
            "greedy answers part where the reference was not undecided: its token was ahead by "
            f"{run.margin:.2f} of the logits' rms"
        )
    return failures


def _failures_beside(run: FreeRun, floor: FreeRun) -> list[str]:
    """Return what is worse than twice as bad as roundings alone make it."""
    spare = 1 / run.positions  # one position more is chance
    rules = {
        "the logits' mean error": (run.mean_error, floor.mean_error, 0.0),
        "the mean KL divergence": (run.kl_mean, floor.kl_mean, 0.0),
        "the share of positions with another likeliest token": (
            1 - run.top_1,
            1 - floor.top_1,
            spare,
        ),
        "the perplexity's distance from the reference's": (
            abs(math.log(run.perplexity / run.perplexity_wanted)),
            abs(math.log(floor.perplexity / floor.perplexity_wanted)),
            2 * floor.mean_error,
        ),
    }
    return [
        f"{name} is {value:.2e}; a bfloat16 computation with the original's roundings has "
        f"{noise:.2e}, and {BFLOAT16_FACTOR:g} times that is allowed"
        for name, (value, noise, more) in rules.items()
        if not value <= BFLOAT16_FACTOR * noise + more
    ]


def _last_logits(session: Session, step: Step) -> NDArray[np.float32]:
    logits = session.forward(step.tokens, step.start, step.last)
    if logits is None:
        raise AssertionError("a session gives logits when asked for them")
    return logits


def lead(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return by how much the likeliest token is ahead of the next, in rms of the logits."""
    two = np.partition(logits, -2, axis=-1)[:, -2:].astype(np.float64)
    scale = np.sqrt(np.square(logits, dtype=np.float64).mean(axis=-1))
    lead: NDArray[np.float64] = (two[:, 1] - two[:, 0]) / np.maximum(scale, 1e-30)
    return lead


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    shifted: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return shifted


def _divergence(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return KL(wanted || found) of every position, in nats."""
    log_wanted, log_found = _log_softmax(wanted), _log_softmax(found)
    terms: NDArray[np.float64] = (np.exp(log_wanted) * (log_wanted - log_found)).sum(axis=-1)
    return np.maximum(terms, 0.0)  # sums of rounded terms may be a little below


def _targets(steps: Sequence[Step], rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the token behind every position that counts, in the order of logits; -1 for none."""
    found = []
    for step in steps:
        for row, place in zip(*np.nonzero(step.counts), strict=True):
            position = int(step.positions[row, place]) + 1
            found.append(rows[row][position] if position < len(rows[row]) else -1)
    return np.array(found)


def _perplexity(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    some = targets >= 0
    chosen = np.take_along_axis(_log_softmax(logits[some]), targets[some, np.newaxis], axis=-1)
    return float(np.exp(-chosen.mean()))


def _parted(found: Heard, wanted: Heard) -> tuple[int, int] | None:
    """Return row and number of the token where greedy answers part.

    A row that parted goes on with another text, so its first such token tells. Of several rows it
    is the first that parted where the reference was not undecided, if one did.
    """
    differ = found.greedy != wanted.greedy
    rows = np.flatnonzero(differ.any(axis=1))
    places = [(int(row), int(differ[row].argmax())) for row in rows]
    return min(
        places,
        key=lambda place: (wanted.margins[place] < UNDECIDED, place[1], place[0]),
        default=None,
    )
