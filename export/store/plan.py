"""What an import makes a store of, and whether a folder is there to take it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.errors import BundleError, CheckpointError, ConfigError
from export_grok.export.checkpoint import RELEASED_FOLDER, holds_weights
from export_grok.export.store.folder import IMPORT_PLAN, STORE_MANIFEST
from export_grok.export.store.manifest import StoreManifest
from export_grok.export.tensor_source import TensorSource
from export_grok.files import fingerprint, read_json

__all__ = ["check_apart", "plan_id", "plan_of", "takes_over"]

# To be raised when the bytes that an import makes of the same source change.
FORMAT_VERSION = 1


def plan_of(source: TensorSource) -> dict[str, Any]:
    """Return the plan of an import as JSON values; two stores of one plan hold the same.

    Raises:
        CheckpointError: a source file cannot be read.
    """
    files = {}
    for file, length in sorted(source.files.items()):
        try:
            files[file] = {"bytes": length, "fingerprint": fingerprint(source.root / file)}
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{source.root / file} cannot be read: {reason}") from error
    return {
        "format": "export-grok import",
        "format_version": FORMAT_VERSION,
        "layout": source.layout,
        "config": source.config.to_dict(),
        "files": files,
    }


def plan_id(plan: dict[str, Any]) -> str:
    """Return what tells a plan from another."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def check_apart(source: TensorSource, out: Path) -> None:
    """Refuse to write among the files that are read.

    Raises:
        BundleError: `out` is the source, or holds one of its files.
    """
    taken = {source.root.resolve()}
    taken |= {(source.root / file).resolve().parent for file in source.files}
    if out.resolve() in taken:
        raise BundleError(
            f"{out} is where the weights are that are to be read; choose another folder"
        )


def takes_over(out: Path, plan: dict[str, Any], *, overwrite: bool) -> bool:
    """Return whether what `out` holds was made by this plan, and stays as far as it is whole.

    Else it holds nothing, or a store that is to be replaced.

    Args:
        out: folder of the store.
        plan: of the import.
        overwrite: replace a store of another plan, and one of this plan that is whole.

    Raises:
        BundleError: it holds a store, and `overwrite` is not given; or it holds something else.
    """
    if not out.is_dir() or all(path.name == f".{IMPORT_PLAN}.partial" for path in out.iterdir()):
        return False
    whole = (out / STORE_MANIFEST).exists()
    half_made = not whole and (out / IMPORT_PLAN).exists()
    held = _held(out) if whole or half_made else None
    if held is not None and held[0] == plan_id(plan) and not (whole and overwrite):
        return True
    if not (whole or half_made) and (not holds_weights(out) or _holds_release(out)):
        raise BundleError(f"{out} is not empty and holds no store; choose another folder")
    if not overwrite:
        what = "a half-made store" if half_made else "a store"
        other = " of other weights or options" if held is None else f" of {_of(held[1], plan)}"
        advice = "run its import again to finish it, " if half_made else ""
        raise BundleError(
            f"{out} holds {what}{other}; {advice}replace it with --overwrite, or choose another "
            "folder"
        )
    return False


def _held(out: Path) -> tuple[str, dict[str, Any]] | None:
    """Return id and values of the plan that made what `out` holds; None if they are damaged."""
    try:
        manifest = StoreManifest.read(out)
        if manifest is not None:
            config = manifest.config.to_dict()
            return manifest.plan, {"layout": manifest.layout, "config": config}
        plan = read_json(out / IMPORT_PLAN)
        config = GrokConfig.from_dict(plan["config"]).to_dict()
        return plan_id(plan), {"layout": plan["layout"], "config": config}
    except (AttributeError, BundleError, CheckpointError, ConfigError, KeyError, TypeError):
        return None


def _of(held: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return what is different in the weights or options of another plan."""
    for name, value in plan["config"].items():
        if held["config"][name] != value:
            return f"{name} {held['config'][name]}, not {value}"
    if held["layout"] != plan["layout"]:
        return f"weights in layout {held['layout']}, not {plan['layout']}"
    return "other weights"


def _holds_release(out: Path) -> bool:
    return (out / RELEASED_FOLDER).is_dir() or any(out.glob("tensor*_*"))
