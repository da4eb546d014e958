"""What metrics and logs say of a real model is what happened to its requests."""

import functools
import logging
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from export_grok.errors import BusyError, RequestError
from export_grok.runtime import GenerationParams, Observer, load
from export_grok.runtime.logs import JsonFormatter, LogObserver
from export_grok.runtime.metrics import PrometheusMetrics
from export_grok.runtime.observer import Observers
from tests.bundles import BundleOf, bundle_of
from tests.documents import ROOT, blocks

__all__ = ["bundle_of"]

PROMPT = "my password is swordfish"
WORDS = ("password", "swordfish")


class Gate(Observers):
    """Keeps a model within its first token until it is opened, at the latest behind `with`."""

    def __init__(self) -> None:
        super().__init__(())
        self.reached = threading.Event()
        self.opened = threading.Event()

    def token(self, request: str, *, seconds: float, first: bool) -> None:
        self.reached.set()
        self.opened.wait()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        self.opened.set()


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"export_grok_{name}", labels)


def test_metrics_and_logs_of_a_model_add_up_to_its_results(
    bundle_of: BundleOf, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, gate = PrometheusMetrics(), Gate()
    caplog.set_level(logging.DEBUG, logger="export_grok.runtime")
    params = GenerationParams(max_new_tokens=6, ignore_eos=True)
    observers: list[Observer] = [metrics, LogObserver(), gate]
    bundle = bundle_of("demo")
    with load(bundle.folder, batch=1, max_waiting=1, observers=observers) as model, gate:
        handles = [model.submit(PROMPT, params)]
        gate.reached.wait()
        handles.append(model.submit(PROMPT, params))
        with pytest.raises(BusyError):
            model.submit(PROMPT, params)
        handles[1].cancel()
        gate.opened.set()
        results = [handle.result() for handle in handles]
        with pytest.raises(RequestError):
            model.submit(PROMPT * 1000, params)
        results += model.generate(PROMPT, params)
        load_behind = model.current_load()

        reasons = Counter(result.finish_reason for result in results)
        assert reasons == {"length": 2, "cancelled": 1}
        assert value(metrics, "requests_submitted_total") == 3
        for reason in ("stop", "length", "cancelled", "error"):
            found = value(metrics, "requests_finished_total", reason=reason)
            assert found == reasons[reason]
        for error in ("BusyError", "RequestError"):
            assert value(metrics, "requests_refused_total", error=error) == 1
        for kind in ("prompt_tokens", "cached_tokens", "new_tokens"):
            total = sum(getattr(result.usage, kind) for result in results)
            assert value(metrics, f"{kind}_total") == total > 0
        read = [result.usage for result in results if result.usage.new_tokens]
        assert value(metrics, "prefilled_tokens_total") == sum(
            usage.prompt_tokens - usage.cached_tokens for usage in read
        )
        assert value(metrics, "time_to_first_token_seconds_count") == 2
        assert value(metrics, "time_per_token_seconds_count") == 2 * 5
        for gauge in ("rows_in_use", "requests_waiting", "cache_used_tokens"):
            assert value(metrics, gauge) == 0
        assert value(metrics, "rows") == 1
        assert value(metrics, "cache_kept_tokens") == load_behind.kept_tokens > 0
        assert value(metrics, "cache_capacity_tokens") == load_behind.capacity

    records = [record for record in caplog.records if record.name == "export_grok.runtime"]
    told = Counter(record.getMessage() for record in records)
    del told["turn"]
    assert told == {
        "request submitted": 3,
        "request started": 2,
        "request finished": 3,
        "request refused": 2,
    }
    for record in records:
        line = JsonFormatter().format(record)
        assert not any(word in line or word in str(vars(record)) for word in WORDS)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the addresses of what is served, at free ports in place of those asked for."""
    real = prometheus_client.start_http_server
    addresses, servers = [], []

    @functools.wraps(real)
    def start(port: int, *, addr: str, registry: Any) -> None:
        server, _ = real(0, addr=addr, registry=registry)
        servers.append(server)
        addresses.append(f"http://{addr}:{server.server_port}/metrics")

    monkeypatch.setattr(prometheus_client, "start_http_server", start)
    yield addresses
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_programs_of_the_document_run_and_serve_what_they_say(
    bundle_of: BundleOf,
    served: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "engine").symlink_to(bundle_of("demo").folder)
    monkeypatch.chdir(tmp_path)
    serves, logs = blocks((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    exec(serves.text, {})
    exec(logs.text, {})
    assert capsys.readouterr().out.strip()
    with urllib.request.urlopen(served[0], timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["export_grok_requests_submitted_total"] == 1
    assert values["export_grok_new_tokens_total"] > 0
