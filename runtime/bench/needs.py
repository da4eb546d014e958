"""What a benchmark needs: the engines of all batches at once, and its rounds."""

import dataclasses
from collections.abc import Sequence

from export_grok.artifacts import Bundle
from export_grok.engines.demand import Demand
from export_grok.needs import Needs
from export_grok.runtime.batching.batch import CHUNK
from export_grok.runtime.bench.ceiling import SECONDS as READING_SECONDS
from export_grok.runtime.bench.options import BenchOptions, Setting, cache_length
from export_grok.runtime.needs import session_needs

__all__ = ["bench_needs"]


def bench_needs(
    bundle: Bundle,
    options: BenchOptions,
    settings: Sequence[Setting],
    *,
    threads: int,
    tensor_parallel: int | None,
) -> Needs:
    """Return what measuring the settings takes.

    Args:
        bundle: with an engine.
        options: what is measured.
        settings: in the order of a round.
        threads: of the engine.
        tensor_parallel: ranks that are asked for, if it matters.

    Raises:
        ConfigError: the engine is for another number of ranks.
    """
    rounds = options.rounds + 1  # one does not count
    slots = cache_length(options, tuple(settings))
    needs = Needs(seconds=READING_SECONDS * (options.rounds * len(settings) + 1))
    for batch in options.batch:
        own = [setting for setting in settings if setting.batch == batch]
        prompts = [setting.tokens for setting in own if setting.stage == "prefill"]
        decoding = len(own) - len(prompts)
        demand = Demand(
            batch=batch,
            max_length=slots,
            # The cache is filled once; a first step of each decoding is not timed.
            prefill=max(setting.tokens for setting in own) + rounds * sum(prompts),
            decode=rounds * decoding * (options.decode_tokens + 1),
            chunk=min(CHUNK, slots),
            threads=threads,
        )
        one = session_needs(bundle, demand, tensor_parallel=tensor_parallel)
        needs = dataclasses.replace(
            needs + one,
            memory=needs.memory + one.memory,
            mapped=needs.mapped + one.mapped,
            gpu_memory=needs.gpu_memory + one.gpu_memory,
        )
    return needs
