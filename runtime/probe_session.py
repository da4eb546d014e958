"""A session that runs one graph after the other by a probe: for references, not for speed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.arguments import check_tokens, checked_last
from export_grok.engines.probe import GraphName, Probe, Run

__all__ = ["ProbeSession", "open_probe_session"]


@contextmanager
def open_probe_session(probe: Probe, *, batch: int, max_length: int) -> Iterator["ProbeSession"]:
    """Yield a session with the graphs of a probe; they are let go when the block ends."""
    layers = [GraphName(kind="layer", layer=layer) for layer in range(probe.config.num_layers)]
    with ExitStack() as stack:
        embedding, head, head_all = (
            stack.enter_context(probe.graph(GraphName(kind=kind)))
            for kind in ("embedding", "head", "head_all")
        )
        runs = [stack.enter_context(probe.graph(layer)) for layer in layers]
        yield ProbeSession(
            probe,
            embedding,
            runs,
            head,
            head_all,
            batch=batch,
            max_length=max_length,
        )


class ProbeSession:
    """See `engines.backend.Session`.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
    """

    def __init__(
        self,
        probe: Probe,
        embedding: Run,
        layers: list[Run],
        head: Run,
        head_all: Run,
        *,
        batch: int,
        max_length: int,
    ) -> None:
        """Take what runs the graphs, and begin with empty caches."""
        self.config = probe.config
        self.batch = batch
        self.max_length = max_length
        self._embedding, self._layers = embedding, layers
        self._head, self._head_all = head, head_all
        config = probe.config
        shape = (batch, config.num_kv_heads, max_length, config.key_size)
        empty = np.zeros(shape, np.float32)
        self._caches = [(empty, empty) for _ in layers]

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [B, V]."""
        if last is not None:
            last = checked_last(self, last, tokens)
        hidden = self._hidden(tokens, start)
        return None if last is None else self._head({"h": hidden, "last": last})["logits"]

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        return self._head_all({"h": self._hidden(tokens, start)})["logits"]

    def _hidden(self, tokens: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[Any]:
        check_tokens(self, tokens, start)
        hidden = self._embedding({"tokens": tokens})["h"]
        for number, layer in enumerate(self._layers):
            keys, values = self._caches[number]
            found = layer({"h": hidden, "start": start, "k_cache": keys, "v_cache": values})
            self._caches[number] = found["k_out"], found["v_out"]
            hidden = found["h_out"]
        return hidden
