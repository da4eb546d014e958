"""The example service in C++: built by CMake, on the C library, with the demo's engine."""

import functools
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from export_grok.runtime import GenerationParams, load
from tests.bundles import bundle_of as bundle_of
from tests.documents import ROOT
from tests.runtime.c_library.conftest import c_library as c_library
from tests.runtime.c_library.conftest import demo as demo

SOURCE = ROOT / "examples" / "service"
NEEDED = {"cmake": "cmake", "g++": "g++", "pkg-config": "pkg-config"}
HEADERS = {"httplib.h": "libcpp-httplib-dev", "nlohmann/json.hpp": "nlohmann-json3-dev"}

FAKE = ROOT / "tests" / "runtime" / "c_library" / "fake_export_grok.cpp"

# Of the demo's engine: to the end of its cache, some 500 tokens of a millisecond.
LONG = {"prompt": "In the beginning", "max_tokens": 1000, "seed": 5, "logit_bias": {"2": -100}}

# Of the fake library: a token a character, 20 ms each, so some minutes.
ENDLESS = {"prompt": "a" * 9999, "max_tokens": 9999}

Json = dict[str, Any]


class Service:
    """The program as it runs."""

    def __init__(
        self, program: Path, bundle: Path | str, log: Path, *options: str, preload: Path | None
    ) -> None:
        self.log = log
        self.connections: list[http.client.HTTPConnection] = []
        environment = dict(os.environ)
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [program, "--bundle", bundle, "--port", "0", "--threads", "1", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), log.read_text()
        self.url = line.removeprefix("listening on ").strip()
        self.port = int(self.url.rpartition(":")[2])

    def connect(self) -> http.client.HTTPConnection:
        self.connections.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60))
        return self.connections[-1]

    def ask(self, path: str, body: Json | bytes | None = None) -> tuple[int, bytes]:
        connection = self.connect()
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request("GET" if body is None else "POST", path, sent)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, text

    def complete(self, **body: Any) -> Json:
        status, text = self.ask("/v1/completions", body)
        assert status == 200, text
        answer: Json = json.loads(text)
        return answer

    def refusal(self, body: Json | bytes) -> tuple[int, Json]:
        status, text = self.ask("/v1/completions", body)
        error: Json = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error

    def begin(self, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Return a stream whose first event has come."""
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        return connection, answer

    def stream(self, **body: Any) -> list[Json]:
        """Return the events of a stream up to [DONE]."""
        status, text = self.ask("/v1/completions", {**body, "stream": True})
        assert status == 200, text
        *events, done, rest = text.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def load(self) -> Json:
        state: Json = json.loads(self.ask("/health")[1])
        return state

    def end(self, *signals: signal.Signals) -> int:
        for each in signals:
            self.process.send_signal(each)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Service]


@pytest.fixture(scope="session")
def program(c_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [package for name, package in NEEDED.items() if shutil.which(name) is None]
    missing += [
        package for name, package in HEADERS.items() if not Path("/usr/include", name).exists()
    ]
    if missing:
        pytest.skip(f"the service needs: apt install {' '.join(missing)}")
    build = tmp_path_factory.mktemp("service")
    options = [f"-DCMAKE_PREFIX_PATH={c_library}", "-DCMAKE_BUILD_TYPE=None"]
    strict = "-DCMAKE_CXX_FLAGS=-Werror"
    run(["cmake", "-S", SOURCE, "-B", build, *options, strict])
    run(["cmake", "--build", build, "--parallel", "2"])
    return build / "grok-service"


def run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library in place of the real one, as slow as is asked for."""
    made = tmp_path_factory.mktemp("fake") / "fake_export_grok.so"
    headers = ROOT / "runtime" / "c_library"
    run(["g++", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{headers}", FAKE, "-o", made])
    return made


@pytest.fixture
def start(program: Path, tmp_path: Path) -> Iterator[Start]:
    """Return the way to a service of a bundle; it ends with the test."""
    started: list[Service] = []

    def service(bundle: Path | str, *options: str, preload: Path | None = None) -> Service:
        log = tmp_path / f"{len(started)}.log"
        started.append(Service(program, bundle, log, *options, preload=preload))
        return started[-1]

    yield service
    for each in started:
        each.kill()


@pytest.fixture
def start_slow(start: Start, fake_library: Path) -> Start:
    """Return the way to a service of the fake library."""
    return functools.partial(start, "fake:20", preload=fake_library)


@pytest.fixture(scope="module")
def service(
    program: Path, demo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """Return a service that several tests ask; it has to end well behind them."""
    running = Service(program, demo, tmp_path_factory.mktemp("log") / "log", preload=None)
    try:
        yield running
        assert running.end(signal.SIGTERM) == 0
    finally:
        running.kill()


def until(reached: Callable[[], bool]) -> bool:
    """Wait for something that has to come; how long it takes is not the matter."""
    end = time.monotonic() + 30
    while not (found := reached()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_eight_streams_at_once_give_what_python_gives(service: Service, demo: Path) -> None:
    whose = ("king", "lord", "man", "woman", "priest", "son", "people", "wise")
    prompts = [f"And the {who} said" for who in whose]
    params = GenerationParams(max_new_tokens=40, temperature=0.7, top_p=0.9, seed=3)
    with load(demo, threads=1) as model:
        expected = [result.text for result in model.generate(prompts, params)]
    body = {"max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "seed": 3}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: service.stream(prompt=prompt, **body), prompts))
    texts = ["".join(event["choices"][0]["text"] for event in events) for events in answers]
    assert texts == expected
    assert len(set(texts)) == 8


def test_a_whole_answer_is_the_stream_put_together(service: Service) -> None:
    body = {"prompt": "The words of the wise", "max_tokens": 12, "seed": 1, "logprobs": 2}
    whole = service.complete(**body)
    events = service.stream(**body, stream_options={"include_usage": True})
    pieces = [event["choices"][0] for event in events[:-1]]
    choice = whole["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"] == "length"
    for name, values in choice["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][name]] == values
        assert len(values) == 12
    usage = events[-1]["usage"]
    assert events[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    assert usage["completion_tokens"] == 12
    assert whole["object"] == "text_completion"


def test_token_ids_are_a_prompt(service: Service, demo: Path) -> None:
    with load(demo, threads=1) as model:
        tokens = model.tokenizer.encode("In the beginning")
    body = {"max_tokens": 8, "seed": 2}
    by_ids = service.complete(prompt=[int(token) for token in tokens], **body)
    by_text = service.complete(prompt="In the beginning", **body)
    assert by_ids["choices"] == by_text["choices"]


def test_a_stop_string_ends_an_answer_and_a_bias_forbids_a_token(service: Service) -> None:
    body = {"prompt": "And the king said", "max_tokens": 30, "temperature": 0.7, "seed": 4}
    text = service.complete(**body)["choices"][0]["text"]
    stop = text.strip()[3:6]
    for given in (stop, [stop]):
        choice = service.complete(**body, stop=given)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(stop)]
    greedy = {"prompt": "And", "max_tokens": 1, "temperature": 0, "logprobs": 0}
    first = service.complete(**greedy)["choices"][0]["logprobs"]["tokens"][0]
    bias = {first.removeprefix("token_id:"): -100}
    assert service.complete(**greedy, logit_bias=bias)["choices"][0]["logprobs"]["tokens"] != [
        first
    ]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b'{"prompt": "\xff"}', 400, None),
        (b"[" * 100_000, 400, None),
        (b"[]", 400, None),
        ({}, 400, "prompt"),
        ({"prompt": 7}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [2**40]}, 400, "prompt"),
        ({"prompt": []}, 400, None),
        ({"prompt": [10**6]}, 400, None),
        ({"prompt": "a\0b"}, 400, None),
        ({"prompt": "a" * 100_000}, 400, None),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": "8"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**64 - 1}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, None),
        ({"prompt": "a", "temperature": 1e300}, 400, "temperature"),
        ({"prompt": "a", "top_p": True}, 400, "top_p"),
        ({"prompt": "a", "seed": 0.5}, 400, "seed"),
        ({"prompt": "a", "stop": [1]}, 400, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, 400, None),
        ({"prompt": "a", "logprobs": 99}, 400, None),
        ({"prompt": "a", "stream": 1}, 400, "stream"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"prompt": "a", "n": 2}, 400, "n"),
        ({"prompt": "a", "echo": True}, 400, "echo"),
        ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "a", "max_token": 3}, 400, "max_token"),
        ({"prompt": "a", "model": "another"}, 404, "model"),
        (b'{"prompt": "' + b"a" * 1_000_000 + b'"}', 413, None),
    ],
)
def test_what_cannot_be_is_refused_and_harms_nothing(
    service: Service, body: Json | bytes, status: int, param: str | None
) -> None:
    found, error = service.refusal(body)
    assert (found, error["param"]) == (status, param), error
    assert service.ask("/health")[0] == 200


def test_fields_that_change_nothing_are_taken(service: Service) -> None:
    neutral = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "presence_penalty": 0}
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "stop": None, "logprobs": None}
    service.complete(**body, **neutral, top_k=5, min_p=0.1, repetition_penalty=1.1)


def test_a_body_in_chunks_has_the_same_limit(service: Service) -> None:
    connection = service.connect()
    chunks = iter([b"[" * 100_000] * 11)
    connection.request("POST", "/v1/completions", chunks, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_an_unknown_path_is_404_and_models_are_listed(service: Service, demo: Path) -> None:
    for path in ("/nowhere", "/v1/completions"):
        status, text = service.ask(path)
        assert status == 404
        assert path in json.loads(text)["error"]["message"]
    models = json.loads(service.ask("/v1/models")[1])["data"]
    assert [model["id"] for model in models] == [demo.name]


def test_metrics_are_as_prometheus_reads_them(service: Service) -> None:
    parser = pytest.importorskip("prometheus_client.parser")

    def finished() -> float:
        status, text = service.ask("/metrics")
        assert status == 200
        families = parser.text_string_to_metric_families(text.decode())
        samples = [each for family in families for each in family.samples]
        return sum(
            float(each.value)
            for each in samples
            if each.name == "export_grok_requests_finished_total"
            and each.labels["reason"] == "length"
        )

    before = finished()
    service.complete(prompt="And", max_tokens=2)
    assert finished() == before + 1


def test_the_openai_client_streams_and_knows_errors(service: Service, demo: Path) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    given = {"model": demo.name, "prompt": "And the king", "max_tokens": 10, "seed": 6}
    events = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **given)
    )
    text = "".join(event.choices[0].text for event in events if event.choices)
    assert text == client.completions.create(**given).choices[0].text
    assert events[-1].usage.completion_tokens == 10
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(**given, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**given, "model": "another"})


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_frees_its_row(start_slow: Start, streams: bool) -> None:
    service = start_slow("--batch", "1")
    for _ in range(3):
        connection = service.connect()
        connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": streams}))
        if streams:
            connection.getresponse().read(20)
        assert until(lambda: service.load()["running"] == 1)
        connection.close()
        gone = time.monotonic()
        assert until(lambda: service.load()["running"] == 0)
        # It is seen within 0.1 s, and takes a turn of 0.02 s.
        assert time.monotonic() - gone < 1
    # Of what begins to be sent before it is known, the log has the end and not the status.
    told = "the client has gone" if streams else "completions 499"
    assert until(lambda: service.log.read_text().count(told) == 3)


def test_the_engine_stops_when_a_client_goes(start: Start, demo: Path) -> None:
    service = start(demo, "--batch", "1")
    for _ in range(5):
        service.begin(**LONG)[0].close()
        assert service.complete(prompt="And", max_tokens=1)["usage"]["completion_tokens"] == 1
    log = service.log.read_text()
    tokens = [int(count) for count in re.findall(r"the client has gone: .* (\d+) new", log)]
    assert len(tokens) == 5
    assert max(tokens) < 490, "it went on to the end of the cache"


def test_more_than_may_wait_are_told_to_come_again(start_slow: Start) -> None:
    service = start_slow("--batch", "1", "--max-waiting", "1")
    running, _ = service.begin(**ENDLESS)
    waiting = service.connect()
    waiting.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
    assert until(lambda: service.load()["waiting"] == 1)
    connection = service.connect()
    connection.request("POST", "/v1/completions", json.dumps(ENDLESS))
    answer = connection.getresponse()
    assert answer.status == 429
    assert answer.getheader("Retry-After") == "1"
    assert json.loads(answer.read())["error"]["code"] == "rate_limit_exceeded"
    for each in (running, waiting, connection):
        each.close()
    assert until(lambda: service.load()["running"] + service.load()["waiting"] == 0)
    assert service.complete(prompt="And", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_an_engine_that_fails_is_an_error_and_no_end(start_slow: Start) -> None:
    service = start_slow()
    assert service.refusal({"prompt": "!fail this"})[0] == 500
    _, answer = service.begin(prompt="!fail this")
    rest = answer.read().decode()
    assert "[DONE]" not in rest
    last = json.loads(rest.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["message"] == "a rank died"


def test_streams_that_all_wait_keep_no_health_check_out(start_slow: Start) -> None:
    service = start_slow("--batch", "2", "--max-waiting", "30")
    clients = [service.connect() for _ in range(40)]
    for client in clients:
        client.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
    assert until(lambda: service.load()["waiting"] == 30)
    assert service.ask("/metrics")[0] == 200
    for client in clients:
        client.close()


def test_what_runs_at_sigterm_is_finished(start: Start, demo: Path) -> None:
    service = start(demo, "--grace", "60")
    streams = [service.begin(**LONG)[1] for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(service.end, signal.SIGTERM)
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
        assert ended.result() == 0
    with pytest.raises(ConnectionRefusedError):
        service.ask("/health")


@pytest.mark.parametrize(
    ("grace", "signals"),
    [("0.1", [signal.SIGTERM]), ("3600", [signal.SIGINT, signal.SIGTERM])],
    ids=["grace_over", "second_signal"],
)
def test_what_runs_longer_is_cancelled_and_told_so(
    start_slow: Start, grace: str, signals: list[signal.Signals]
) -> None:
    service = start_slow("--grace", grace, "--batch", "2")
    streams = [service.begin(**ENDLESS)[1] for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(service.refusal, ENDLESS)
        assert until(lambda: service.load()["waiting"] == 1)
        ended = pool.submit(service.end, *signals)
        for stream in streams:
            last = stream.read().decode().split("\n\n")[-2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert whole.result()[0] == 503
        assert ended.result() == 0


def test_sigterm_in_the_middle_of_the_engines_load_ends_it_with_0(
    start: Start, demo: Path
) -> None:
    service = start(demo, "--grace", "0", "--batch", "2")
    streams = [service.begin(**LONG)[1] for _ in range(2)]
    assert service.end(signal.SIGTERM) == 0
    for stream in streams:
        assert stream.read().endswith(b"\n\n")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "--bundle is missing"),
        (["--bundle"], 2, "--bundle has no value"),
        (["--bundle", "x", "--port", "70000"], 2, "from 0 to 65535"),
        (["--bundle", "x", "--grace", "soon"], 2, "--grace is 'soon'"),
        (["--bundle", "x", "--batches", "2"], 2, "unknown option --batches"),
        (["--bundle", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    program: Path, options: list[str], code: int, message: str
) -> None:
    done = subprocess.run([program, *options], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_a_port_that_is_taken_is_named(service: Service, program: Path, demo: Path) -> None:
    done = subprocess.run(
        [program, "--bundle", demo, "--port", str(service.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert str(service.port) in done.stderr


def test_cmake_says_how_to_come_by_what_is_missing(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["cmake", "-S", SOURCE, "-B", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "export-grok c-library" in done.stderr


def test_the_document_names_the_endpoints_and_options_that_there_are() -> None:
    document = (SOURCE / "README.md").read_text(encoding="utf-8")
    routes = re.findall(r'http_\.(?:Get|Post)\(\s*"([^"]+)"', (SOURCE / "server.cpp").read_text())
    assert len(routes) == 4
    for name in (*routes, "--max-body", "--grace"):
        assert f"{name}`" in document or f"`{name}" in document
