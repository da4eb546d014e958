"""A comparison as a folder to keep or send: a page that needs nothing else, and all as JSON."""

from pathlib import Path

from export_grok.files import atomic_file, output_errors, write_json
from export_grok.runtime.verify.page import page_of
from export_grok.runtime.verify.result import Verification

__all__ = ["write_report"]


def write_report(result: Verification, folder: Path) -> Path:
    """Write `index.html` and `verification.json` and return the page's path.

    The same result gives the same bytes. Files of those names that are there are replaced.

    Args:
        result: what was compared.
        folder: made if it is not there.

    Raises:
        MissingDependencyError: matplotlib, which draws the pictures, is not installed.
        OutputError: the folder cannot be made, or a file in it not written.
    """
    page = page_of(result)
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "verification.json", result.to_dict())
    with atomic_file(folder / "index.html") as file:
        file.write(page.encode())
    return folder / "index.html"
