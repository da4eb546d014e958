"""Opens the engine of a bundle, in this process or in the ranks that share it, and closes it."""

from collections.abc import Iterator
from contextlib import contextmanager

from export_grok.artifacts import Bundle
from export_grok.engines import backend
from export_grok.engines.backend import RowSession
from export_grok.errors import ConfigError
from export_grok.machine import this_machine
from export_grok.runtime.ranks.session import RankedSession

__all__ = ["check_ranks", "open_session", "ranks_of"]


@contextmanager
def open_session(
    bundle: Bundle,
    *,
    batch: int,
    max_length: int,
    threads: int | None = None,
    tensor_parallel: int | None = None,
) -> Iterator[RowSession]:
    """Yield the loaded engine of a bundle; no process of it outlives the block.

    Args:
        bundle: with an engine.
        batch: rows of the cache.
        max_length: longest row, prompt and answer together, in tokens.
        threads: to compute with, of all ranks together; as many as there are cores by default.
        tensor_parallel: ranks that are asked for; those that the engine was built for by default.

    Raises:
        BundleError: the engine does not load.
        ConfigError: a number is out of range, or the engine is for another number of ranks.
        RankError: a rank died or stalled.
    """
    check_ranks(bundle, tensor_parallel)
    ranks = ranks_of(bundle)
    if ranks == 1:
        yield backend.open_session(bundle, batch=batch, max_length=max_length, threads=threads)
        return
    folder = str(bundle.manifest.backend).replace("-", "_")
    with RankedSession(
        bundle,
        ranks=ranks,
        batch=batch,
        max_length=max_length,
        threads=max(1, (threads or this_machine().cores) // ranks),
        opener=f"export_grok.engines.{folder}.ranks:open_rank",
    ) as session:
        yield session


def check_ranks(bundle: Bundle, asked: int | None) -> None:
    """Hold the ranks that are asked for to those that the engine was built for.

    Raises:
        ConfigError: they are others.
    """
    ranks = ranks_of(bundle)
    if asked not in (None, ranks):
        raise ConfigError(
            f"{bundle.folder} needs {ranks} rank{'s' * (ranks > 1)}, sees --tp {asked}; "
            "leave --tp out, or build for so many: export-grok build-engine CHECKPOINT --out DIR "
            f"--tp {asked}"
        )


def ranks_of(bundle: Bundle) -> int:
    """Return how many ranks the engine of a bundle was built for."""
    engine = bundle.manifest.engine
    ranks: int = engine.get("tensor_parallel") or bundle.sizes.get("tensor_parallel", 1)
    return ranks
