"""What weights are written as."""

from dataclasses import dataclass
from typing import Literal, get_args

from export_grok.config import HEAD_DTYPES, Dtype, HeadDtype
from export_grok.errors import ConfigError

__all__ = [
    "FORMATS",
    "NAMINGS",
    "WEIGHT_DTYPES",
    "Format",
    "Naming",
    "WeightDtype",
    "WeightsOptions",
]

Format = Literal["hf", "gguf"]
FORMATS: tuple[Format, ...] = get_args(Format)

Naming = Literal["hpcai", "keyfan", "sglang"]
NAMINGS: tuple[Naming, ...] = get_args(Naming)

WeightDtype = Literal["int8"] | Dtype
WEIGHT_DTYPES: tuple[WeightDtype, ...] = ("int8", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """How weights are written for others.

    Attributes:
        to: the format: "hf" is safetensors files with a `config.json`, "gguf" is llama.cpp's.
        names: for "hf", whose names the tensors get; None for those of hpcai-tech/grok-1.
        dtype: of the matrices; None for what is usual, bfloat16 in "hf" and int8 in "gguf".
        head: for "gguf", the embedding, which is the head too: "float32", or "int8" with a scale
            a row.
        split: for "gguf", a file for each layer; None where one file would be longer than 50 GB.

    Raises:
        ConfigError: options contradict each other, or there is no such value; all are named.
    """

    to: Format
    names: Naming | None = None
    dtype: WeightDtype | None = None
    head: HeadDtype = "float32"
    split: bool | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value!r}; use {', '.join(allowed)}"
            for name, value, allowed in (
                ("to", self.to, FORMATS),
                ("names", self.names, NAMINGS),
                ("dtype", self.dtype, WEIGHT_DTYPES),
                ("head", self.head, HEAD_DTYPES),
            )
            if value not in (None, *allowed)
        ]
        if self.to == "hf":
            if self.dtype == "int8":
                faults.append(
                    "safetensors of these names hold floats: take --dtype bfloat16, float16 or "
                    "float32"
                )
            if self.head != "float32":
                faults.append("--head int8 is for --to gguf: leave it away")
            if self.split is not None:
                faults.append("--to hf always writes a file a layer: leave --split away")
        elif self.names is not None:
            faults.append("GGUF has its own names: leave --names away")
        if faults:
            raise ConfigError("; ".join(faults))
