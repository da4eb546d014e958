"""What opening an engine and running it needs, in this process or in ranks."""

import dataclasses

from export_grok.artifacts import Bundle
from export_grok.engines import backend
from export_grok.engines.demand import Demand
from export_grok.needs import Needs
from export_grok.runtime.open import check_ranks, ranks_of
from export_grok.runtime.ranks.memory import GroupSizes

__all__ = ["session_needs"]


def session_needs(
    bundle: Bundle, demand: Demand, *, tensor_parallel: int | None = None, held: int = 0
) -> Needs:
    """Return what `runtime.open.open_session` takes, and what is asked of the session then.

    Args:
        bundle: with an engine.
        demand: what is asked.
        tensor_parallel: ranks that are asked for; those that the engine was built for by default.
        held: bytes that the caller keeps besides.

    Raises:
        ConfigError: the engine is for another number of ranks.
    """
    check_ranks(bundle, tensor_parallel)
    needs = backend.session_needs(bundle, demand)
    return dataclasses.replace(needs, memory=needs.memory + held + _shared(bundle, demand))


def _shared(bundle: Bundle, demand: Demand) -> int:
    """Return the bytes that ranks share: of them, those that are ever written."""
    ranks = ranks_of(bundle)
    if ranks == 1:
        return 0
    return GroupSizes(
        ranks=ranks,
        batch=demand.batch,
        max_length=demand.at_once // demand.batch,
        width=bundle.config.emb_size,
        vocabulary=bundle.config.vocab_size,
    ).nbytes
