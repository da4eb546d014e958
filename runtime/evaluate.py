"""How well an engine reads a text: perplexity, and bits for a byte.

Windows of one length lie side by side. Each is read from its first token on, and all its tokens
but that one are guessed; a rest that fills no window is left. So two models of one tokenizer get
the same windows, and their figures compare.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, open_bundle
from export_grok.config import GrokConfig
from export_grok.engines.backend import Session
from export_grok.engines.demand import Demand
from export_grok.errors import RequestError
from export_grok.needs import Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.runtime.decode import teacher_forced
from export_grok.runtime.needs import session_needs
from export_grok.runtime.open import open_session
from export_grok.runtime.params import EvaluationOptions
from export_grok.runtime.text.tokenizer import Tokenizer, tokenizer_of
from export_grok.runtime.torch_needs import torch_needs

__all__ = ["Evaluation", "Reading", "evaluate_bundle"]

# So many logits are held at once: 256 MB.
LOGITS = 1 << 26
# Bytes that the surprise at a logit takes meanwhile: three numbers of float64.
SURPRISE = 24


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one model made of the text.

    Attributes:
        nats: surprise at all guessed tokens together.
        tokens: that were guessed.
        bytes: of text that they stand for.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """Between how many equally likely tokens the model was in doubt, on average."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Surprise at a byte of text, which does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The readings of a text.

    Attributes:
        windows: how many the text filled.
        engine: the reading of the bundle's engine.
        reference: the reading of the PyTorch model, if it was asked for.
    """

    windows: int
    engine: Reading
    reference: Reading | None

    @property
    def difference(self) -> float | None:
        """By which part the engine's perplexity is above the reference's."""
        if self.reference is None:
            return None
        return self.engine.perplexity / self.reference.perplexity - 1


def evaluate_bundle(
    folder: Path,
    text_file: Path,
    options: EvaluationOptions,
    *,
    reference: bool = False,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
    on_needs: OnNeeds = lambda needs: None,
) -> Evaluation:
    """Return how the engine of a bundle reads a text.

    Args:
        folder: of the bundle.
        text_file: UTF-8.
        options: how the text is cut.
        reference: let the PyTorch model, in float32 on the same weights, read it too.
        threads: to compute with; as many as there are cores by default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.
        on_needs: gets what that needs, before anything is loaded.

    Raises:
        BundleError: the bundle is damaged, or its tokenizer is of another model.
        ConfigError: it is for another number of ranks.
        MissingDependencyError: the reference needs torch.
        NumericsError: a logit is no number.
        RankError: one of its ranks died or stalled.
        RequestError: the text cannot be read, or fills no window.
    """
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    tokenizer = tokenizer_of(bundle)
    _check_window(bundle, options.window)
    windows = _windows(text_file, tokenizer, options)
    batch, length = min(options.batch, len(windows)), options.window
    demand = Demand(
        batch=batch,
        max_length=length,
        prefill=length * -(-len(windows) // batch),
        chunk=min(length, _chunk(batch, bundle.config)),
        whole=True,
        threads=threads,
    )
    on_needs(
        session_needs(
            bundle,
            demand,
            tensor_parallel=tensor_parallel,
            held=SURPRISE * demand.at_once * bundle.config.vocab_size,
        )
        + (torch_needs(bundle.config, demand) if reference else Needs())
    )
    lengths = np.array([tokenizer.byte_length(token) for token in range(tokenizer.vocab_size)])
    with open_session(
        bundle, batch=batch, max_length=length, threads=threads, tensor_parallel=tensor_parallel
    ) as session:
        engine = _read("engine", session, windows, lengths)
    by_torch = None
    if reference:
        from export_grok.runtime.torch_session import TorchSession

        model = TorchSession(bundle, batch=batch, max_length=length)
        by_torch = _read("reference", model, windows, lengths)
    return Evaluation(windows=len(windows), engine=engine, reference=by_torch)


def _check_window(bundle: Bundle, window: int) -> None:
    longest = bundle.config.sequence_len
    if window > longest:
        raise RequestError(f"window is {window}; this model takes up to {longest} tokens")


def _windows(path: Path, tokenizer: Tokenizer, options: EvaluationOptions) -> NDArray[np.int64]:
    """Return the text as full windows, [windows, window]."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise RequestError(f"{path} is empty; give a text")
    if options.lines:
        ids = [
            token
            for line in text.splitlines()
            if line.strip()
            for token in (*tokenizer.encode(line), tokenizer.eos_id)
        ]
    else:
        ids = tokenizer.encode(text)
    count = len(ids) // options.window
    if not count:
        raise RequestError(
            f"{path} has {len(ids)} tokens, a window {options.window}: "
            "give a longer text or a smaller --window"
        )
    return np.array(ids[: count * options.window], np.int64).reshape(count, options.window)


def _read(
    label: str, session: Session, windows: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Reading:
    guessed = windows[:, 1:]
    chunk = _chunk(session.batch, session.config)
    nats = 0.0
    with progress_bar(label, len(windows), unit="windows") as advance:
        for first in range(0, len(windows), session.batch):
            part = windows[first : first + session.batch]
            # The last batch may be short of rows: it repeats some, which do not count.
            rows = np.resize(part, (session.batch, windows.shape[1]))
            place = 0
            for logits in teacher_forced(session, rows, chunk=chunk):
                targets = guessed[first : first + len(part), place : place + logits.shape[1]]
                nats += _surprise(logits[: len(part), : targets.shape[1]], targets)
                place += logits.shape[1]
            advance(len(part))
    return Reading(nats=nats, tokens=guessed.size, bytes=int(lengths[guessed].sum()))


def _chunk(batch: int, config: GrokConfig) -> int:
    """Return how many tokens of each row are read at once."""
    return max(1, LOGITS // (batch * config.vocab_size))


def _surprise(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    """Return the sum of -log softmax(logits)[target], in float64."""
    wide = logits.astype(np.float64)
    largest = wide.max(axis=-1)
    log_sum = largest + np.log(np.exp(wide - largest[..., None]).sum(axis=-1))
    chosen = np.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    return float((log_sum - chosen).sum())
