"""What a folder of graphs is made of, and whose it is: ours to write, or somebody else's."""

import dataclasses
import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from export_grok.artifacts import (
    COPIED_WEIGHTS,
    HEAD_WEIGHTS,
    MANIFEST,
    TOKENIZER,
    Bundle,
    open_bundle,
)
from export_grok.config import DTYPES, Dtype, ExportOptions, GrokConfig, HeadDtype
from export_grok.errors import BundleError
from export_grok.export.store.folder import store_files
from export_grok.files import fingerprint, output_errors, read_json, write_json
from export_grok.manifest import Manifest
from export_grok.weights import WeightIndex

__all__ = [
    "Plan",
    "begin",
    "check_free",
    "claim",
    "current",
    "finish",
    "plan_of",
    "versions",
]

logger = logging.getLogger(__name__)

# Stands in a folder from the first byte written to the manifest.
PLAN = ".plan.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a folder is made of; two folders of one plan hold the same."""

    config: GrokConfig
    dtype: Dtype
    head: HeadDtype
    copied: bool
    source: dict[str, str]
    versions: dict[str, str]


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def plan_of(config: GrokConfig, index: WeightIndex, options: ExportOptions) -> Plan:
    """Return the plan for these weights and options, here and now.

    Raises:
        OSError: a weight file cannot be read.
    """
    return Plan(
        config=config,
        dtype=options.dtype or DTYPES[0],
        head=options.head,
        copied=options.copy_weights,
        source={file: fingerprint(index.root / file) for file in sorted(index.files)},
        versions=versions("export-grok", "torch", "onnx", "onnxscript"),
    )


def current(out: Path, plan: Plan) -> Bundle | None:
    """Return what `out` holds if it was made by this plan."""
    if not (out / MANIFEST).exists():
        return None
    try:
        bundle = open_bundle(out)
    except BundleError:
        return None
    manifest = bundle.manifest
    made = Plan(
        config=manifest.config,
        dtype=manifest.dtype,
        head=manifest.head,
        copied=manifest.weights.copied,
        source=manifest.source,
        versions={name: manifest.versions.get(name, "") for name in plan.versions},
    )
    if made != plan:
        return None
    logger.info("%s is up to date", out)
    return bundle


def check_free(out: Path, source: Path, *, copied: bool, overwrite: bool) -> None:
    """Hold `out` to being ours to write: not there, empty, or a bundle that may be replaced.

    Args:
        out: folder to write.
        source: of the weights.
        copied: whether they will be copied into it.
        overwrite: replace a bundle that is there.

    Raises:
        BundleError: it holds something else, or the weights lie where it has its copy of them.
        OutputError: it cannot be looked at.
    """
    with output_errors(out):
        if not out.exists():
            return
        old = _old_manifest(out)
        removed = copied or (old is not None and old.weights.copied)
        if removed and source.resolve() == (out / COPIED_WEIGHTS).resolve():
            raise BundleError(
                f"{source} is where {out} has its copy of the weights, which goes when the folder "
                "is written; choose another --out"
            )
        if (out / MANIFEST).exists():
            if not overwrite:
                raise BundleError(
                    f"{out} holds a bundle of another model, option or version, or a damaged one; "
                    "replace it with --overwrite, or choose another --out"
                )
        elif out.resolve() != source.resolve() and not (out / PLAN).exists() and _foreign(out):
            raise BundleError(
                f"{out} is not empty and holds no bundle; choose another --out, or empty it"
            )


def claim(out: Path) -> bool:
    """Make `out`, if it is not there; return whether it was not.

    Raises:
        OutputError: it cannot be made.
    """
    with output_errors(out):
        if out.exists():
            return False
        out.mkdir(parents=True)
        return True


def begin(out: Path, plan: Plan) -> bool:
    """Write the plan into `out`; return whether a run of the same plan was broken off there.

    What `out` held before is taken away then, so that it is ours at every moment.

    Raises:
        OutputError: it cannot be written.
    """
    planned = dataclasses.asdict(plan)
    try:
        same = read_json(out / PLAN) == planned
    except BundleError:
        same = False
    with output_errors(out):
        if not same:
            _remove_kept(out, plan)  # before the plan says that they are of this run
        write_json(out / PLAN, planned)
        _remove_bundle(out)
    if same:
        logger.info("%s: a run was broken off; it goes on", out)
    return same


def finish(out: Path) -> None:
    """Take away what only an unfinished folder has.

    Raises:
        OutputError: it cannot be removed.
    """
    with output_errors(out):
        (out / PLAN).unlink(missing_ok=True)


def _foreign(out: Path) -> bool:
    """Return whether `out` holds more than what a killed run may leave of its first file."""
    return any(path.name != f".{PLAN}.partial" for path in out.iterdir())


def _remove_kept(out: Path, plan: Plan) -> None:
    """Take away what a run of this plan would keep if it were its own, and is of another's."""
    names = [HEAD_WEIGHTS] if plan.head == "int8" else []
    if plan.copied:
        names += [f"{COPIED_WEIGHTS}/{file}" for file in store_files(plan.config)]
    for name in names:
        (out / name).unlink(missing_ok=True)


def _remove_bundle(out: Path) -> None:
    """Take an old manifest away, and what it names but the tokenizer; other files stay."""
    old = _old_manifest(out)
    names = [] if old is None else [name for name in old.files if name != TOKENIZER]
    names += old.weight_files if old is not None and old.weights.copied else []
    # The manifest goes last: until then it tells what there is to remove, and with files missing
    # the bundle does not load.
    for name in (*names, MANIFEST):
        (out / name).unlink(missing_ok=True)


def _old_manifest(out: Path) -> Manifest | None:
    """Return the manifest in `out`; None if there is none, or a damaged one."""
    try:
        return Manifest.from_dict(read_json(out / MANIFEST), source=out / MANIFEST)
    except BundleError:
        return None
