"""Find the ops: every folder beside this file is one."""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from export_grok import plugins
from export_grok.plugins.op import OpSpec

__all__ = ["lowering", "op_names", "part", "spec", "specs"]


def op_names() -> tuple[str, ...]:
    """Return the names of all op folders, sorted."""
    return tuple(
        sorted(info.name for info in pkgutil.iter_modules(plugins.__path__) if info.ispkg)
    )


def part(op: str, file: str) -> ModuleType:
    """Return one module of an op's folder, e.g. `reference`."""
    return importlib.import_module(f"{plugins.__name__}.{op}.{file}")


def spec(op: str) -> OpSpec:
    """Return the signature of `op`."""
    found: OpSpec = part(op, "spec").SPEC
    return found


def specs() -> dict[str, OpSpec]:
    """Return the signatures of all ops, by ONNX op type."""
    return {found.op_type: found for found in map(spec, op_names())}


def lowering(op: str, backend: str) -> ModuleType | None:
    """Return the module that lowers `op` for `backend`; None means: use the ONNX function."""
    if importlib.util.find_spec(f"{plugins.__name__}.{op}.{backend}_lowering") is None:
        return None
    return part(op, f"{backend}_lowering")
