"""The program of docs/serving.md runs and prints what it is there to show."""

import re
from pathlib import Path

import pytest

from tests.bundles import BundleOf
from tests.documents import ROOT, blocks


def test_the_program_of_the_document_runs(
    bundle_of: BundleOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "engine").symlink_to(bundle_of("demo").folder)
    monkeypatch.chdir(tmp_path)
    (program,) = blocks((ROOT / "docs" / "serving.md").read_text(encoding="utf-8"))
    exec(program.text, {})
    printed = capsys.readouterr().out
    first, second = map(int, re.findall(r"(\d+) tokens were there already", printed))
    assert first == 0 < second
    assert printed.rstrip().endswith("cancelled")
