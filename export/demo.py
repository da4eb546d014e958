"""The demo: a small Grok-1 that was trained on a text, in the released format.

Everything but the size is real: int8 experts with 8 scale groups, six query heads to a key/value
head, a tied embedding, a tokenizer. `examples/demo_model` tells how it was made.
"""

from pathlib import Path

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER
from export_grok.files import atomic_file, check_new, new_folder
from export_grok.needs import Disk, Needs, OnNeeds

__all__ = ["DEMO_MODEL", "write_demo_checkpoint"]

# Shipped with the package.
DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"


def write_demo_checkpoint(out: Path, *, on_needs: OnNeeds = lambda needs: None) -> GrokConfig:
    """Write the demo's checkpoint, config and tokenizer to `out`, 5 MB, and return its config.

    Args:
        out: folder, new or empty.
        on_needs: gets what that needs, before anything is written.

    Raises:
        OutputError: `out` cannot be written, or holds something. What was begun is removed.
    """
    files = sorted(path for path in DEMO_MODEL.rglob("*") if path.is_file())
    check_new(out)
    on_needs(Needs(disk=(Disk(folder=out, nbytes=sum(path.stat().st_size for path in files)),)))
    with new_folder(out):
        (out / RELEASED_FOLDER).mkdir()
        for path in files:
            with atomic_file(out / path.relative_to(DEMO_MODEL)) as file:
                file.write(path.read_bytes())
    return GrokConfig.from_file(out / "config.json")
