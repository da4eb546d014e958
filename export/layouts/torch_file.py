"""Where the tensors of a torch `.bin` file lie. Nothing of it is run, and no tensor is read.

The file is a zip of plain, uncompressed members: a pickle that names the tensors, and the bytes
of each storage. The names in the pickle are checked before torch sees it; then torch's own
weights-only loader follows it without memory, and tells where each storage begins.
"""

import contextlib
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.layouts.source_tensor import SourceTensor
from export_grok.optional import require
from export_grok.regular_file import open_regular
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight

if TYPE_CHECKING:
    import torch

__all__ = ["torch_tensors"]

# The pickle of 770 tensors has 100 KB. The bound keeps a hostile file out of memory.
MAX_PICKLE_BYTES = 100_000_000

# From the zip format: length of a member's own header, but for its name and what follows that.
LOCAL_HEADER = struct.Struct("<4s22xHH")
LOCAL_MAGIC = b"PK\x03\x04"

_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",  # of dtypes without a storage class: float8
    "torch.storage UntypedStorage",
    "torch float8_e4m3fn",
    "torch float8_e5m2",
    *(
        f"torch {kind}Storage"
        for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long")
    ),
}
# Opcodes that bring in something by a name, or make it, other than the two that torch.save writes.
_FORBIDDEN = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"}


def torch_tensors(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of a file that `torch.save` wrote, by name.

    Raises:
        CheckpointError: the file cannot be read, is damaged, of the format before torch 1.6, or
            holds something else than a table of tensors.
        MissingDependencyError: torch is not installed.
        UnsafePickleError: the file asks for something that no table of tensors needs.
    """
    try:
        with open_regular(path) as file, _opened(path, file) as archive:
            storages = _storages(path, file, archive)
            pickled = _pickle(path, archive)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    _check_names(path, pickled)
    table = _loaded(path)
    return {name: _placed(path, name, value, storages) for name, value in table.items()}


def _opened(path: Path, file: BinaryIO) -> zipfile.ZipFile:
    start = file.read(4)
    if start != LOCAL_MAGIC:
        what = "is empty" if not start else "is no zip file"
        raise CheckpointError(
            f"{path} {what}, as torch.save has written since torch 1.6. If it is older, write it "
            "again: torch.save(torch.load(old, weights_only=True), new); else get it again"
        )
    with _damage(path):
        return zipfile.ZipFile(file)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Say of the file what the zip format's reader stumbles over."""
    try:
        yield
    except (
        EOFError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        ValueError,
        struct.error,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(f"{path} is cut or damaged ({error}); get it again") from error


def _storages(path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> dict[int, int]:
    """Return the length of every member by the offset of its bytes."""
    size = path.stat().st_size
    lengths: dict[int, int] = {}
    names = set()
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise CheckpointError(
                f"{path} has {member.filename} compressed or encrypted, which torch.save does "
                "not do; write it again by torch.save"
            )
        if member.filename in names:
            raise CheckpointError(f"{path} has two members {member.filename}; get it again")
        names.add(member.filename)
        file.seek(member.header_offset)
        header = file.read(LOCAL_HEADER.size)
        if len(header) != LOCAL_HEADER.size or not header.startswith(LOCAL_MAGIC):
            raise CheckpointError(f"{path} has no {member.filename} where it says; get it again")
        _, name_length, extra_length = LOCAL_HEADER.unpack(header)
        begin = member.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if begin + member.file_size > size or member.compress_size != member.file_size:
            raise CheckpointError(f"{path} is cut before {member.filename} ends; get it again")
        if member.file_size:
            lengths[begin] = member.file_size
    return lengths


def _pickle(path: Path, archive: zipfile.ZipFile) -> bytes:
    """Return the pickle, whose checksum is right."""
    members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    member = members.get("data.pkl")
    if member is None or "constants.pkl" in members:
        raise CheckpointError(
            f"{path} is no file of weights by torch.save; get the weights of the model"
        )
    if member.file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{path} has a table of {member.file_size} bytes; up to {MAX_PICKLE_BYTES} are read"
        )
    with _damage(path):
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise CheckpointError(f"{path} is not little endian; write it again on such a machine")
        return archive.read(member)


def _check_names(path: Path, pickled: bytes) -> None:
    """Refuse a pickle that asks for anything but what tensors need."""
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "GLOBAL" and argument not in _ALLOWED:
                asked = repr(str(argument).replace(" ", "."))
            elif opcode.name in _FORBIDDEN:
                asked = f"something in a way that torch.save does not ({opcode.name})"
            else:
                continue
            raise UnsafePickleError(
                f"{path} asks for {asked}, which no weights need and which may do anything; "
                "nothing was run: get the file from where it was published"
            )
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged table ({error}); get it again") from error


def _loaded(path: Path) -> dict[str, "torch.Tensor"]:
    torch = require("torch", extra="export")
    try:
        with warnings.catch_warnings(action="ignore"):
            table = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # whatever a damaged table makes the loader stumble over
        # It says more: how to load the file by running whatever is in it.
        said = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"{path} has a damaged table ({said[:200]}); get it again"
        ) from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds a {type(table).__name__}, not tensors by name")
    for name, value in table.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} as {name!r}, not tensors by name; save "
                "the state_dict of the model itself"
            )
    return table


def _placed(
    path: Path, name: str, tensor: "torch.Tensor", storages: dict[int, int]
) -> SourceTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NUMPY_DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {dtype}; known are {', '.join(NUMPY_DTYPES)}"
        )
    stored: StoredDtype = dtype
    itemsize = NUMPY_DTYPES[stored].itemsize
    storage = tensor.untyped_storage()
    begin = storage._checkpoint_offset
    shape, strides, first = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    reach = first + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    whole = begin is not None and storages.get(begin) == storage.nbytes()
    if not whole or 0 in shape or reach * itemsize > storage.nbytes():
        raise CheckpointError(
            f"{path} does not hold the bytes of {name} where its table says; get it again"
        )
    weight = Weight(
        name=name,
        file=path.name,
        offset=int(begin or 0) + first * itemsize,
        dtype=stored,
        shape=shape,
    )
    return SourceTensor(weight=weight, strides=None if tensor.is_contiguous() else strides)
