"""Teacher-forced logits of given tokens, from file to file."""

import warnings
from pathlib import Path

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from export_grok.artifacts import open_bundle
from export_grok.engines.arguments import check_vocabulary
from export_grok.engines.demand import Demand
from export_grok.errors import RequestError
from export_grok.files import atomic_file
from export_grok.needs import Disk, Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.regular_file import open_regular
from export_grok.runtime.batching.batch import CHUNK
from export_grok.runtime.decode import check_decode_steps, teacher_forced
from export_grok.runtime.needs import session_needs
from export_grok.runtime.open import open_session

__all__ = ["read_tokens", "write_logits"]

FIRST_VERSION = MAGIC_PREFIX + b"\x01\x00"


def write_logits(
    folder: Path,
    tokens_file: Path,
    out: Path,
    *,
    decode_steps: int = 0,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
    on_needs: OnNeeds = lambda needs: None,
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
        on_needs: gets what that needs, before anything is loaded.

    Raises:
        BundleError: the bundle is unfinished or damaged.
        ConfigError: it is for another number of ranks.
        NumericsError: a logit is no number.
        OutputError: `out` cannot be written.
        RankError: one of its ranks died or stalled.
        RequestError: the tokens cannot be read, or do not suit the model.
    """
    tokens = read_tokens(tokens_file)
    rows, length = tokens.shape
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    if length > bundle.config.sequence_len:
        raise RequestError(
            f"{tokens_file} has rows of {length} tokens; this model takes up to "
            f"{bundle.config.sequence_len}"
        )
    check_vocabulary(bundle.config, tokens)
    check_decode_steps(decode_steps, length)
    demand = Demand(
        batch=rows,
        max_length=length,
        prefill=length - decode_steps,
        decode=decode_steps,
        chunk=CHUNK,
        whole=True,
        threads=threads,
    )
    nbytes = 4 * rows * length * bundle.config.vocab_size
    written = Needs(disk=(Disk(folder=out.parent, nbytes=nbytes),))
    on_needs(written + session_needs(bundle, demand, tensor_parallel=tensor_parallel, held=nbytes))
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


def read_tokens(path: Path) -> NDArray[np.int64]:
    """Return the token ids in an .npy file, [B, S].

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    try:
        with open_regular(path) as file:
            # In other versions a header may say that it has 4 GB.
            if file.read(len(FIRST_VERSION)) != FIRST_VERSION:
                raise ValueError("no .npy as numpy.save writes for whole numbers")
        # Mapped, an array that is longer than its file is refused before it takes memory.
        with np.errstate(over="ignore"), warnings.catch_warnings(action="ignore"):
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise RequestError(f"{path}: {error.strerror}; save token ids with numpy.save") from error
    except Exception as error:  # a damaged file raises what its bytes lead numpy to
        raise RequestError(
            f"{path} cannot be read as .npy of whole numbers; save token ids with numpy.save"
        ) from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2:
        raise RequestError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}; token ids are whole numbers [B, S]"
        )
    if not tokens.size:
        raise RequestError(f"{path} holds no tokens, shape {list(tokens.shape)}")
    return np.array(tokens, np.int64)
