"""What Prometheus may ask of a model at work: counters, gauges and histograms of its events.

docs/metrics.md has them in a table.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from export_grok.errors import BusyError, ConfigError, RequestError
from export_grok.optional import require
from export_grok.runtime.observer import FinishReason, Load, Usage

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PrometheusMetrics"]

# A small model takes a millisecond for a token; one of 314 billion parameters on a CPU takes
# seconds, and minutes for a prompt. 1, 2, 5 over all of that range put a quantile within a factor
# of 2.5 wherever it lies; one list for all times lets them be compared, bucket by bucket.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0),
)

# Exact where B divides 8; the first bucket is of turns that only read prompts.
OCCUPANCY = tuple(eighths / 8 for eighths in range(9))

# Of each figure of a load: the name and the help of its gauge.
GAUGES = {
    "batch": ("rows", "Rows of the cache: requests that can run at the same time."),
    "running": ("rows_in_use", "Rows that a request has."),
    "waiting": ("requests_waiting", "Requests that were submitted and have no row yet."),
    "cache_tokens": ("cache_used_tokens", "Tokens in the cache of the requests that have a row."),
    "kept_tokens": (
        "cache_kept_tokens",
        "Tokens in free rows, kept for prompts that begin with them.",
    ),
    "capacity": ("cache_capacity_tokens", "Tokens that all rows of the cache can hold."),
}


class PrometheusMetrics:
    """An `Observer` that keeps the metrics of one model, for a service to show.

    Each has a registry of its own unless it is given one, so that two models in one process do
    not collide, and are not added up either: a service shows them apart.

    Attributes:
        registry: what holds the metrics; `prometheus_client.start_http_server` takes it.
        content_type: that `text` has, for the header of an HTTP answer.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None) -> None:
        """Make the metrics in `registry`, where others may be already; in a new one if None.

        Raises:
            MissingDependencyError: prometheus_client is not installed.
            ConfigError: `registry` holds the metrics of another model.
        """
        self._client = require("prometheus_client", extra="metrics")
        self.registry = self._client.CollectorRegistry() if registry is None else registry
        self.content_type: str = self._client.CONTENT_TYPE_LATEST
        try:
            self._make_metrics()
        except ValueError as error:
            raise ConfigError(
                f"the registry holds metrics of the same name ({error}); give each model one of "
                "its own, or leave it out: PrometheusMetrics()"
            ) from error

    def _make_metrics(self) -> None:
        given = {"namespace": "export_grok", "registry": self.registry}
        counter = partial(self._client.Counter, **given)
        gauge = partial(self._client.Gauge, **given)
        histogram = partial(self._client.Histogram, **given)
        seconds = partial(histogram, buckets=SECONDS)

        self._submitted = counter("requests_submitted_total", "Requests that were taken on.")
        finished = counter(
            "requests_finished_total", "Requests that ended, by the reason.", ["reason"]
        )
        # A label that was never seen is a gap in a graph; those that are known begin at 0.
        self._finished = {reason: finished.labels(reason) for reason in get_args(FinishReason)}
        self._refused = counter(
            "requests_refused_total",
            "Requests that were not taken on, by the class of the error.",
            ["error"],
        )
        for error in (BusyError, RequestError):
            self._refused.labels(error.__name__)

        self._prompt_tokens = counter(
            "prompt_tokens_total", "Tokens of the prompts of requests that ended."
        )
        self._cached_tokens = counter(
            "cached_tokens_total",
            "Of these prompt tokens, those that a row of the cache held already.",
        )
        self._new_tokens = counter(
            "new_tokens_total",
            "Tokens of the answers of requests that ended, end tokens not counted.",
        )
        self._prefilled_tokens = counter(
            "prefilled_tokens_total", "Tokens of prompts that went through the layers so far."
        )

        self._first_token = seconds(
            "time_to_first_token_seconds", "From the submission of a request to its first token."
        )
        self._next_token = seconds(
            "time_per_token_seconds", "From a token of a request to its next one."
        )
        self._wait = seconds(
            "request_wait_seconds", "From the submission of a request until it got a row."
        )
        self._duration = seconds(
            "request_duration_seconds",
            "From the submission of a request to its last token, if it was neither cancelled "
            "nor ended by an error.",
        )
        self._turn = seconds(
            "turn_duration_seconds",
            "One turn of the loop: a chunk of prompts, and a token for every answer.",
        )
        self._occupancy = histogram(
            "batch_occupancy_ratio",
            "Rows that got a token in a turn of the loop, of all rows.",
            buckets=OCCUPANCY,
        )

        self._gauges: dict[str, Any] = {
            figure: gauge(name, text) for figure, (name, text) in GAUGES.items()
        }

    def text(self) -> str:
        """Return all that the registry holds as Prometheus reads it; any thread may ask."""
        exposition: bytes = self._client.generate_latest(self.registry)
        return exposition.decode()

    def submitted(self, request: str, *, prompt_tokens: int) -> None:
        """See `Observer`."""
        self._submitted.inc()

    def refused(self, error: Exception) -> None:
        """See `Observer`."""
        self._refused.labels(type(error).__name__).inc()

    def started(self, request: str, *, waited_seconds: float, cached_tokens: int) -> None:
        """See `Observer`."""
        self._wait.observe(waited_seconds)

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        """See `Observer`."""
        (self._first_token if first else self._next_token).observe(seconds)

    def finished(
        self, request: str, *, reason: FinishReason, usage: Usage, error: Exception | None
    ) -> None:
        """See `Observer`."""
        self._finished[reason].inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._new_tokens.inc(usage.new_tokens)
        if reason in ("stop", "length"):
            # An answer of no token has no time of a first one.
            begun = max(usage.waited_seconds, usage.first_token_seconds)
            self._duration.observe(begun + usage.decode_seconds)

    def stepped(self, load: Load, *, seconds: float, prefilled: int, decoded: int) -> None:
        """See `Observer`."""
        self._turn.observe(seconds)
        self._occupancy.observe(decoded / load.batch)
        self._prefilled_tokens.inc(prefilled)
        self.changed(load)

    def changed(self, load: Load) -> None:
        """See `Observer`."""
        for figure, gauge in self._gauges.items():
            gauge.set(getattr(load, figure))
