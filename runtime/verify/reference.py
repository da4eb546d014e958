"""What an engine is held to: the model in PyTorch, ONNX Runtime, another bundle, the original."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import MANIFEST, Bundle, open_bundle
from export_grok.config import GrokConfig
from export_grok.engines.backend import open_functions, open_probe
from export_grok.engines.probe import Probe
from export_grok.errors import ConfigError
from export_grok.export.checkpoint import holds_weights, open_weights
from export_grok.optional import require
from export_grok.runtime.verify.goldens import GOLDENS, Goldens, read_goldens

__all__ = ["Reference", "reference_of"]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What is right.

    Attributes:
        probe: what runs it.
        bundle: whose engine it is, if it is one's.
        notes: what to know of it, one line each.
    """

    probe: Probe
    bundle: Bundle | None = None
    notes: tuple[str, ...] = ()

    @property
    def goldens(self) -> Goldens | None:
        """The results of the original program, if it is these."""
        return self.probe if isinstance(self.probe, Goldens) else None


def reference_of(against: str, bundle: Bundle, *, threads: int | None = None) -> Reference:
    """Return the reference that is meant.

    Args:
        against: "torch", "ort", "goldens", or the path of a bundle, a checkpoint, or goldens.
        bundle: whose engine is held to it.
        threads: for ONNX Runtime to compute with.

    Raises:
        BundleError: the other bundle is unfinished or damaged.
        CheckpointError: the checkpoint is.
        ConfigError: there is no such reference, or it is of another model.
        MissingDependencyError: torch is not installed.
        RequestError: there are no goldens, or of another model.
    """
    if against == "torch":
        require("torch", extra="verify")
        from export_grok.runtime.torch_probe import TorchProbe

        return Reference(probe=TorchProbe.of_bundle(bundle))
    if against == "ort":
        return Reference(probe=open_functions(bundle, threads=threads))
    path = Path(against)
    if against == "goldens":
        path = bundle.weights_root / GOLDENS
    if path.suffix == ".npz":
        notes = ["the original's results show the inside of prefill only"]
        if bundle.manifest.head == "int8":
            notes.append(_other_head(bundle, "the original's"))
        return Reference(probe=read_goldens(path, bundle.config), notes=tuple(notes))
    if (path / MANIFEST).exists():
        return _other(open_bundle(path, kind="engine"), bundle, threads)
    if path.is_dir() and holds_weights(path):
        return _checkpoint(path, bundle)
    raise ConfigError(
        f"--against {against}: there is no such reference. Take torch, ort, goldens, or the path "
        "of another bundle, of a checkpoint, or of a goldens.npz"
    )


def _other(other: Bundle, bundle: Bundle, threads: int | None) -> Reference:
    _check_same(other.config, bundle.config, str(other.folder))
    theirs, ours = other.manifest.source, bundle.manifest.source
    differ = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    notes = []
    if differ:
        notes.append(
            f"the bundles were made of different weights: {len(differ)} files differ, among them "
            f"{differ[0]}"
        )
    if other.manifest.head != bundle.manifest.head:
        notes.append(
            f"the head of {other.folder} is {other.manifest.head}, that of {bundle.folder} "
            f"{bundle.manifest.head}: their logits differ by that"
        )
    return Reference(probe=open_probe(other, threads=threads), bundle=other, notes=tuple(notes))


def _checkpoint(path: Path, bundle: Bundle) -> Reference:
    require("torch", extra="verify")
    from export_grok.runtime.torch_probe import TorchProbe

    config, index = open_weights(path, None, None)
    layers = bundle.config.num_layers
    if config.num_layers > layers:  # the bundle may hold the first layers only
        config = dataclasses.replace(config, num_layers=layers)
    _check_same(config, bundle.config, str(path))
    notes: tuple[str, ...] = ()
    if bundle.manifest.head == "int8":
        notes = (_other_head(bundle, f"that of {path}"),)
    return Reference(probe=TorchProbe(config, index), notes=notes)


def _other_head(bundle: Bundle, theirs: str) -> str:
    return f"the head of {bundle.folder} is int8, {theirs} is not: their logits differ by that"


def _check_same(theirs: GrokConfig, ours: GrokConfig, name: str) -> None:
    wanted, found = ours.to_dict(), theirs.to_dict()
    differ = [
        f"{key} is {found.get(key)}, of the bundle {value}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if differ:
        raise ConfigError(
            f"{name} is of another model: {'; '.join(differ)}. Compare engines of one checkpoint"
        )
