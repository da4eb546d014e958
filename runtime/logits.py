"""Teacher-forced logits of given tokens, from file to file."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import open_bundle
from export_grok.errors import RequestError
from export_grok.files import atomic_file
from export_grok.progress import progress_bar
from export_grok.runtime.decode import teacher_forced
from export_grok.runtime.open import open_session

__all__ = ["write_logits"]


def write_logits(
    folder: Path,
    tokens_file: Path,
    out: Path,
    *,
    decode_steps: int = 0,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
) -> tuple[int, ...]:
    """Write array `logits` [B, S, V], float32, and return its shape.

    Args:
        folder: of a bundle.
        tokens_file: .npy with ids [B, S], whole numbers.
        out: .npz to write.
        decode_steps: so many of the last tokens are fed one at a time through the cache.
        threads: to compute with; as many as there are cores by default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.

    Raises:
        BundleError: the bundle is unfinished or damaged.
        ConfigError: it is for another number of ranks.
        NumericsError: a logit is no number.
        OutputError: `out` cannot be written.
        RankError: one of its ranks died or stalled.
        RequestError: the tokens cannot be read, or do not suit the model.
    """
    tokens = _tokens(tokens_file)
    rows, length = tokens.shape
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    if length > bundle.config.sequence_len:
        raise RequestError(
            f"{tokens_file} has rows of {length} tokens; this model takes up to "
            f"{bundle.config.sequence_len}"
        )
    logits = np.empty((rows, length, bundle.config.vocab_size), np.float32)
    done = 0
    with (
        open_session(
            bundle,
            batch=rows,
            max_length=length,
            threads=threads,
            tensor_parallel=tensor_parallel,
        ) as session,
        progress_bar("logits", length, unit="tokens") as advance,
    ):
        for part in teacher_forced(session, tokens, decode_steps=decode_steps):
            logits[:, done : done + part.shape[1]] = part
            done += part.shape[1]
            advance(part.shape[1])
    with atomic_file(out) as file:
        np.savez(file, logits=logits)
    return logits.shape


def _tokens(path: Path) -> NDArray[np.int64]:
    try:
        with path.open("rb") as file:
            tokens = np.load(file, allow_pickle=False)
    except FileNotFoundError as error:
        raise RequestError(f"{path}: {error.strerror}; save token ids with numpy.save") from error
    except Exception as error:  # a damaged file raises what its bytes lead numpy to
        raise RequestError(
            f"{path} cannot be read as .npy of whole numbers; save token ids with numpy.save"
        ) from error
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or tokens.ndim != 2:
        raise RequestError(
            f"{path} holds {getattr(tokens, 'dtype', 'several arrays')}"
            f"{list(getattr(tokens, 'shape', ()))}; token ids are whole numbers [B, S]"
        )
    if not tokens.size:
        raise RequestError(f"{path} holds no tokens, shape {list(tokens.shape)}")
    return tokens.astype(np.int64)
