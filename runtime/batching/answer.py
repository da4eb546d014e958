"""An answer under way: the tokens of its request, and how far it came."""

from export_grok.runtime.observer import FinishReason
from export_grok.runtime.request import Request

__all__ = ["Answer"]


class Answer:
    """What becomes of a request.

    Attributes:
        request: that it answers.
        tokens: of the prompt, and behind them those of the answer.
        row: of the cache, while it runs.
        held: how many of the tokens that row holds.
        cached: how many of the prompt's tokens it held already when this got it.
        limit: longest answer, in tokens.
        finished: why it ended; None before.
    """

    def __init__(self, request: Request, max_length: int) -> None:
        """Begin with the prompt; `max_length` is that of the cache."""
        self.request = request
        self.tokens = list(request.prompt)
        self.row: int | None = None
        self.held = 0
        self.cached = 0
        self.limit = request.limit(max_length)
        self.finished: FinishReason | None = None

    @property
    def made(self) -> int:
        """How many tokens the answer has."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def missing(self) -> int:
        """How many of the tokens there are its row does not hold yet."""
        return len(self.tokens) - self.held
