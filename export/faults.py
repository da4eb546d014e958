"""What is wrong with a checkpoint: collected over all its files, then told at once."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.parameters import Parameter
from export_grok.export.released_layout import released_layout
from export_grok.weights import Weight

__all__ = ["Faults", "capped"]

# A message with a fault for each of 770 files helps nobody; all are in its `faults`.
MAX_PRINTED_FAULTS = 20


@dataclass
class Faults:
    """What is wrong with a checkpoint, sorted by what it says about the whole.

    Attributes:
        unsafe: files that ask for something that is no array.
        shapes: tensors of another shape than the config's.
        other: files that are missing, damaged, too many, ...
        read: number of files that could be read.
        misfits: number of those that hold a tensor of another shape.
    """

    unsafe: list[str] = dataclasses.field(default_factory=list)
    shapes: list[str] = dataclasses.field(default_factory=list)
    other: list[str] = dataclasses.field(default_factory=list)
    read: int = 0
    misfits: int = 0

    def collect(
        self,
        path: Path,
        parameters: dict[str, Parameter],
        read: Callable[[Path], dict[str, Weight]],
    ) -> list[Weight]:
        """Return the tensors in `path` under their own names, or none and note a fault."""
        names = ", ".join(parameter.name for parameter in parameters.values())
        if not path.exists():
            state = "is a link to a file that is not there" if path.is_symlink() else "is missing"
            self.other.append(f"{path.name} ({names}) {state}")
            return []
        try:
            found = read(path)
        except UnsafePickleError as error:
            self.unsafe.append(str(error))
            return []
        except CheckpointError as error:
            cut = _cut(path, parameters)
            self.other.append(f"{path.name} ({names}) {cut or f'is no good: {error}'}")
            return []
        if found.keys() != parameters.keys():
            self.other.append(
                f"{path.name} ({names}) holds {', '.join(found) or 'nothing'}; "
                f"needed are {', '.join(parameters)}"
            )
            return []
        self.read += 1
        shapes = []
        for key, parameter in parameters.items():
            weight = found[key]
            if weight.shape != parameter.shape:
                shapes.append(f"{path.name}: {parameter.name} {_misfit(weight, parameter)}")
            if weight.dtype != parameter.dtype:
                self.other.append(
                    f"{path.name}: {parameter.name} has dtype {weight.dtype}, "
                    f"not {parameter.dtype}"
                )
        self.shapes += shapes
        self.misfits += bool(shapes)
        return [
            dataclasses.replace(found[key], name=parameter.name, groups=parameter.groups)
            for key, parameter in parameters.items()
        ]

    def check(self, path: Path, source: str) -> None:
        """Raise everything that was found in `path`, asked for the weights of the config `source`.

        Raises:
            CheckpointError: there are faults.
            UnsafePickleError: files ask for something that is no array; only they are named.
        """
        if self.unsafe:
            raise capped(UnsafePickleError, f"{path} is not to be trusted:", self.unsafe)
        faults = [*self.shapes, *self.other]
        if 2 * self.misfits > self.read:
            raise capped(
                CheckpointError,
                f"{path} seems to be another model than {source}: {self.misfits} of {self.read} "
                "files hold other shapes; give the config.json of these weights:",
                faults,
            )
        if faults:
            raise capped(
                CheckpointError,
                f"{path} does not hold what {source} asks for ({len(faults)} faults); "
                "get the files named here again:",
                faults,
            )


def _misfit(weight: Weight, parameter: Parameter) -> str:
    text = f"has shape {weight.shape}; the config asks for {parameter.shape}"
    *lead, groups, columns = (0, 0, *weight.shape)
    *lead_asked, groups_asked, columns_asked = (0, 0, *parameter.shape)
    if parameter.dtype == "bfloat16" and (lead, columns) == (lead_asked, columns_asked):
        text += f" ({groups} scale groups, not {groups_asked}: row_parallel_scale_groups)"
    return text


def _cut(path: Path, parameters: dict[str, Parameter]) -> str:
    """Return what says so if a released file is shorter than it must be, else nothing."""
    if not {"array", "weight"} & parameters.keys():
        return ""
    held, needed = path.stat().st_size, released_layout(parameters).size
    return f"has {held} of {needed} bytes: fetch it again" if held < needed else ""


def capped(kind: type[CheckpointError], summary: str, faults: list[str]) -> CheckpointError:
    """Return the error of all faults, whose text shows the first of them."""
    shown = faults[:MAX_PRINTED_FAULTS]
    if len(faults) > len(shown):
        shown = [*shown, f"... and {len(faults) - len(shown)} more"]
    error = kind(summary, shown)
    error.faults = tuple(faults)
    return error
