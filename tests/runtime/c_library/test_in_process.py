"""The library in a process that has an interpreter already, on models whose session is made up."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    ExportGrokError,
    MissingDependencyError,
    NeedsError,
    NumericsError,
    RankError,
)
from export_grok.runtime.c_library import api
from export_grok.runtime.c_library.status import Status
from export_grok.runtime.text.tokenizer import Tokenizer
from tests.bundles import BundleOf
from tests.runtime.c_library.conftest import Program
from tests.runtime.fake_model import StoppedSession, model_of, session_of
from tests.runtime.fake_session import FakeSession

cffi = pytest.importorskip("cffi")

TEXT = "日本語 👩‍👩‍👧 é"


class Interface:
    """The functions of the header, as a program has them.

    Attributes:
        ffi: makes structures and reads them.
        lib: has the functions.
    """

    def __init__(self, folder: Path) -> None:
        self.ffi = cffi.FFI()
        self.ffi.cdef(readable((folder / "include" / "export_grok.h").read_text(encoding="utf-8")))
        self.lib = self.ffi.dlopen(str(folder / "lib" / "libexport_grok.so"))

    def made(self, kind: str, **values: Any) -> Any:
        """Return a structure with its size and the defaults of the header."""
        known: dict[str, dict[str, Any]] = {
            "eg_params": {"top_p": 1.0, "repetition_penalty": 1.0, "logprobs": -1},
            "eg_options": {"max_waiting": -1},
            "eg_piece": {"token": -1},
        }
        defaults, size = known.get(kind, {}), self.ffi.sizeof(kind)
        return self.ffi.new(f"{kind} *", {"size": size, **defaults, **values})

    def error(self) -> tuple[int, str]:
        """Return the code and the text of the last error of this thread."""
        text = self.ffi.new("const char **")
        return self.lib.eg_last_error(text), self.ffi.string(text[0]).decode()

    def opened(self, **options: Any) -> int:
        """Return the handle of a model."""
        model = self.ffi.new("eg_model *")
        made = self.made("eg_options", **options)
        assert self.lib.eg_open(b"anything", made, model) == Status.OK, self.error()
        return int(model[0])

    def submitted(self, model: int, tokens: Sequence[int], **params: Any) -> int:
        """Return the handle of a request."""
        request = self.ffi.new("eg_request *")
        made = self.made("eg_params", **params)
        code = self.lib.eg_submit_tokens(model, list(tokens), len(tokens), made, request)
        assert code == Status.OK, self.error()
        return int(request[0])

    def pulled(self, request: int) -> tuple[list[bytes], int]:
        """Return the texts of all pieces that are left, and what came behind them."""
        piece, texts = self.made("eg_piece"), []
        while (code := self.lib.eg_next(request, -1, piece)) == Status.OK:
            texts.append(bytes(self.ffi.buffer(piece.text, piece.length)))
        return texts, code


def readable(header: str) -> str:
    """Return what cffi reads of a header: without comments and what is for the preprocessor."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    header = re.sub(r"^#ifdef __cplusplus.*?^#endif", "", header, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^#(?:.*\\\n)*.*$", "", header, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def c(c_library: Path) -> Interface:
    return Interface(c_library)


Opened = Callable[..., int]


@pytest.fixture
def opened(c: Interface, bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Return the way to the handle of a model that runs on a session."""
    models = []

    def with_session(session: FakeSession, **limits: Any) -> int:
        def load(_folder: Path, *, observers: Sequence[Any], **_options: Any) -> Any:
            return model_of(bundle_of("demo"), session, observers=observers, **limits)

        monkeypatch.setattr(api, "load", load)
        models.append(c.opened())
        return models[-1]

    yield with_session
    for model in models:
        c.lib.eg_close(model)


def reciting(answer: Sequence[int]) -> Callable[..., NDArray[np.float32]]:
    """Return logits that answer a prompt of one token with these."""

    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        logits = np.zeros(vocabulary, np.float32)
        logits[answer[min(len(tokens), len(answer)) - 1]] = 1
        return logits

    return logits_of


@pytest.fixture
def stopped(bundle_of: BundleOf) -> Iterator[StoppedSession]:
    session = StoppedSession(bundle_of("demo").config, batch=2, max_length=64)
    yield session
    session.let_all()


def test_a_python_program_that_used_the_library_ends_well(c_library: Path, demo: Path) -> None:
    code = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
model, request = ctypes.c_uint64(), ctypes.c_uint64()
assert lib.eg_open(sys.argv[2].encode(), None, ctypes.byref(model)) == 0
assert lib.eg_submit(model, b"a", None, ctypes.byref(request)) == 0
"""
    library = c_library / "lib" / "libexport_grok.so"
    done = subprocess.run(
        [sys.executable, "-c", code, library, demo], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# Text.


def test_characters_of_many_bytes_come_whole(
    c: Interface, opened: Opened, bundle_of: BundleOf, program: Program
) -> None:
    demo = bundle_of("demo")
    ids = Tokenizer(demo.folder / "tokenizer.model").encode(TEXT)
    assert len(ids) > len(TEXT), "no character is cut"
    model = opened(session_of(demo, logits_of=reciting(ids)))
    pulled, streamed = (c.submitted(model, [5], max_new_tokens=len(ids)) for _ in range(2))
    texts, code = c.pulled(pulled)
    assert code == Status.END
    assert len(texts) == len(ids)
    assert "".join(text.decode() for text in texts).strip() == TEXT  # decode raises if one is cut

    host = cffi.FFI()
    host.cdef("int collect(uint64_t request, char *text, size_t capacity);")
    text = host.new("char[]", 1000)
    assert host.dlopen(str(program("collect.so"))).collect(streamed, text, 1000) == Status.END
    assert host.string(text) == b"".join(piece + b"|" for piece in texts)


def test_what_a_piece_points_at_stays_while_another_request_is_pulled(
    c: Interface, opened: Opened, bundle_of: BundleOf
) -> None:
    model = opened(session_of(bundle_of("demo")))
    first, second = (c.submitted(model, [token], max_new_tokens=4, logprobs=3) for token in (5, 6))
    kept = c.made("eg_piece")
    assert c.lib.eg_next(first, -1, kept) == Status.OK
    before = (
        bytes(c.ffi.buffer(kept.text, kept.length)),
        [(kept.top[at].token, kept.top[at].logprob) for at in range(kept.top_count)],
    )
    assert len(before[1]) == 3
    assert before[1] == sorted(before[1], key=lambda of: -of[1])
    assert kept.logprob <= before[1][0][1]
    c.pulled(second)
    after = (
        bytes(c.ffi.buffer(kept.text, kept.length)),
        [(kept.top[at].token, kept.top[at].logprob) for at in range(kept.top_count)],
    )
    assert after == before


# Waiting.


def test_a_timeout_is_no_error_and_loses_nothing(
    c: Interface, opened: Opened, stopped: StoppedSession
) -> None:
    model = opened(stopped)
    request = c.submitted(model, [5], max_new_tokens=2)
    piece = c.made("eg_piece", text=c.ffi.NULL)
    for milliseconds in (0, 5):
        assert c.lib.eg_next(request, milliseconds, piece) == Status.TIMEOUT
        assert piece.text == c.ffi.NULL
    stopped.let_all()
    texts, code = c.pulled(request)
    assert (len(texts), code) == (2, Status.END)
    assert c.lib.eg_next(request, 2**63 - 1, piece) == Status.END


def test_who_waits_for_a_request_hears_that_it_was_released(
    c: Interface, opened: Opened, stopped: StoppedSession
) -> None:
    request = c.submitted(opened(stopped), [5])
    heard = []
    thread = threading.Thread(
        target=lambda: heard.append(c.lib.eg_next(request, -1, c.made("eg_piece")))
    )
    thread.start()
    assert stopped.entered.wait(20)
    assert c.lib.eg_release(request) == Status.OK
    stopped.let_all()
    thread.join(20)
    assert heard == [Status.CLOSED]


def test_no_room_is_busy_and_the_load_tells_the_rows(
    c: Interface, opened: Opened, stopped: StoppedSession
) -> None:
    model = opened(stopped, max_waiting=1)
    requests = [c.submitted(model, [5]) for _ in range(3)]
    refused = c.ffi.new("eg_request *")
    assert c.lib.eg_submit_tokens(model, [5], 1, c.ffi.NULL, refused) == Status.BUSY
    assert refused[0] == 0
    assert c.error()[0] == Status.BUSY
    load = c.made("eg_load_t")
    assert c.lib.eg_load(model, load) == Status.OK
    assert (load.batch, load.capacity) == (2, 2 * 64)
    for request in requests:
        assert c.lib.eg_cancel(request) == Status.OK


# Errors.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RankError("rank 1 died", rank=1), Status.ENGINE),
        (NumericsError("row 0 is no number"), Status.ENGINE),
        (MemoryError(), Status.ENGINE),  # of the engine's thread: the model is ended by it
        (ZeroDivisionError("of the engine"), Status.ENGINE),
    ],
)
def test_an_error_of_the_engine_comes_behind_the_last_piece_each_time(
    c: Interface, opened: Opened, bundle_of: BundleOf, error: Exception, code: Status
) -> None:
    def logits_of(tokens: Sequence[int], vocabulary: int) -> NDArray[np.float32]:
        if len(tokens) == 3:
            raise error
        return np.ones(vocabulary, np.float32)

    model = opened(session_of(bundle_of("demo"), logits_of=logits_of))
    request = c.submitted(model, [5], max_new_tokens=9, ignore_eos=1)
    texts, first = c.pulled(request)
    assert (len(texts), first) == (3, code)
    told = c.error()
    assert str(error) in told[1]
    assert c.pulled(request) == ([], code)
    assert c.error() == told
    request = c.ffi.new("eg_request *")
    assert c.lib.eg_submit_tokens(model, [5], 1, c.ffi.NULL, request) == Status.CLOSED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("the weights", ["one is cut"]), Status.BUNDLE),
        (ConfigError("no such option"), Status.CONFIG),
        (MissingDependencyError("onnxruntime cannot be imported"), Status.CONFIG),
        (NeedsError("too little memory"), Status.CONFIG),
        (OSError(24, "Too many open files"), Status.CONFIG),
        (BusyError("as many wait as may"), Status.BUSY),
        (RankError("rank 1 died", rank=1), Status.ENGINE),
        (ExportGrokError("the engine failed"), Status.ENGINE),
        (MemoryError(), Status.MEMORY),
        (KeyError("nobody's"), Status.INTERNAL),
        (KeyboardInterrupt(), Status.INTERNAL),
        (SystemExit(3), Status.INTERNAL),
        (RecursionError("too deep"), Status.INTERNAL),
        (ConfigError("a surrogate \udc80, and é" * 1000), Status.CONFIG),
    ],
)
def test_no_error_leaves_and_each_has_a_code_and_a_text(
    c: Interface,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: Status,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(api, "load", fails)
    model = c.ffi.new("eg_model *", 7)
    assert c.lib.eg_open(b"x", c.ffi.NULL, model) == code
    assert model[0] == 0
    told, text = c.error()
    assert told == code
    assert text
    assert str(error).replace("\udc80", "?").startswith(text[:4000]) or str(error) in text
    if code == Status.INTERNAL:
        assert type(error).__name__ in text
    assert capfd.readouterr() == ("", "")


def test_the_text_of_an_error_is_cut_between_characters(
    c: Interface, monkeypatch: pytest.MonkeyPatch
) -> None:
    for letter, more in ((letter, more) for letter in "é道👩" for more in range(4)):
        text = "a" * more + letter * 5000

        def fails(*_: object, text: str = text, **__: object) -> None:
            raise ConfigError(text)

        monkeypatch.setattr(api, "load", fails)
        assert c.lib.eg_open(b"x", c.ffi.NULL, c.ffi.new("eg_model *")) == Status.CONFIG
        told = c.error()[1]  # decoded: it is whole
        assert text.startswith(told)
        assert len(told.encode()) > 4000


# Structures of other headers.


def test_a_structure_of_an_older_header_is_filled_as_far_as_it_goes(
    c: Interface, opened: Opened, bundle_of: BundleOf
) -> None:
    model = opened(session_of(bundle_of("demo")))
    request = c.submitted(model, [5], max_new_tokens=3)
    size = c.ffi.offsetof("eg_piece", "token")  # a header that knew of text alone
    memory = c.ffi.new("char[]", b"\x5a" * 200)
    piece = c.ffi.cast("eg_piece *", memory)
    piece.size = size
    assert c.lib.eg_next(request, -1, piece) == Status.OK
    assert piece.size == size
    c.ffi.string(piece.text)
    assert bytes(c.ffi.buffer(memory)[size:200]) == b"\x5a" * (200 - size)

    size = c.ffi.offsetof("eg_usage_t", "new_tokens")
    memory = c.ffi.new("char[]", b"\x5a" * 200)
    usage = c.ffi.cast("eg_usage_t *", memory)
    usage.size = size
    assert c.lib.eg_usage(request, usage) == Status.OK
    assert usage.prompt_tokens == 1
    assert bytes(c.ffi.buffer(memory)[size:200]) == b"\x5a" * (200 - size)


def test_fields_that_an_older_header_lacks_have_their_defaults(
    c: Interface, opened: Opened, bundle_of: BundleOf
) -> None:
    model = opened(session_of(bundle_of("demo")))
    size = c.ffi.offsetof("eg_params", "temperature")
    params = c.made("eg_params", max_new_tokens=2)
    params.temperature, params.top_p = -5.0, float("nan")  # behind the end of that header's
    params.size = size
    request = c.ffi.new("eg_request *")
    assert c.lib.eg_submit_tokens(model, [5], 1, params, request) == Status.OK, c.error()
    texts, code = c.pulled(int(request[0]))
    assert (len(texts), code) == (2, Status.END)


def test_a_structure_of_a_newer_header_is_read_and_written_as_far_as_ours_goes(
    c: Interface, opened: Opened, bundle_of: BundleOf
) -> None:
    model = opened(session_of(bundle_of("demo")))
    own = c.ffi.sizeof("eg_load_t")
    memory = c.ffi.new("char[]", b"\x5a" * 200)
    load = c.ffi.cast("eg_load_t *", memory)
    load.size = own + 40
    assert c.lib.eg_load(model, load) == Status.OK
    assert (load.size, load.batch) == (own + 40, 2)
    assert bytes(c.ffi.buffer(memory)[own:200]) == b"\x5a" * (200 - own)


# Metrics.


def test_metrics_are_those_of_the_model_in_a_buffer_of_the_caller(
    c: Interface, opened: Opened, bundle_of: BundleOf
) -> None:
    pytest.importorskip("prometheus_client")
    model = opened(session_of(bundle_of("demo")))
    c.pulled(c.submitted(model, [5], max_new_tokens=3))
    length = c.ffi.new("size_t *")
    assert c.lib.eg_metrics(model, c.ffi.NULL, 99999, length) == Status.TRUNCATED
    needed = int(length[0])
    small = c.ffi.new("char[]", b"\x5a" * (needed + 1))
    assert c.lib.eg_metrics(model, small, needed, length) == Status.TRUNCATED
    assert set(c.ffi.buffer(small)[: needed + 1]) == {0x5A}
    assert c.lib.eg_metrics(model, small, needed + 1, length) == Status.OK
    text = c.ffi.string(small).decode()
    assert len(text.encode()) == length[0] == needed
    assert "export_grok_new_tokens_total 3.0" in text


def test_without_the_extra_a_model_opens_and_its_metrics_say_what_brings_them(
    c: Interface, opened: Opened, bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    model = opened(session_of(bundle_of("demo")))
    assert c.pulled(c.submitted(model, [5], max_new_tokens=3))[1] == Status.END
    length = c.ffi.new("size_t *")
    assert c.lib.eg_metrics(model, c.ffi.NULL, 0, length) == Status.CONFIG
    assert "export-grok[metrics]" in c.error()[1]
