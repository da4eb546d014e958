"""docs/fidelity.md cites tests that exist and run, and figures that are computed."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.citations import CITED, faults
from tests.conftest import FIXTURES, load_golden
from tests.documents import ROOT

TEXT = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")

FLOAT = r"(\d[\d.e-]*)"
KEY = r"[A-Z]|[a-z]\d+"


def test_every_cited_test_runs_and_every_cited_path_exists() -> None:
    assert len(CITED.findall(TEXT)) > 50
    assert list(faults(TEXT)) == []


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
