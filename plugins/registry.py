"""Find the ops: every folder beside this file that holds a `spec.py` is one."""

import importlib
import importlib.util
import pkgutil
from types import ModuleType

from export_grok import plugins
from export_grok.plugins.op import OpSpec
from export_grok.plugins.plugin_node import PluginNode

__all__ = ["lowering", "op_names", "part", "plugin_nodes", "spec", "specs"]


def op_names() -> tuple[str, ...]:
    """Return the names of all op folders, sorted."""
    folders = (info.name for info in pkgutil.iter_modules(plugins.__path__) if info.ispkg)
    return tuple(sorted(name for name in folders if _has(name, "spec")))


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


def plugin_nodes() -> dict[str, PluginNode]:
    """Return all TensorRT plugin nodes, by ONNX op type."""
    return {
        node.op_type: node
        for op in op_names()
        if _has(op, "trt_plugin")
        for node in part(op, "trt_plugin").NODES
    }


def lowering(op: str, backend: str) -> ModuleType | None:
    """Return the module that lowers `op` for `backend`; None means: use the ONNX function."""
    return part(op, f"{backend}_lowering") if _has(op, f"{backend}_lowering") else None


def _has(op: str, file: str) -> bool:
    return importlib.util.find_spec(f"{plugins.__name__}.{op}.{file}") is not None
