"""The links in export_grok/ must lead to the folders that setup.py installs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("export", "plugins", "engines", "runtime")


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_leads_to_the_folder(folder: str) -> None:
    assert (ROOT / "export_grok" / folder).resolve() == ROOT / folder


def test_setup_installs_these_folders_and_no_others() -> None:
    names = ", ".join(f'"{folder}"' for folder in FOLDERS)
    assert f"FOLDERS = ({names})" in (ROOT / "setup.py").read_text()
    links = {path.name for path in (ROOT / "export_grok").iterdir() if path.is_symlink()}
    assert links == set(FOLDERS)


def test_links_are_relative_so_that_a_checkout_may_lie_anywhere() -> None:
    for folder in FOLDERS:
        assert (ROOT / "export_grok" / folder).readlink() == Path("..") / folder


def test_every_folder_of_modules_is_a_package() -> None:
    modules = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert all((path.parent / "__init__.py").exists() for path in modules)


def test_imports_are_absolute_by_the_name_of_the_package() -> None:
    # `from export.trace import x` works in the checkout, and nowhere else.
    wrong = re.compile(rf"^\s*(from|import) ({'|'.join(FOLDERS)})\b", re.MULTILINE)
    for folder in (*FOLDERS, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not wrong.search(path.read_text()), path
