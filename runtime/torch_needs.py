"""What the PyTorch model needs: it widens one matrix at a time, of one expert, to float32."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Final

from export_grok.config import GrokConfig
from export_grok.engines.demand import Demand
from export_grok.export.parameters import layer_parameters, model_parameters
from export_grok.export.time_model import Workload, rank_bytes, rank_step
from export_grok.needs import Needs
from export_grok.weights import NUMPY_DTYPES

__all__ = ["module_needs", "torch_needs"]

MB: Final = 10**6

# The program with torch; its libraries are mapped.
PROGRAM: Final = 400 * MB
LIBRARIES: Final = 700 * MB
# Weights a second that are widened and multiplied: a full-size layer in docs/scale.md.
WIDEN_RATE: Final = 150 * MB


def module_needs(config: GrokConfig, steps: Iterable[int]) -> Needs:
    """Return what the model takes, one layer in memory at a time.

    Args:
        config: of the model.
        steps: tokens of each step that goes through all layers.
    """
    rank = config.for_rank(1)
    layer = rank_bytes(layer_parameters(config, 0).values(), rank, "float32")
    widened = sum(
        step.dense + step.experts
        for step in (
            rank_step(rank, "float32", "float32", Workload(batch=max(1, tokens), context=1))
            for tokens in steps
        )
    )
    return Needs(
        # A matrix, and the same times its scales.
        memory=PROGRAM + 2 * 4 * config.emb_size * config.ffn_size,
        mapped=LIBRARIES + layer,
        seconds=widened / WIDEN_RATE,
    )


def torch_needs(config: GrokConfig, demand: Demand) -> Needs:
    """Return what the whole model takes as a session, with what it is asked."""
    chunks = -(-demand.prefill // demand.chunk)
    needs = module_needs(config, [demand.at_once] * chunks + [demand.batch] * demand.decode)
    cache = 8 * config.num_layers * config.kv_size * demand.batch * demand.max_length
    logits = 4 * config.vocab_size * demand.at_once
    everything = sum(
        math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
        for parameter in model_parameters(config).values()
    )
    return dataclasses.replace(
        needs, memory=needs.memory + cache + 2 * logits, mapped=LIBRARIES + everything
    )
