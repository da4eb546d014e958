"""The cache of keys and values that the model writes in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import RequestError

__all__ = ["KVCache"]


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer; slot p of a row holds position p.

    Attributes:
        keys: for each layer [B, Hkv, T, D], after rotary embedding.
        values: for each layer, likewise.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, config: GrokConfig, *, batch: int, length: int, dtype: Dtype) -> "KVCache":
        """Return an empty cache for `batch` rows of up to `length` tokens."""
        shape = (batch, config.num_kv_heads, length, config.key_size)

        def slots() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(config.num_layers)
            )

        return cls(keys=slots(), values=slots())

    @property
    def length(self) -> int:
        """Slots of a row, T."""
        return self.keys[0].shape[2]

    def check_room(self, start: Tensor, tokens: int) -> None:
        """Refuse a write beyond the last slot.

        Raises:
            RequestError: a row would not fit.
        """
        needed = int(start.max()) + tokens
        if needed > self.length:
            raise RequestError(
                f"{needed} tokens do not fit a cache of {self.length}; "
                "shorten the prompt or allocate a longer cache"
            )
