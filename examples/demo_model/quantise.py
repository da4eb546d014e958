"""From float weights to the files of a released checkpoint: int8 matrices with bfloat16 scales.

    scale[r, n] = bfloat16, rounded up, of max |w[k, n]| / 127 over the rows k of group r
    weight[k, n] = round(w[k, n] / scale[k // (K / R), n])

A scale that is rounded up never makes a weight larger than 127, so nothing is cut off. Shape
letters are those of `export.model`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError
from export_grok.export.checkpoint import RELEASED_FOLDER, released_files
from export_grok.export.parameters import Parameter, model_parameters
from export_grok.export.released_layout import write_released
from export_grok.files import atomic_file, write_json
from export_grok.plugins.int8_linear.reference import dequantise

__all__ = ["dequantised", "quantise", "quantised_weights", "write_checkpoint"]

LARGEST = 127


def quantise(matrix: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return int8 [..., K, N] and bfloat16 scales [..., R, N] of a float32 matrix [..., K, N]."""
    grouped = matrix.reshape(*matrix.shape[:-2], groups, -1, matrix.shape[-1])
    scales = _rounded_up(grouped.abs().amax(-2) / LARGEST)
    # A column of zeros is zero by any scale.
    divisor = torch.where(scales == 0, 1.0, scales.float())
    weight = (grouped / divisor.unsqueeze(-2)).round().to(torch.int8)
    return weight.flatten(-3, -2), scales


def _rounded_up(x: Tensor) -> Tensor:
    """Return the smallest bfloat16 that is at least x, for x >= 0."""
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    return torch.where(near.float() < x, bits + 1, bits).view(torch.bfloat16)


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
