"""A citation of a test that is not there, or never runs, is seen."""

import ast

import pytest

from tests.citations import fault_of_test, faults


@pytest.mark.parametrize(
    "citation",
    [
        "`tests/test_nowhere.py::test_help`",
        "`tests/test_citations.py::test_that_is_not_here`",
        "`tests/citations.py::faults`",
        "`export/nowhere.py`",
        "[a page](nowhere.md)",
    ],
)
def test_a_citation_of_what_is_not_there_is_seen(citation: str) -> None:
    assert len(list(faults(f"It is so: {citation}."))) == 1


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("@pytest.mark.parametrize('x', [1])\ndef test_it(x): pass", True),
        ("@pytest.mark.skipif(found() is None, reason='')\ndef test_it(): pass", True),
        ("def test_it():\n    if not found():\n        pytest.skip('')", True),
        ("@pytest.mark.skip\ndef test_it(): pass", False),
        ("@pytest.mark.skipif(True, reason='')\ndef test_it(): pass", False),
        ("def test_it():\n    pytest.skip('')", False),
        ("pytestmark = [pytest.mark.slow]\ndef test_it(): pass", False),
        ("pytestmark = pytest.mark.gpu\ndef test_it(): pass", False),
        ("pytest.skip('', allow_module_level=True)\ndef test_it(): pass", False),
    ],
)
def test_a_test_that_never_runs_is_seen(source: str, runs: bool) -> None:
    assert (fault_of_test(ast.parse(source), "test_it") is None) == runs
