"""A checkpoint as safetensors files, one a layer: the same bytes, page-aligned for mapping.

config.json
embedding.safetensors    embedding.weight, final_norm.scale
layer_00.safetensors     layers.0.experts.gate.weight, ...
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.parameters import Parameter, layer_parameters, model_parameters
from export_grok.files import atomic_file, output_errors, write_json
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight, WeightIndex

__all__ = ["read_store_header", "store_files", "write_store"]

# So much of a header the safetensors package reads too.
MAX_HEADER_BYTES = 100_000_000
PAGE_BYTES = 4096
COPY_BYTES = 8 << 20

_CODES: dict[StoredDtype, str] = {
    "int8": "I8",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def store_files(config: GrokConfig) -> dict[str, dict[str, Parameter]]:
    """Return what each file of a store holds: parameters by name, by file name."""
    layers = {
        f"layer_{layer:02}.safetensors": layer_parameters(config, layer)
        for layer in range(config.num_layers)
    }
    in_layers = {name for parameters in layers.values() for name in parameters}
    rest = {n: p for n, p in model_parameters(config).items() if n not in in_layers}
    return {"embedding.safetensors": rest, **layers}


def write_store(
    config: GrokConfig,
    index: WeightIndex,
    out: Path,
    *,
    resume: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> WeightIndex:
    """Write the tensors of `index` as a store and return the index of the store.

    The bytes are copied as they are, in blocks of 8 MiB. Every file appears whole, or not at all.

    Args:
        config: of the tensors in `index`.
        index: what `open_weights` returned.
        out: folder, made if it is not there.
        resume: keep the files of an earlier call for this config that are there already.
        progress: takes how many bytes of weights were written, or found, since its last call.

    Raises:
        CheckpointError: a source file cannot be read to the end of a tensor.
        OutputError: `out` cannot be written.
    """
    with output_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    resume = resume and _holds_config(out, config)
    write_json(out / "config.json", config.to_dict())
    weights: dict[str, Weight] = {}
    files: dict[str, int] = {}
    for file, parameters in store_files(config).items():
        header, places = _planned(file, parameters)
        total = sum(weight.nbytes for weight in places.values())
        weights |= places
        files[file] = len(header) + total
        if resume and _is_whole(out / file, header, files[file]):
            progress(total)
            continue
        with atomic_file(out / file) as target:
            target.write(header)
            for name in places:
                for block in _blocks(index.root, index[name]):
                    target.write(block)
                    progress(len(block))
    return WeightIndex(root=out, weights=weights, files=files)


def read_store_header(path: Path) -> dict[str, Weight]:
    """Return the tensors in the safetensors file `path` by name, without reading their bytes.

    Raises:
        CheckpointError: the file cannot be read, or its header is not that of a whole file.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} has {size} bytes and a header of {length} bytes: it is cut or no "
                    "safetensors file; write it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("no table of tensors")
        header.pop("__metadata__", None)
        places = {
            name: _placed(path.name, name, entry, start=8 + length)
            for name, entry in header.items()
        }
        _check_cover(places, start=8 + length, end=size)
    except (CheckpointError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a damaged header ({error}); write the file again"
        ) from error
    return places


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table


def _placed(file: str, name: str, entry: Any, *, start: int) -> Weight:
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if code not in _DTYPES:
                raise ValueError(f"{name} has dtype {code}; known are {', '.join(_DTYPES)}")
            weight = Weight(
                name=name,
                file=file,
                offset=start + begin,
                dtype=_DTYPES[code],
                shape=tuple(shape),
            )
            if begin < 0 or end - begin != weight.nbytes:
                raise ValueError(f"{name} has a length that is not that of its shape")
            return weight
    raise ValueError(f"{name} has no dtype, shape and data_offsets")


def _check_cover(places: dict[str, Weight], *, start: int, end: int) -> None:
    """Check that the tensors lie one after the other, without a gap, from `start` to `end`."""
    for weight in sorted(places.values(), key=lambda weight: (weight.offset, weight.nbytes)):
        if weight.offset != start:
            raise ValueError(f"{weight.name} overlaps another tensor, or leaves a gap")
        start += weight.nbytes
    if start != end:
        raise ValueError(f"the tensors end at byte {start}, the file at {end}")


def _planned(file: str, parameters: dict[str, Parameter]) -> tuple[bytes, dict[str, Weight]]:
    """Return the first bytes of a store's file, and where its tensors lie behind them.

    The largest come first: at full size their lengths are whole pages, so all begin at one.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for parameter in sorted(parameters.values(), key=_nbytes, reverse=True):
        end = offset + _nbytes(parameter)
        entries[parameter.name] = {
            "dtype": _CODES[parameter.dtype],
            "shape": parameter.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    header = struct.pack("<Q", len(text)) + text
    places = {
        name: Weight(
            name=name,
            file=file,
            offset=len(header) + entry["data_offsets"][0],
            dtype=parameters[name].dtype,
            shape=parameters[name].shape,
            groups=parameters[name].groups,
        )
        for name, entry in entries.items()
    }
    return header, places


def _nbytes(parameter: Parameter) -> int:
    size = NUMPY_DTYPES[parameter.dtype].itemsize
    for length in parameter.shape:
        size *= length
    return size


def _holds_config(out: Path, config: GrokConfig) -> bool:
    try:
        held: Any = json.loads((out / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(held == config.to_dict())


def _is_whole(path: Path, header: bytes, size: int) -> bool:
    try:
        with path.open("rb") as file:
            return path.stat().st_size == size and file.read(len(header)) == header
    except OSError:
        return False


def _blocks(root: Path, weight: Weight) -> Iterator[memoryview]:
    """Yield the bytes of `weight`; each block is good until the next is asked for."""
    path, left = root / weight.file, weight.nbytes
    buffer = memoryview(bytearray(min(COPY_BYTES, left)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(weight.offset)
            while left:
                count = file.readinto(buffer[:left])
                if not count:
                    raise CheckpointError(
                        f"{path} ends {left} bytes before {weight.name} does; get it again"
                    )
                left -= count
                yield buffer[:count]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
