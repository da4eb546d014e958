"""docs/fidelity.md cites tests that exist and run, and figures that are computed."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import FIXTURES, load_golden

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
FOLDERS = "docs|engines|export|export_grok|plugins|runtime|scripts|tests"

# A test with one of these marks does not run when pytest is called plainly, or may fail.
LEFT_OUT = {"gpu", "multi_gpu", "skip", "slow", "xfail"}

CITED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FLOAT = r"(\d[\d.e-]*)"
KEY = r"[A-Z]|[a-z]\d+"


# ---- citations


def marks(expressions: list[ast.expr]) -> set[str]:
    """Return the names of the pytest marks among `expressions`."""
    found = set()
    for expression in expressions:
        call = expression if isinstance(expression, ast.Call) else None
        name = ast.unparse(call.func if call else expression).removeprefix("pytest.mark.")
        always = call and name == "skipif" and isinstance(call.args[0], ast.Constant)
        found.add("skip" if always else name)
    return found


def module_marks(module: ast.Module) -> set[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return marks(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return set()


def skips(body: list[ast.stmt]) -> bool:
    """Return whether these statements skip whatever happens."""
    return any(ast.unparse(node).startswith("pytest.skip(") for node in body)


def fault_of_test(module: ast.Module, name: str) -> str | None:
    """Return why plain pytest does not run test `name` of the module; None if it does."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and name.startswith("test_"):
            left_out = LEFT_OUT & (marks(node.decorator_list) | module_marks(module))
            never = left_out or skips(node.body) or skips(module.body)
            return f"{name} does not run" if never else None
    return f"there is no test {name}"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with the tests and paths that `text` cites."""
    for path, name in CITED.findall(text):
        if not (ROOT / path).is_file():
            yield f"{path} is no file"
        elif fault := fault_of_test(parsed(ROOT / path), name):
            yield f"{path}: {fault}"
    for path in re.findall(rf"`((?:{FOLDERS})/[\w/.-]*)`", text):
        if not (ROOT / path).exists():
            yield f"{path} does not exist"
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        if not (ROOT / "docs" / link).exists():
            yield f"{link} leads nowhere"


def test_every_cited_test_runs_and_every_cited_path_exists() -> None:
    assert len(CITED.findall(TEXT)) > 50
    assert list(faults(TEXT)) == []


@pytest.mark.parametrize(
    "citation",
    [
        "`tests/test_nowhere.py::test_help`",
        "`tests/test_fidelity.py::test_that_is_not_here`",
        "`tests/test_fidelity.py::faults`",
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


# ---- keys: each stands for one test, and each row of a table names some


def rows() -> list[str]:
    """Return what is said to show each point."""
    tables = re.findall(r"^\|.*\| shown by \|\n\|[-|:]+\|\n((?:\|.*\|\n)+)", TEXT, re.MULTILINE)
    return [row.split("|")[-2] for table in tables for row in table.splitlines()]


def named(text: str) -> set[str]:
    return set(re.findall(rf"\b({KEY})\b", re.sub(r"`.*?`", "", text)))


def test_every_point_names_tests_and_every_test_is_named() -> None:
    keys = re.findall(rf"^(?:- |\| )({KEY})(?::| \|) `tests/", TEXT, re.MULTILINE)
    assert len(keys) == len(set(keys)) == len(CITED.findall(TEXT))
    assert len(rows()) > 50
    assert [cell for cell in rows() if not named(cell) or named(cell) - set(keys)] == []
    prose = re.sub(r"^(- \w+:|\|).*$", "", TEXT, flags=re.MULTILINE)
    assert set(keys) == {key for text in (prose, *rows()) for key in named(text) if key in keys}


# ---- figures


def test_every_planted_mistake_is_planted_with_its_figures() -> None:
    folders = [ROOT / folder for folder in ("tests", "runtime", "export")]
    paths = {path for folder in folders for path in folder.rglob("*.py")} - {Path(__file__)}
    texts = [path.read_text(encoding="utf-8") for path in paths]
    plants = "\n".join(text for text in texts if "gates_renormalised" in text)
    triples = re.findall(rf"\(\s*{FLOAT},\s*{FLOAT},\s*{FLOAT},?\s*\)", plants)
    known = [[float(figure) for figure in triple] for triple in triples]
    table = re.findall(rf"\| `(\w+)` \| {FLOAT} \| {FLOAT} \| {FLOAT} \|", TEXT)
    assert len(table) == 7
    for name, *figures in table:
        assert [float(figure) for figure in figures] in known, name
    for name in (name for cell in rows() for name in re.findall(r"`(\w+)`", cell)):
        assert re.search(rf"\b{name}\b", plants), name


def test_the_figures_of_dropped_roundings_are_those_of_the_goldens() -> None:
    (sentence,) = re.findall(r"\*\*XLA\*\*.*?all six", TEXT, re.DOTALL)
    lists = re.findall(rf"{FLOAT}, {FLOAT}\sand\s{FLOAT}[,\s]", sentence)
    for pair, figures in zip((("bf16_fused", "bf16"), ("bf16", "f32")), lists, strict=True):
        for name, figure in zip(FIXTURES, figures, strict=True):
            one, other = (load_golden(name).arrays[f"{of}/prefill_logits"] for of in pair)
            assert float(np.abs(one - other).mean()) == pytest.approx(float(figure), rel=0.03)
