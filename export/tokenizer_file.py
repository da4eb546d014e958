"""The tokenizer that lies beside weights, carried along with what is made of them."""

from pathlib import Path

from export_grok.artifacts import TOKENIZER
from export_grok.errors import CheckpointError
from export_grok.export.checkpoint import RELEASED_FOLDER
from export_grok.files import atomic_file
from export_grok.regular_file import read_regular

__all__ = ["copy_tokenizer", "tokenizer_beside"]


def tokenizer_beside(weights: Path) -> Path | None:
    """Return the tokenizer's file of the weights in the folder `weights`; None if there is none.

    It lies in the folder, or beside it if that is the folder of released files.
    """
    places = [weights / TOKENIZER]
    if weights.resolve().name == RELEASED_FOLDER:
        places.append(weights.resolve().parent / TOKENIZER)
    return next((place for place in places if place.exists()), None)


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy the tokenizer of the weights in `source` into `out`; return its name, if there is one.

    Raises:
        CheckpointError: it cannot be read.
        OutputError: it cannot be written.
    """
    place = tokenizer_beside(source)
    if place is None:
        return []
    if place.resolve() != (out / TOKENIZER).resolve():
        try:
            content = read_regular(place)
        except OSError as error:
            raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
        with atomic_file(out / TOKENIZER) as file:
            file.write(content)
    return [TOKENIZER]
