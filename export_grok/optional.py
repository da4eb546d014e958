"""Packages that only some stages need."""

import importlib
from types import ModuleType

from export_grok.errors import MissingDependencyError

__all__ = ["require"]


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or say which extra brings it.

    Raises:
        MissingDependencyError: `module` cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} cannot be imported ({error}). "
            f'Install it with: pip install "export-grok[{extra}]"'
        ) from error
