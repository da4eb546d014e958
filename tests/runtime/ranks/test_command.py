"""What a user sees of ranks: one line of error, and no process that outlives the command."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_grok.errors import ConfigError
from export_grok.runtime.open import open_session, ranks_of
from export_grok.runtime.ranks.watch import activity
from tests.runtime.ranks.conftest import CONFIG, BundleFor
from tests.runtime.ranks.processes import children, gone, soon
from tests.runtime.ranks.toy import expected

ROOT = Path(__file__).parents[3]
# The command line, with the toy in place of a backend's ranks.
RUN = """
import sys
from export_grok.cli import main
from export_grok.runtime import open as opening
RankedSession = opening.RankedSession
toy = {"opener": "tests.runtime.ranks.toy:open_toy"}
opening.RankedSession = lambda *args, **options: RankedSession(*args, **(options | toy))
main(sys.argv[1:])
"""
TOKENS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, 9))

Logits = Callable[..., Any]


@pytest.fixture
def logits(bundle_for: BundleFor, tmp_path: Path) -> Logits:
    """Return what starts `logits` with two ranks, fed one token after the other."""

    @contextmanager
    def start(
        *options: str, before: Sequence[str] = (), **fault: Any
    ) -> Iterator[subprocess.Popen[str]]:
        np.save(tmp_path / "tokens.npy", TOKENS)
        paths = ("--tokens", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "logits.npz"))
        command = ("logits", str(bundle_for(2).folder), *paths, "--decode", "6", *options)
        with subprocess.Popen(
            [sys.executable, "-c", RUN, *before, *command],
            cwd=ROOT,
            env=os.environ | {"TOY": json.dumps(fault)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            yield running

    return start


def does(pid: int, what: str) -> bool:
    """Return whether a rank came to its planted fault, as far as one sees it from outside."""
    now = activity(pid)
    if now is None:
        return False
    return now.stopped if what == "stop" else now.ticks > 50 or what == "sleep"


def ranks_of_process(pid: int) -> list[int]:
    """Return both ranks of a command, once they are there."""
    assert soon(lambda: len(children(pid)) == 2)
    return children(pid)


def test_a_command_takes_the_ranks_from_the_bundle(logits: Logits, tmp_path: Path) -> None:
    with logits("--tp", "2", "--threads", "2") as running:
        assert running.communicate()[1] == ""
    assert running.returncode == 0
    found = np.load(tmp_path / "logits.npz")["logits"]
    assert np.array_equal(found, expected(CONFIG, TOKENS))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"do": "kill", "rank": 1, "step": 4, "at": "layer 1, experts"}, "rank 1 of 2 was ended"),
        ({"do": "raise", "rank": 0, "step": 1, "at": "layer 0, experts"}, "rank 0 of 2 failed"),
        ({"do": "exit", "rank": 1, "step": 0, "at": "start"}, "rank 1 of 2 left with exit code 3"),
    ],
)
def test_a_rank_that_fails_is_one_line_and_an_exit_code(
    logits: Logits, fault: dict[str, Any], told: str
) -> None:
    with logits(**fault) as running:
        out, err = running.communicate()
    assert running.returncode == 1
    assert out == ""
    assert err.startswith(f"Error: {told}")
    assert err.count("\n") == 1


def test_what_ranks_print_is_shown_with_debug(logits: Logits) -> None:
    with logits(before=["--debug"]) as running:
        _, err = running.communicate()
    assert "rank 1: toy 1 of 2 with " in err


@pytest.mark.parametrize("do", ["stop", "spin", "sleep"])
def test_ctrl_c_ends_the_ranks_whatever_they_do(logits: Logits, do: str) -> None:
    with logits(rank=1, step=2, at="layer 0, experts", do=do) as running:
        ranks = ranks_of_process(running.pid)
        assert soon(lambda: does(ranks[1], do))
        os.kill(running.pid, signal.SIGINT)
        _, err = running.communicate()
    assert running.returncode == 130
    assert "Traceback" not in err
    # One that had only just been started ends by itself, when it finds its parent gone.
    assert soon(lambda: all(gone(pid) for pid in ranks))


@pytest.mark.parametrize("do", ["stop", "spin", "sleep"])
def test_when_the_command_is_killed_its_ranks_end(logits: Logits, do: str) -> None:
    with logits(rank=1, step=2, at="layer 0, experts", do=do) as running:
        ranks = ranks_of_process(running.pid)
        assert soon(lambda: does(ranks[1], do))
        running.kill()
        assert soon(lambda: all(gone(pid) for pid in ranks))


def test_another_number_of_ranks_than_the_bundle_has_is_refused(bundle_for: BundleFor) -> None:
    bundle = bundle_for(8)
    assert ranks_of(bundle) == 8
    opening = open_session(bundle, batch=1, max_length=4, tensor_parallel=4)
    with pytest.raises(ConfigError, match=r"needs 8 ranks, sees --tp 4; .*--tp 4"), opening:
        pass


def test_neither_rows_nor_slots_may_be_none(bundle_for: BundleFor) -> None:
    for batch, length in ((0, 4), (1, 0)):
        opening = open_session(bundle_for(2), batch=batch, max_length=length)
        with pytest.raises(ConfigError, match="1 or more"), opening:
            pass
