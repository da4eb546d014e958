"""What is to be checked in a folder: its files, their tensors, and the hashes they must have."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from export_grok.artifacts import MANIFEST, WEIGHT_INDEX, Bundle, read_bundle
from export_grok.config import GrokConfig
from export_grok.errors import BundleError, CheckpointError, ConfigError
from export_grok.export.check.file import BLOCK_BYTES, FileToRead
from export_grok.export.check.findings import Finding, Kind, Level
from export_grok.export.check.hash_list import HashList, tensor_hashes
from export_grok.export.checkpoint import RELEASED_FOLDER, find_weights
from export_grok.export.head import head_index
from export_grok.export.store.folder import STORE_MANIFEST
from export_grok.export.store.manifest import StoreManifest
from export_grok.needs import Needs
from export_grok.weights import Weight, WeightIndex

__all__ = ["CheckPlan", "check_plan"]

# What a thread holds at the most: its block, which words of it are not zero, and how far apart.
BLOCKS_HELD = 5
BASE_MEMORY = 100 * 10**6
# What many disks give; two cores keep up with it, with a hash of every byte.
BYTES_PER_SECOND = 10**9

_RANK_INDEX = re.compile(rf"(rank_\d+)/{re.escape(WEIGHT_INDEX)}")


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """What is to be read, and what is wrong already without.

    Attributes:
        path: of the folder.
        kind: what it is: "released checkpoint", "store", "folder of graphs" or "bundle".
        config: of the model.
        files: to be read.
        findings: of headers, shapes, sizes and manifests.
    """

    path: Path
    kind: str
    config: GrokConfig
    files: tuple[FileToRead, ...]
    findings: tuple[Finding, ...]

    @property
    def nbytes(self) -> int:
        """Length of all files."""
        return sum(file.nbytes for file in self.files)

    def needs(self, workers: int) -> Needs:
        """Return what reading takes with so many threads."""
        workers = max(1, min(workers, len(self.files)))
        return Needs(
            memory=BASE_MEMORY + workers * BLOCKS_HELD * BLOCK_BYTES,
            seconds=self.nbytes / BYTES_PER_SECOND,
        )


def check_plan(
    path: Path,
    *,
    config: GrokConfig | None = None,
    layers: int | None = None,
    hashes: HashList | None = None,
    weights_root: Path | None = None,
) -> CheckPlan:
    """Return what is to be checked in a folder. Headers and manifests are read, no values.

    Args:
        path: of a checkpoint, a store, graphs or a bundle.
        config: of a checkpoint, if it has no `config.json` and is not Grok-1.
        layers: only the first so many.
        hashes: of whole files.
        weights_root: where the weights of a bundle are now, if they were moved.

    Raises:
        BundleError: the manifest of a bundle cannot be read.
        CheckpointError: `path` holds no weights.
        ConfigError: the config cannot be read, or does not go with the folder; or the hashes are
            of other files.
    """
    if (path / MANIFEST).exists():
        if config or layers:
            raise ConfigError(
                f"{path} holds graphs, which say their config and layers themselves; leave "
                "--config and --layers away"
            )
        plan = _of_bundle(path, read_bundle(path, weights_root=weights_root))
    elif weights_root is not None:
        raise ConfigError(
            f"{path} holds no graphs that point at weights; leave --weights-root away"
        )
    else:
        plan = _of_weights(path, config, layers)
    return _with_hashes(plan, hashes, others=layers is None) if hashes else plan


def _of_weights(path: Path, config: GrokConfig | None, layers: int | None) -> CheckPlan:
    found = find_weights(path, config, layers)
    faults = found.faults
    texts = [*faults.unsafe, *faults.shapes, *faults.other]
    if 2 * faults.misfits > faults.read:
        texts.insert(
            0,
            f"{faults.misfits} of {faults.read} files hold other shapes than {found.source}: give "
            "the config.json of these weights",
        )
    plan = CheckPlan(
        path=path,
        kind="released checkpoint" if found.layout == "released" else found.layout,
        config=found.config,
        files=_files(path, found.index),
        findings=tuple(_finding("wrong", "file", text) for text in texts),
    )
    return _with_manifest(path, plan) if found.layout == "store" else plan


def _of_bundle(path: Path, bundle: Bundle) -> CheckPlan:
    manifest = bundle.manifest
    findings = [_finding("wrong", "file", text) for text in bundle.faults()]
    indices = []
    roots = {WEIGHT_INDEX: bundle.weights_root}
    for name in manifest.files:
        if rank := _RANK_INDEX.fullmatch(name):
            roots[name] = path / rank[1]
    for name, root in roots.items():
        try:
            indices.append(WeightIndex.read(path / name, root=root))
        except BundleError as error:
            findings.append(_finding("wrong", "file", str(error)))
    if manifest.head == "int8":
        indices.append(head_index(manifest.config, path))
    return CheckPlan(
        path=path,
        kind="bundle" if manifest.kind == "engine" else "folder of graphs",
        config=manifest.config,
        files=tuple(file for index in indices for file in _files(path, index)),
        findings=tuple(findings),
    )


def _files(path: Path, index: WeightIndex) -> tuple[FileToRead, ...]:
    tensors: dict[str, list[Weight]] = {file: [] for file in index.files}
    for weight in index:
        if weight.nbytes:
            tensors[weight.file].append(weight)
    files = []
    for file, weights in tensors.items():
        place = index.root / file
        name = str(place.relative_to(path) if place.is_relative_to(path) else place)
        files.append(
            FileToRead(
                path=place,
                name=name,
                nbytes=index.files[file],
                weights=tuple(weights),
                tensor_sha256=tensor_hashes(place) if place.suffix == ".safetensors" else {},
            )
        )
    return tuple(files)


def _with_manifest(path: Path, plan: CheckPlan) -> CheckPlan:
    """Return the plan of a store with the hashes in its `store.json`, if it was imported."""
    findings = list(plan.findings)
    stored: dict[str, str] = {}
    try:
        if manifest := StoreManifest.read(path):
            stored = {name: tensor.sha256 for name, tensor in manifest.tensors.items()}
    except CheckpointError as error:
        findings.append(_finding("wrong", "file", str(error)))
    text = f"has another hash in {STORE_MANIFEST} than in its file: one is damaged, or older"
    findings += (
        Finding.of(weight, "wrong", "hash", text, file=file.name)
        for file in plan.files
        for weight in file.weights
        if weight.name in stored and stored[weight.name] != file.tensor_sha256.get(weight.name)
    )
    files = (
        dataclasses.replace(file, tensor_sha256={**file.tensor_sha256, **stored})
        for file in plan.files
    )
    return dataclasses.replace(plan, files=tuple(files), findings=tuple(findings))


def _with_hashes(plan: CheckPlan, hashes: HashList, *, others: bool) -> CheckPlan:
    """Return the plan with hashes of whole files, and what the list says that is not so.

    Args:
        plan: without.
        hashes: the list.
        others: read files too that are listed and hold no tensors that could be found.
    """
    listed = hashes.match(file.name for file in plan.files)
    files = [
        dataclasses.replace(file, sha256=hashes.hashes.get(listed.get(file.name, "")))
        for file in plan.files
    ]
    findings = [
        _finding("doubtful", "hash", f"is not in {hashes.source}", file=file.name)
        for file in files
        if file.sha256 is None
    ]
    told = "\n".join(finding.text for finding in plan.findings)
    rest = {name for name in hashes.hashes if name not in listed.values()} if others else set()
    for name in sorted(rest):
        place = _found(plan.path, name)
        if place is not None:
            files.append(
                FileToRead(
                    path=place,
                    name=str(place.relative_to(plan.path)),
                    nbytes=place.stat().st_size,
                    sha256=hashes.hashes[name],
                )
            )
        elif PurePosixPath(name).name not in told:
            text = f"{name} is in {hashes.source} and not in {plan.path}"
            findings.append(_finding("doubtful", "hash", text))
    if not any(file.sha256 for file in files):
        raise ConfigError(
            f"{hashes.source} names no file of {plan.path}, but e.g. {next(iter(hashes.hashes))}; "
            "give the list of this checkpoint"
        )
    return dataclasses.replace(plan, files=tuple(files), findings=(*plan.findings, *findings))


def _found(folder: Path, listed: str) -> Path | None:
    """Return the file in a folder that a listed path means, or None."""
    pure = PurePosixPath(listed)
    inside = not pure.is_absolute() and ".." not in pure.parts
    places = [folder / listed] if inside else []
    places += [folder / pure.name, folder / RELEASED_FOLDER / pure.name]
    return next((place for place in places if place.is_file()), None)


def _finding(level: Level, kind: Kind, text: str, *, file: str = "") -> Finding:
    return Finding(level=level, kind=kind, text=text, file=file)
