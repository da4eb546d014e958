"""A session of which some rows are wanted: engines are built for a batch, and take no other."""

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.backend import Session

__all__ = ["FewRows"]


class FewRows:
    """The first rows of a session; the others repeat them. See `engines.backend.Session`.

    Attributes:
        config: of the model.
        batch: rows that are wanted, B.
        max_length: slots of the cache for each row, T.
    """

    def __init__(self, session: Session, batch: int) -> None:
        """Take a session of as many rows or more."""
        self.config = session.config
        self.batch = batch
        self.max_length = session.max_length
        self._session = session
        self._rows = np.arange(session.batch) % batch

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [B, V]."""
        rows = self._rows
        lasts = None if last is None else last[rows]
        logits = self._session.forward(tokens[rows], start[rows], lasts)
        return None if logits is None else logits[: self.batch]

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        rows = self._rows
        return self._session.forward_all(tokens[rows], start[rows])[: self.batch]
