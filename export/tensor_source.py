"""Where the tensors of a model come from when they are copied: what all layouts offer alike."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from export_grok.config import GrokConfig
from export_grok.export.quantisation import QuantisedTensor

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["TensorSource"]


class TensorSource(Protocol):
    """The parameters of a model (`export.parameters`) in our layout and dtypes.

    Several threads may read different tensors at once; one tensor is read by one thread.
    """

    @property
    def layout(self) -> str:
        """What the files are: "released", "store", or the name of a foreign layout."""

    @property
    def config(self) -> GrokConfig:
        """Of the tensors as they are offered: with the groups that they are quantised to."""

    @property
    def root(self) -> Path:
        """Folder that the files' paths start from."""

    @property
    def files(self) -> Mapping[str, int]:
        """Length in bytes of every file that is read, by path below the root."""

    def origins(self, name: str) -> tuple[str, ...]:
        """Return the files that parameter `name` is made from."""

    def blocks(self, name: str) -> "Iterator[ReadableBuffer]":
        """Yield the bytes of parameter `name` in order, in blocks of any length.

        A block is good until the next is asked for. The scales of a matrix that is quantised here
        are to be had once all blocks of its weight were taken.

        Raises:
            CheckpointError: a file cannot be read to the end of a tensor.
        """

    def error(self, name: str) -> QuantisedTensor | None:
        """Return what quantising did to the matrix of parameter `name`, once it was read.

        None for what is copied as it is.
        """

    def sha256(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hash of every file that these parameters came from, whole, by path.

        What passed by while their blocks were read is not read again.

        Raises:
            CheckpointError: a file cannot be read.
        """
