"""From float weights to the files of a released checkpoint: int8 matrices with bfloat16 scales.

How they are rounded is told in `export.quantise`; shape letters are those of `export.model`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.load import tensor_from_array
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.quantise import Quantiser
from export_grok.export.released_layout import write_released
from export_grok.files import atomic_file, write_json
from export_grok.plugins.int8_linear.reference import dequantise

__all__ = ["dequantised", "quantise", "quantised_weights", "write_checkpoint"]


def quantise(matrix: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return int8 [..., K, N] and bfloat16 scales [..., R, N] of a float32 matrix [..., K, N]."""
    *lead, rows, columns = matrix.shape
    weight = torch.empty(matrix.shape, dtype=torch.int8)
    scales = torch.empty((*lead, groups, columns), dtype=torch.bfloat16)
    quantiser = Quantiser(rows, columns, groups)
    for index in np.ndindex(*lead):
        quantiser.add(0, matrix[index].T.numpy().copy())
        weight[index] = tensor_from_array(quantiser.codes)
        scales[index] = tensor_from_array(quantiser.scales)
    return weight, scales


def quantised_weights(config: GrokConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all parameters of the config, from float weights by name.

    Args:
        config: of the model.
        weights: float32, one `<matrix>.weight` for each matrix, without scales.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    made: dict[str, Tensor] = {}
    for name, parameter in model_parameters(config).items():
        if name in made:  # scales come with their matrix
            continue
        weight = weights.get(name)
        if weight is None or tuple(weight.shape) != parameter.shape:
            found = "missing" if weight is None else f"of shape {tuple(weight.shape)}"
            raise CheckpointError(
                f"{name} is {found}; the config needs shape {parameter.shape}: take the weights "
                "and the config of one training"
            )
        if parameter.groups is None:
            made[name] = weight.detach().clone()
        else:
            scales = name.removesuffix(".weight") + ".scales"
            made[name], made[scales] = quantise(weight.detach(), parameter.groups)
    return made


def dequantised(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the float32 weights that int8 ones stand for, by name, without scales."""
    floats = {}
    for name, weight in weights.items():
        scales = weights.get(name.removesuffix(".weight") + ".scales")
        if weight.dtype == torch.int8 and scales is not None:
            floats[name] = dequantise(weight, scales, torch.float32)
        elif not name.endswith(".scales"):
            floats[name] = weight
    return floats


def write_checkpoint(
    out: Path, config: GrokConfig, weights: Mapping[str, Tensor], tokenizer: bytes
) -> None:
    """Write `ckpt-0`, `config.json` and `tokenizer.model` to `out`.

    Args:
        out: folder, made if it is not there; files of the same names are replaced.
        config: of the model.
        weights: as `quantised_weights` returns them.
        tokenizer: the sentencepiece model.

    Raises:
        OutputError: `out` cannot be written.
    """
    (out / RELEASED_FOLDER).mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config.to_dict())
    with atomic_file(out / "tokenizer.model") as file:
        file.write(tokenizer)
    for file_name, parameters in released_files(config).items():

        def blocks(key: str, parameters: dict[str, Parameter] = parameters) -> Iterator[bytes]:
            yield _bytes(weights[parameters[key].name])

        write_released(out / RELEASED_FOLDER / file_name, parameters, blocks)


def _bytes(tensor: Tensor) -> bytes:
    # numpy has no bfloat16; its bytes are those of an int16.
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    array = plain.contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
