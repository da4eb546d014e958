"""The weights as safetensors files by the names of a peer, with the `config.json` it reads.

Each matrix of each expert is a tensor of its own, [out, in], in the dtype asked for; norms and
router, which are small, stay float32 as they were released. One file a layer, one for the rest.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import TOKENIZER
from export_grok.config import Dtype, GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.layouts.names import EMBEDDING, HEAD, LAYOUTS, Layout, Place
from export_grok.export.parameters import layer_parameters, model_parameters
from export_grok.export.safetensors_header import CODES
from export_grok.export.weights_to.hf_config import config_of_peer
from export_grok.export.weights_to.options import Naming
from export_grok.export.weights_to.plan import PlannedFile, PlannedTensor, json_file, padded
from export_grok.export.weights_to.values import rounded, rows_of_floats, rows_of_matrix
from export_grok.regular_file import read_regular
from export_grok.weights import NUMPY_DTYPES, WeightIndex

__all__ = ["hf_files"]

INDEX = "model.safetensors.index.json"
ALIGNMENT = 8  # of the first tensor
_LAYOUT_NAMES: dict[Naming, str] = {"hpcai": "hpcai", "keyfan": "keyfan", "sglang": "xai"}


def hf_files(
    config: GrokConfig,
    index: WeightIndex,
    *,
    names: Naming = "hpcai",
    dtype: Dtype = "bfloat16",
    identity: str = "",
    tokenizer: Path | None = None,
) -> list[PlannedFile]:
    """Return the files of a model, in the order in which they are to be written: the index last.

    Args:
        config: of the model.
        index: where its weights lie.
        names: whose names the tensors get.
        dtype: of the matrices and of the embedding.
        identity: of the weights; stands in every file of them.
        tokenizer: its file, if there is one; it is copied.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    peer = _Peer(
        layout=next(layout for layout in LAYOUTS if layout.name == _LAYOUT_NAMES[names]),
        index=index,
        dtype=dtype,
    )
    rest = [Place(name) for name in model_parameters(config) if not name.startswith("layers.")]
    if names == "sglang":  # it scales its head, and so needs one besides the embedding
        rest.append(Place(HEAD))
    parts = [list(map(peer.tensor, rest))]
    for layer in range(config.num_layers):
        parts.append(list(map(peer.tensor, _places(config, layer))))
    files = [
        _file(f"model-{number:05}-of-{len(parts):05}.safetensors", tensors, identity)
        for number, tensors in enumerate(parts, start=1)
    ]
    of_tensor = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    if tokenizer:
        files.append(PlannedFile(name=TOKENIZER, header=_read(tokenizer)))
    files.append(json_file("config.json", config_of_peer(config, names, dtype)))
    files.append(json_file(INDEX, {"metadata": {"total_size": total}, "weight_map": of_tensor}))
    return files


def _places(config: GrokConfig, layer: int) -> Iterator[Place]:
    """Yield the tensors of a layer: those of float32 first, so that all are aligned."""
    prefix = f"layers.{layer}."
    parameters = layer_parameters(config, layer)
    for parameter in sorted(parameters.values(), key=lambda p: p.dtype != "float32"):
        name = parameter.name.removeprefix(prefix)
        if name.startswith("experts.") and name.endswith(".weight"):
            for expert in range(config.num_experts):
                yield Place(name, layer=layer, expert=expert)
        elif not name.endswith(".scales"):
            yield Place(name, layer=layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Peer:
    layout: Layout
    index: WeightIndex
    dtype: Dtype

    def tensor(self, place: Place) -> PlannedTensor:
        source = EMBEDDING if place.parameter == HEAD else place.name
        weight = self.index[source]
        dtype = self.dtype if weight.dtype == "int8" or source == EMBEDDING else "float32"
        shape = weight.shape if source == EMBEDDING else weight.shape[-2:][::-1]
        return PlannedTensor(
            name=self.layout.name_of(place),
            dtype=CODES[dtype],
            shape=shape,
            nbytes=int(np.prod(shape)) * NUMPY_DTYPES[dtype].itemsize,
            blocks=lambda: (
                rounded(values, dtype, source) for values in self._values(source, place.expert)
            ),
        )

    def _values(self, source: str, expert: int | None) -> Iterator[NDArray[np.float32]]:
        if self.index[source].dtype != "int8":
            return rows_of_floats(self.index, source)
        at = () if expert is None else (expert,)
        rows = rows_of_matrix(self.index, source.removesuffix(".weight"), *at)
        return (some.values() for some in rows)


def _file(name: str, tensors: list[PlannedTensor], identity: str) -> PlannedFile:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "export_grok.source": identity}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(padded(len(text), ALIGNMENT))
    return PlannedFile(
        name=name, header=struct.pack("<Q", len(text)) + text, tensors=tuple(tensors)
    )


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
