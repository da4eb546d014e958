"""All that the PTX of a kernel depends on, and the hash of that; told without importing Triton."""

import ast
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import export_grok
from export_grok import plugins
from export_grok.errors import BuildError, ConfigError
from export_grok.optional import require
from export_grok.plugins.plugin_node import Call, PluginNode

__all__ = ["TARGETS", "KernelSource", "Target", "files_hash", "kernel_source", "triton_version"]


# Counted up when another PTX is made of the same source: what was kept is then compiled again.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Target:
    """What kernels are compiled for.

    Attributes:
        name: of the architecture. One with an "a" runs on this architecture alone, on no later.
        ptx_version: of the PTX language, times 10.
    """

    name: str
    ptx_version: int


# The PTX version is the lowest that LLVM and ptxas take for the target: the driver compiles the
# PTX when a plan is loaded, and refuses what is newer than itself. Triton's own choice is what its
# newest ptxas knows: with 3.9 that is 9.4 from sm_90 on, which not even CUDA 13.0 takes.
TARGETS: Mapping[int, Target] = {
    80: Target(name="sm_80", ptx_version=70),
    86: Target(name="sm_86", ptx_version=71),
    89: Target(name="sm_89", ptx_version=78),
    90: Target(name="sm_90a", ptx_version=80),
    100: Target(name="sm_100a", ptx_version=86),
    120: Target(name="sm_120a", ptx_version=87),
}

# TensorRT aligns its tensors to 256 bytes, and we do so with what we bind; 16 bytes is the
# longest load of one thread.
ALIGNMENT = 16

POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int8": "*i8",
    "int64": "*i64",
}
SCALAR = "i32"


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """All that the PTX of a kernel depends on.

    Attributes:
        kernel: name of the Triton function.
        module: that defines it.
        path: of that module.
        files: hash over the text of this module and of those of ours that it imports. It is
            coarser than Triton's own key of a function, a comment changes it, but needs no
            Triton and holds where kernels are interpreted.
        arguments: inputs, int32 scalars and outputs in their order, each with Triton's name of its
            type, e.g. "*bf16" or "i32".
        constants: constexpr arguments by name.
        aligned: arguments that are multiples of 16: all pointers, and some scalars. The others
            are any number: an argument that is 1 stays an argument.
        sm: architecture, a key of `TARGETS`.
        num_warps: 32 threads each.
        num_stages: of the software pipeline of loads.
        triton: version.
    """

    kernel: str
    module: str
    path: Path
    files: str
    arguments: tuple[tuple[str, str], ...]
    constants: Mapping[str, int | float | bool | str]
    aligned: tuple[str, ...]
    sm: int
    num_warps: int
    num_stages: int
    triton: str

    @property
    def target(self) -> Target:
        """What it is compiled for."""
        return TARGETS[self.sm]

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the int32 arguments, in their order."""
        return tuple(name for name, kind in self.arguments if kind == SCALAR)

    @property
    def hash(self) -> str:
        """What tells the kernel from any that is compiled to another PTX."""
        text = json.dumps(self.to_dict() | {"path": None, "format": FORMAT}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as what JSON holds."""
        return dataclasses.asdict(self) | {
            "path": str(self.path),
            "target": self.target.name,
            "ptx_version": self.target.ptx_version,
        }


def kernel_source(node: PluginNode, call: Call, sm: int) -> KernelSource:
    """Return what the kernel of `node` is compiled from for a call.

    Raises:
        ConfigError: kernels are not compiled for this architecture.
        BuildError: the op has no kernels.
        MissingDependencyError: Triton is not installed.
    """
    if sm not in TARGETS:
        raise ConfigError(f"sm is {sm}; kernels are compiled for {', '.join(map(str, TARGETS))}")
    module = f"{plugins.__name__}.{node.op}.triton_kernel"
    path = _path(module)
    if path is None:
        raise BuildError(f"{node.op_type} has no kernel: there is no module {module}")
    dtypes = {"T": call.dtype, "scale": call.scales}
    inputs, outputs = (
        [(row.name, POINTERS[dtypes.get(row.dtype, row.dtype)]) for row in operands]
        for operands in (node.inputs, node.outputs)
    )
    launch = node.launch(call)
    for name, value in launch.scalars.items():
        if not -(2**31) <= value < 2**31:
            raise BuildError(f"{name} of {node.op_type} is {value}; its kernel takes an int32")
    aligned = [name for name, value in launch.scalars.items() if value % ALIGNMENT == 0]
    return KernelSource(
        kernel=node.kernel,
        module=module,
        path=path,
        files=files_hash(module),
        arguments=(*inputs, *((name, SCALAR) for name in launch.scalars), *outputs),
        constants=dict(launch.constants),
        aligned=tuple(name for name, _ in inputs + outputs) + tuple(aligned),
        sm=sm,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        triton=triton_version(),
    )


def files_hash(module: str) -> str:
    """Return the hash over a module and all of ours that it imports, directly or not."""
    texts: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        path = None if name in texts else _path(name)
        if path is not None:
            texts[name] = path.read_text(encoding="utf-8")
            todo += _imported(texts[name])
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def _imported(text: str) -> Iterator[str]:
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            # what is imported from a package may be a module too
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _path(module: str) -> Path | None:
    """Return the file of a module of ours; nothing is imported to find it."""
    for package in (plugins, export_grok):
        name = module.removeprefix(f"{package.__name__}.")
        for folder in package.__path__ if name != module else ():
            file = Path(folder, *name.split(".")).with_suffix(".py")
            if file.is_file():
                return file
    return None


@functools.cache
def triton_version() -> str:
    """Return the version of Triton that is installed.

    Raises:
        MissingDependencyError: there is none.
    """
    try:
        return version("triton")
    except PackageNotFoundError:
        return str(require("triton", extra="triton").__version__)
