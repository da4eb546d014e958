"""all_reduce in PyTorch, registered as torch op `grok1::all_reduce`.

    y = sum over ranks of x

in the dtype of x: the original adds the attention's outputs likewise, each rounded to bfloat16
(NUMERICS, "Surprises").
"""

import torch
from torch import Tensor, distributed

from export_grok.errors import ConfigError

__all__ = ["all_reduce"]


@torch.library.custom_op("grok1::all_reduce", mutates_args=())
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """Return the sum of x [B, S, M] over `ranks` processes, the same on each.

    Raises:
        ConfigError: this process is not one of so many.
    """
    group = distributed.is_available() and distributed.is_initialized()
    found = distributed.get_world_size() if group else 1
    if found != ranks:
        raise ConfigError(
            f"the sum runs over {ranks} ranks and this process is one of {found}; start {ranks} "
            "processes and join them by torch.distributed first"
        )
    total = x.clone()
    if group:
        distributed.all_reduce(total)
    return total


@all_reduce.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(x)
