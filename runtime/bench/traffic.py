"""Bytes that one step of decoding has to read from memory, counted from the stored weights.

    attention, router and norms     all of them, with their scales
    experts                         the chosen ones only, with their scales
    head                            its whole matrix (the embedding, or an int8 copy of it) and its
                                    norm, once for all rows
    embedding                       a row of it for each row of the batch
    cache                           keys and values of every token that is attended to

What is written, and what a kernel may read twice, is left out: it is the least there is to read.
"""

import math
from dataclasses import dataclass

from export_grok.config import Dtype, GrokConfig, HeadDtype
from export_grok.export.parameters import Parameter, head_parameters, model_parameters
from export_grok.export.time_model import expected_experts
from export_grok.weights import NUMPY_DTYPES

__all__ = ["Traffic", "step_traffic"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes read in one step, which gives each row of the batch one token.

    Attributes:
        dense: attention matrices, routers and norms.
        experts: of the experts that some row has chosen.
        head: its matrix, scales and norm.
        embedding: rows of the embedding, one for each row of the batch.
        cache: keys and values.
        experts_per_layer: how many different experts were counted in each layer.
    """

    dense: float
    experts: float
    head: float
    embedding: float
    cache: float
    experts_per_layer: float

    @property
    def total(self) -> float:
        """All of them together."""
        return self.dense + self.experts + self.head + self.embedding + self.cache


def step_traffic(
    config: GrokConfig, dtype: Dtype, head: HeadDtype, *, batch: int, attended: float
) -> Traffic:
    """Return what one step of decoding reads.

    Args:
        config: of the model.
        dtype: of the cache.
        head: matrix of the head.
        batch: rows, B.
        attended: tokens of each row that are attended to, the new one included.
    """
    whole = {name: _bytes(parameter) for name, parameter in model_parameters(config).items()}
    table, norm = whole.pop("embedding.weight"), whole.pop("final_norm.scale")
    experts = sum(count for name, count in whole.items() if ".experts." in name)
    int8_head = sum(map(_bytes, head_parameters(config).values()))
    different = expected_experts(config, batch)
    cache_row = 2 * config.num_layers * config.kv_size * NUMPY_DTYPES[dtype].itemsize
    return Traffic(
        dense=sum(whole.values()) - experts,
        experts=experts * different / config.num_experts,
        head=int8_head if head == "int8" else table + norm,
        embedding=batch * table / config.vocab_size,
        cache=batch * attended * cache_row,
        experts_per_layer=different,
    )


def _bytes(parameter: Parameter) -> int:
    return math.prod(parameter.shape) * NUMPY_DTYPES[parameter.dtype].itemsize
