"""Step 7: the demo model, whole, as a user builds and runs it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export_grok.config import EngineOptions, ExportOptions
from export_grok.engines.backend import Session, open_session
from export_grok.engines.pipeline import engine_from_source
from export_grok.export.demo import write_demo_checkpoint
from scripts.gpu.plan_run import flavour_here
from scripts.gpu.step import Options, Outcome

__all__ = ["check_demo", "logits_of"]

BATCH, LENGTH, CHUNK = 2, 96, 32
# A prompt of more than one piece, then steps that are captured.
PROMPT, STEPS = 40, 12
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
        found[backend] = logits_of(session, np.random.default_rng(options.seed))
    mine, theirs = found.values()
    error = float(np.abs(mine - theirs).max() / theirs.std())
    right = error <= BOUND
    return Outcome(
        status="pass" if right else "fail",
        text=(
            f"logits differ by {error:.1e} of their deviation at the most, "
            f"{BOUND:.0e} is allowed: a prompt of {PROMPT}, then {STEPS} steps"
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
