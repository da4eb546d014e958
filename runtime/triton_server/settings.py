"""How a bundle is loaded under Triton: the parameters of `config.pbtxt`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_grok.artifacts import Bundle
from export_grok.errors import ConfigError
from export_grok.runtime.open import check_ranks, ranks_of

__all__ = ["Settings", "instance_kind"]

_PATHS = ("bundle", "weights_root")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a bundle is loaded; the numbers are those of `export_grok.runtime.load`.

    Attributes:
        bundle: its folder, as the server sees it; a relative one starts from the model's folder,
            which `config.pbtxt` is in.
        weights_root: where the weights are there, if the bundle's own way does not lead to them.
    """

    bundle: str
    weights_root: str | None = None
    batch: int | None = None
    max_length: int | None = None
    threads: int | None = None
    tensor_parallel: int | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        if not self.bundle:
            raise ConfigError("bundle is empty; it must be the folder of a bundle")
        for name, value in self._numbers().items():
            least = 0 if name == "max_waiting" else 1
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")

    def check(self, bundle: Bundle) -> None:
        """Hold the numbers to a bundle.

        Raises:
            ConfigError: it is for other ranks, shorter rows, or another number of them.
        """
        check_ranks(bundle, self.tensor_parallel)
        longest = bundle.sizes.get("max_length", bundle.config.sequence_len)
        if self.max_length is not None and not 1 < self.max_length <= longest:
            raise ConfigError(
                f"max_length is {self.max_length}; {bundle.folder} takes 2 to {longest} tokens"
            )
        rows = bundle.sizes.get("batch")
        if rows is not None and self.batch not in (None, rows):
            raise ConfigError(
                f"batch is {self.batch}; the plans in {bundle.folder} are for {rows}"
            )

    def parameters(self) -> dict[str, str]:
        """Return all that is set, as Triton keeps it."""
        set_ = {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }
        return {name: str(value) for name, value in set_.items()}

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, Mapping[str, str]]) -> "Settings":
        """Return what the parameters of a model's configuration say.

        Those in capital letters are Triton's own.

        Args:
            parameters: as the JSON has them, `{name: {"string_value": text}}`.

        Raises:
            ConfigError: one is unknown or no number, or the bundle is missing.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, entry in parameters.items():
            text = entry.get("string_value", "")
            if name in _PATHS:
                values[name] = text
            elif name in names:
                values[name] = _number(name, text)
            elif not name.isupper():
                raise ConfigError(
                    f"config.pbtxt has a parameter {name}; those of a bundle are "
                    f"{', '.join(sorted(names))}"
                )
        if "bundle" not in values:
            raise ConfigError("config.pbtxt has no parameter bundle; it must be a bundle's folder")
        return cls(**values)

    def load_options(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of `export_grok.runtime.load`.

        Args:
            folder: of the model, which relative paths start from.
        """
        options: dict[str, Any] = {"folder": folder / self.bundle, **self._numbers()}
        if self.weights_root is not None:
            options["weights_root"] = folder / self.weights_root
        return options

    def _numbers(self) -> dict[str, int]:
        numbers = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _PATHS
        }
        return {name: value for name, value in numbers.items() if value is not None}


def instance_kind(bundle: Bundle) -> str:
    """Return what Triton calls the device of a bundle: a CPU, the GPU, or what it finds itself."""
    if bundle.manifest.backend == "ort":
        return "KIND_CPU"
    return "KIND_GPU" if ranks_of(bundle) == 1 else "KIND_MODEL"


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r} in config.pbtxt; it must be a number") from error
