"""The PyTorch model behind the session of an engine: what engines are compared with."""

import numpy as np
import torch
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.config import Dtype
from export_grok.export.kv_cache import KVCache
from export_grok.export.load import model_from_index

__all__ = ["TorchSession"]


class TorchSession:
    """The model of `export.model` on a bundle's weights; see `engines.backend.Session`.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
    """

    def __init__(
        self, bundle: Bundle, *, batch: int, max_length: int, dtype: Dtype = "float32"
    ) -> None:
        self.config = bundle.config
        self.batch = batch
        self.max_length = max_length
        self._model = model_from_index(bundle.config, bundle.index(), dtype)
        self._cache = KVCache.allocate(bundle.config, batch=batch, length=max_length, dtype=dtype)

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [B, V]."""
        logits = self.forward_all(tokens, start)
        return None if last is None else logits[np.arange(self.batch), last]

    @torch.no_grad()
    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        logits = self._model(torch.tensor(tokens), torch.tensor(start), self._cache)
        array: NDArray[np.float32] = logits.numpy()
        return array
