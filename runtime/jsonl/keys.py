"""What tells whether an answer is that of a request: a key of all that the answer depends on."""

import dataclasses
import hashlib
import json

from export_grok import __version__
from export_grok.artifacts import MANIFEST
from export_grok.errors import BundleError
from export_grok.regular_file import read_regular
from export_grok.runtime.model_to_load import ModelToLoad
from export_grok.runtime.params import GenerationParams

__all__ = ["Keys", "basis_of"]

SIZE = 16


def basis_of(model: ModelToLoad, defaults: GenerationParams) -> bytes:
    """Return what answers depend on besides their lines: program, bundle, cache and defaults.

    The manifest has the fingerprints of all files of a bundle, and of the weights.

    Raises:
        BundleError: the manifest cannot be read.
    """
    path = model.bundle.folder / MANIFEST
    try:
        manifest = hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from error
    parts = [__version__, manifest, model.max_length, dataclasses.asdict(defaults)]
    return json.dumps(parts, sort_keys=True).encode()


class Keys:
    """The keys of all requests of a file, by the number of their lines: 16 bytes a line.

    Attributes:
        requests: how many there are; lines between them may have none.
    """

    def __init__(self, basis: bytes) -> None:
        """Begin without any; `basis` is what all keys depend on."""
        self.requests = 0
        self._basis = hashlib.sha256(basis)
        self._keys = bytearray()

    @property
    def last(self) -> int:
        """Number of the last line that has one; 0 for none."""
        return len(self._keys) // SIZE

    def of(self, number: int, line: bytes) -> bytes:
        """Return the key of a line: the first half of a SHA-256."""
        digest = self._basis.copy()
        digest.update(b"%d %b" % (number, line))
        return digest.digest()[:SIZE]

    def add(self, number: int, line: bytes) -> None:
        """Take the next line that has a request."""
        self._keys += bytes(SIZE * (number - 1 - self.last)) + self.of(number, line)
        self.requests += 1

    def get(self, number: int) -> bytes | None:
        """Return the key of a line; None if there is no such line."""
        if not 1 <= number <= self.last:
            return None
        return bytes(self._keys[SIZE * (number - 1) : SIZE * number])
