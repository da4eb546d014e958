"""docs/reliability.md has a line for every report, with tests that exist and run."""

import re

from tests.citations import CITED, faults
from tests.documents import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")

# The reports by their numbers, as the document has them: some numbers are those of reports of
# other things.
REPORTS = {
    *(1, 2, 3, 4, 5, 6, 8, 9, 10, 12),
    *(24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 35, 36, 37),
    *(38, 39, 40, 41, 42, 43, 44, 45, 47, 48, 49, 50),
    *(57, 59, 60, 61, 62, 64, 65, 67, 68, 70, 71, 72),
    *(76, 77, 78, 79),
}
NEED_A_GPU = {38, 39, 42, 43, 47, 48, 49}


def rows(heading: str, text: str = TEXT) -> list[int]:
    """Return the numbers in the tables of the sections whose headings match."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = [section for section in sections if re.match(heading, section)]
    assert found, f"no section {heading}"
    return [int(n) for section in found for n in re.findall(r"^\| (\d+) \|", section, re.M)]


def test_every_cited_test_runs_and_every_cited_path_exists() -> None:
    assert len(CITED.findall(TEXT)) > 40
    assert list(faults(TEXT)) == []


def test_every_report_has_one_line_and_tests() -> None:
    told = rows("(?!At full load|Killed|Waits for a GPU)")
    assert sorted(told) == sorted(REPORTS)
    assert set(rows("Waits for a GPU")) == NEED_A_GPU
    tests = re.findall(r"^- (\d+): ((?:`tests/[^`]*`,?\s+)+)", TEXT, re.MULTILINE)
    assert [int(number) for number, _ in tests] == told
    cited = [test for _, cell in tests for test in CITED.findall(cell)]
    assert len(cited) == len(CITED.findall(TEXT.split("## At full load")[0]))
