"""The tests and paths that a document cites, so that a test can hold it to them."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.documents import ROOT

__all__ = ["CITED", "fault_of_test", "faults"]

FOLDERS = "benchmarks|docs|engines|export|export_grok|plugins|runtime|scripts|tests"

# A test with one of these marks does not run when pytest is called plainly, or may fail.
LEFT_OUT = {"gpu", "multi_gpu", "skip", "slow", "xfail"}

# A path and the name of a test in it.
CITED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with the tests, paths and links that a document in `docs` cites."""
    for path, name in CITED.findall(text):
        if not (ROOT / path).is_file():
            yield f"{path} is no file"
        elif fault := fault_of_test(_parsed(ROOT / path), name):
            yield f"{path}: {fault}"
    for path in re.findall(rf"`((?:{FOLDERS})/[\w/.-]*)`", text):
        if not (ROOT / path).exists():
            yield f"{path} does not exist"
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        if not (ROOT / "docs" / link).exists():
            yield f"{link} leads nowhere"


def fault_of_test(module: ast.Module, name: str) -> str | None:
    """Return why plain pytest does not run test `name` of the module; None if it does."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and name.startswith("test_"):
            left_out = LEFT_OUT & (_marks(node.decorator_list) | _module_marks(module))
            never = left_out or _skips(node.body) or _skips(module.body)
            return f"{name} does not run" if never else None
    return f"there is no test {name}"


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _marks(expressions: list[ast.expr]) -> set[str]:
    """Return the names of the pytest marks among `expressions`."""
    found = set()
    for expression in expressions:
        call = expression if isinstance(expression, ast.Call) else None
        name = ast.unparse(call.func if call else expression).removeprefix("pytest.mark.")
        always = call and name == "skipif" and isinstance(call.args[0], ast.Constant)
        found.add("skip" if always else name)
    return found


def _module_marks(module: ast.Module) -> set[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            return _marks(node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return set()


def _skips(body: list[ast.stmt]) -> bool:
    """Return whether these statements skip whatever happens."""
    return any(ast.unparse(node).startswith("pytest.skip(") for node in body)
