"""The metrics add up to what happened, and Prometheus can read them."""

import itertools
import re
import sys
import threading
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from export_grok.errors import ConfigError, MissingDependencyError, NumericsError
from export_grok.runtime.metrics import OCCUPANCY, SECONDS, PrometheusMetrics
from export_grok.runtime.observer import Observer, Observers
from tests.documents import ROOT
from tests.runtime.events import BATCH, LENGTH, USAGES, load, tell

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def shown(metrics: PrometheusMetrics) -> dict[str, Any]:
    """Return what Prometheus' own parser makes of the text: families by name."""
    families = text_string_to_metric_families(metrics.text())
    # Old clients show when a counter was made in a family of its own.
    return {family.name: family for family in families if not family.name.endswith("_created")}


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"export_grok_{name}", labels)


def told() -> PrometheusMetrics:
    metrics = PrometheusMetrics()
    tell(metrics)
    return metrics


def test_after_three_requests_counters_are_three_tokens_add_up_and_the_cache_is_free() -> None:
    metrics = told()
    assert value(metrics, "requests_submitted_total") == 3
    ends = {"stop": 1, "length": 1, "cancelled": 1, "error": 0}
    for reason, number in ends.items():
        assert value(metrics, "requests_finished_total", reason=reason) == number
    for kind in ("prompt_tokens", "cached_tokens", "new_tokens"):
        assert value(metrics, f"{kind}_total") == sum(getattr(usage, kind) for usage in USAGES)
    for gauge in ("rows_in_use", "requests_waiting", "cache_used_tokens"):
        assert value(metrics, gauge) == 0


def test_gauges_follow_the_load_while_requests_run() -> None:
    metrics = PrometheusMetrics()
    for events, (running, waiting, used, kept) in {
        2: (0, 1, 0, 0),  # changed between turns
        12: (2, 1, 12, 0),  # a turn
        20: (1, 0, 4, 16),
    }.items():
        metrics = PrometheusMetrics()
        tell(metrics, until=events)
        assert value(metrics, "rows") == BATCH
        assert value(metrics, "rows_in_use") == running
        assert value(metrics, "requests_waiting") == waiting
        assert value(metrics, "cache_used_tokens") == used
        assert value(metrics, "cache_kept_tokens") == kept
        assert value(metrics, "cache_capacity_tokens") == BATCH * LENGTH


def test_refusals_are_counted_by_their_error_and_are_no_submissions() -> None:
    metrics = PrometheusMetrics()
    assert value(metrics, "requests_refused_total", error="BusyError") == 0
    assert value(metrics, "requests_refused_total", error="RequestError") == 0
    tell(metrics)
    metrics.refused(NumericsError("another"))
    for error in ("BusyError", "RequestError", "NumericsError"):
        assert value(metrics, "requests_refused_total", error=error) == 1
    assert value(metrics, "requests_submitted_total") == 3


def test_times_are_of_the_requests_that_had_them() -> None:
    metrics = told()
    sums = {
        "time_to_first_token_seconds": (2, 1.0),  # c has no token
        "time_per_token_seconds": (3, 0.75),
        "request_wait_seconds": (3, 1.5),
        "request_duration_seconds": (2, 0.75 + 1.0),  # not that of c, which was cancelled
        "turn_duration_seconds": (3, 1.0),
    }
    for name, (number, total) in sums.items():
        assert value(metrics, f"{name}_count") == number, name
        assert value(metrics, f"{name}_sum") == total, name
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.2") == 0
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.5") == 2


def test_an_answer_without_a_token_lasts_as_long_as_it_waited() -> None:
    metrics = PrometheusMetrics()
    metrics.finished("d", reason="stop", usage=USAGES[2], error=None)
    assert value(metrics, "request_duration_seconds_sum") == USAGES[2].waited_seconds


def test_occupancy_is_of_all_rows_and_of_all_turns() -> None:
    metrics = told()
    within = {"0.0": 1, "0.375": 1, "0.5": 2, "0.875": 2, "1.0": 3}
    for most, turns in within.items():
        assert value(metrics, "batch_occupancy_ratio_bucket", le=most) == turns
    assert value(metrics, "prefilled_tokens_total") == 8 + 4


def test_buckets_are_of_milliseconds_to_minutes_and_never_more_than_two_and_a_half_apart() -> None:
    assert SECONDS[0] == 0.001
    assert SECONDS[-1] >= 600
    assert all(1 < right / left < 2.51 for left, right in itertools.pairwise(SECONDS))
    assert OCCUPANCY == (0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)


def test_what_nothing_happened_to_is_shown_as_zero() -> None:
    names = set(shown(PrometheusMetrics()))
    assert names == set(shown(told()))
    for family in shown(PrometheusMetrics()).values():
        counts = [s.value for s in family.samples if not s.name.endswith("_created")]
        assert counts
        assert not any(counts), family.name


def test_names_units_and_help_follow_the_conventions() -> None:
    families = shown(told())
    assert len(families) > 15
    for name, family in families.items():
        assert re.fullmatch(r"export_grok(_[a-z]+)+", name), name
        assert len(family.documentation) > 20, name
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram"), name
        # The parser takes _total off what is a counter.
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info")), name
        assert not re.search(r"milli|micro|percent|_(ms|us|perc)$", name), name
        if family.type == "histogram":
            assert name.endswith(("_seconds", "_ratio")), name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= {"reason", "error"}, f"{name}: a label of many values is many series"


def test_the_text_is_what_its_content_type_says() -> None:
    metrics = told()
    assert metrics.content_type.startswith("text/plain;")
    assert metrics.text() == prometheus_client.generate_latest(metrics.registry).decode()


def test_two_models_in_one_process_are_counted_apart() -> None:
    first, second = PrometheusMetrics(), PrometheusMetrics()
    tell(first)
    assert value(first, "requests_submitted_total") == 3
    assert value(second, "requests_submitted_total") == 0
    assert not [
        family
        for family in prometheus_client.REGISTRY.collect()
        if family.name.startswith("export_grok")
    ]


def test_a_registry_of_others_is_shown_whole_and_takes_one_model() -> None:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("of_another", "What a service counts.", registry=registry).set(7)
    metrics = PrometheusMetrics(registry)
    assert metrics.registry is registry
    assert shown(metrics)["of_another"].samples[0].value == 7
    with pytest.raises(ConfigError, match=r"give each model one of its own"):
        PrometheusMetrics(registry)
    metrics.submitted("a", prompt_tokens=1)
    assert value(metrics, "requests_submitted_total") == 1


def test_any_thread_may_ask_while_the_model_works() -> None:
    metrics = PrometheusMetrics()
    done = threading.Event()
    read: list[str] = []

    def ask() -> None:
        while not done.is_set():
            read.append(metrics.text())

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(50):
        tell(metrics)
    done.set()
    asking.join()
    assert value(metrics, "requests_submitted_total") == 150
    found = [
        re.search(r"^export_grok_requests_submitted_total (\S+)", text, re.M) for text in read
    ]
    counts = [float(match[1]) for match in found if match]
    assert len(counts) == len(read) > 0
    assert counts == sorted(counts)


def test_it_is_an_observer_beside_others() -> None:
    one, two = PrometheusMetrics(), PrometheusMetrics()
    both: Observer = Observers([one, two])
    tell(both)
    both.changed(load(1, 2, 3, 4))
    assert value(one, "requests_waiting") == value(two, "requests_waiting") == 2


def test_without_the_client_its_extra_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(
        MissingDependencyError, match=r'prometheus_client .* pip install "export-grok\[metrics\]"'
    ):
        PrometheusMetrics()


def test_the_document_has_every_metric_with_its_type_labels_and_help() -> None:
    cells = re.findall(
        r"^\| `(export_grok_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|", DOCUMENT, re.M
    )
    written = {name: (kind, labels, text) for name, kind, labels, text in cells}
    assert len(written) == len(cells)
    expected = {}
    for family in told().registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        ending = "_total" if family.type == "counter" else ""
        named = ", ".join(f"`{label}`" for label in sorted(labels))
        expected[family.name + ending] = (family.type, named, family.documentation)
    assert written == expected


def test_what_the_document_asks_prometheus_exists() -> None:
    shown_names = {sample.name for family in shown(told()).values() for sample in family.samples}
    asked = set(re.findall(r"export_grok_\w+", DOCUMENT))
    assert {name for name in asked if name.endswith(("_bucket", "_count", "_sum"))}
    families = {name for name in asked if f"{name}_bucket" in shown_names}
    assert asked - families <= shown_names
