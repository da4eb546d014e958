"""A bar is drawn on a terminal, one at a time, and nothing anywhere else."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from export_grok.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Have stderr be a terminal. In a fixture pytest would put its own back before the test."""
    screen = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        patch.setenv("TERM", "xterm")
        yield screen


def test_nothing_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("outer", 2) as advance:
        advance(2)
    assert capsys.readouterr() == ("", "")


def test_a_bar_within_a_bar_is_not_drawn() -> None:
    with terminal() as screen, progress_bar("outer", 2) as advance:
        with progress_bar("inner", 5, unit="bytes") as quiet:
            quiet(5)
        advance(1)
    assert "outer" in screen.getvalue()
    assert "inner" not in screen.getvalue()


def test_bars_follow_each_other_also_after_an_error() -> None:
    with terminal() as screen:
        with pytest.raises(ValueError, match="broken off"), progress_bar("first", 1):
            raise ValueError("broken off")
        with progress_bar("second", 1) as advance:
            advance(1)
    assert "first" in screen.getvalue()
    assert "second" in screen.getvalue()
