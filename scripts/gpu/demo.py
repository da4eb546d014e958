"""Step 7: the demo model, whole, as a user builds and runs it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export_grok.config import EngineOptions, ExportOptions
from export_grok.engines.backend import RowSession, Session, open_session
from export_grok.engines.pipeline import engine_from_source
from export_grok.export.demo import write_demo_checkpoint
from scripts.gpu.plan_run import flavour_here
from scripts.gpu.step import Options, Outcome

__all__ = ["BATCH", "BOUND", "CHUNK", "LENGTH", "check_demo", "logits_of", "logits_of_rows"]

BATCH, LENGTH, CHUNK = 2, 96, 32
# A prompt of more than one piece, then steps that are captured.
PROMPT, STEPS = 40, 12
# Of a prompt, what another row is given.
COPIED = 25
BOUND = 1e-3


def check_demo(options: Options) -> Outcome:
    """Compare logits of the plans, in float32, with those of the CPU engine."""
    flavour = flavour_here(options)
    folder = Path(options.folder)
    write_demo_checkpoint(folder / "checkpoint")
    sizes = EngineOptions(batch=BATCH, chunk=CHUNK, max_length=LENGTH)
    found = {}
    for backend, engine in ((flavour.backend, sizes), ("ort", EngineOptions())):
        bundle = engine_from_source(
            folder / "checkpoint",
            folder / backend,
            backend=backend,
            engine=engine,
            options=ExportOptions(dtype="float32"),
        )
        session = open_session(bundle, batch=BATCH, max_length=LENGTH)
        random = np.random.default_rng(options.seed)
        whole = logits_of(session, random).reshape(-1, session.config.vocab_size)
        found[backend] = np.concatenate([whole, logits_of_rows(session, random)])
    mine, theirs = found.values()
    error = float(np.abs(mine - theirs).max() / theirs.std())
    right = error <= BOUND
    return Outcome(
        status="pass" if right else "fail",
        text=(
            f"logits differ by {error:.1e} of their deviation at the most, "
            f"{BOUND:.0e} is allowed: a prompt of {PROMPT}, then {STEPS} steps; a row "
            f"beside one that waits, and {COPIED} tokens copied from row to row"
        ),
        figures={"error": error},
    )


def logits_of(session: Session, random: np.random.Generator) -> NDArray[np.float32]:
    """Return the logits of a prompt, and of steps behind it: [B, PROMPT + STEPS, V]."""
    shape = (session.batch, PROMPT + STEPS)
    tokens = random.integers(0, session.config.vocab_size, shape)
    start = np.zeros(session.batch, np.int64)
    found = [session.forward_all(tokens[:, :PROMPT], start)]
    last = np.zeros(session.batch, np.int64)
    for place in range(PROMPT, PROMPT + STEPS):
        logits = session.forward(tokens[:, place : place + 1], start + place, last)
        if logits is None:
            raise AssertionError("logits were asked for")
        found.append(logits[:, None])
    return np.concatenate(found, axis=1)


def logits_of_rows(session: RowSession, random: np.random.Generator) -> NDArray[np.float32]:
    """Return the logits of rows while others wait, of a copied one, and of all again, [N, V]."""
    tokens = random.integers(0, session.config.vocab_size, (2, PROMPT + STEPS))
    found = []

    def steps(rows: list[int], given: list[int], first: int, end: int) -> None:
        """Bring rows of the cache the tokens of given rows one by one."""
        for place in range(first, end):
            start, last = np.full(len(rows), place), np.zeros(len(rows), np.int64)
            column = tokens[given, place : place + 1]
            logits = session.forward(column, start, last, np.array(rows))
            if logits is None:
                raise AssertionError("logits were asked for")
            found.append(logits)

    for row in (1, 0):
        session.forward(tokens[row : row + 1, :PROMPT], np.array([0]), None, np.array([row]))
    steps([0], [0], PROMPT, PROMPT + STEPS)
    session.copy(1, 0, COPIED)
    steps([0], [1], COPIED, PROMPT)
    steps([1, 0], [1, 1], PROMPT, PROMPT + STEPS)
    return np.concatenate(found)
