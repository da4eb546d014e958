"""Where the weights to be written come from: a checkpoint, a store, or a bundle's weights."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import MANIFEST, TOKENIZER, open_bundle
from export_grok.config import GrokConfig
from export_grok.errors import CheckpointError, ConfigError
from export_grok.export.checkpoint import first_layers, holds_weights, open_weights
from export_grok.export.parameters import model_parameters
from export_grok.export.tokenizer_file import tokenizer_beside
from export_grok.files import fingerprint
from export_grok.progress import progress_bar
from export_grok.weights import WeightIndex

__all__ = ["Source", "open_source_of_weights"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The weights, their config, and the tokenizer that lies beside them.

    Attributes:
        folder: that was given.
        tokenizer: its file; None if there is none.
    """

    folder: Path
    config: GrokConfig
    index: WeightIndex
    tokenizer: Path | None

    def identity(self) -> str:
        """Return what tells these weights from others: a hash of their files' fingerprints.

        A long file is sampled, see `files.fingerprint`: a megabyte of each is read.

        Raises:
            CheckpointError: a file cannot be read.
        """
        facts: dict[str, object] = {"config": self.config.to_dict()}
        paths = {file: self.index.root / file for file in self.index.files}
        if self.tokenizer:
            paths[TOKENIZER] = self.tokenizer
        with progress_bar("looking at the weights", len(paths), unit="files") as advance:
            for name, path in paths.items():
                try:
                    facts[name] = fingerprint(path)
                except OSError as error:
                    raise CheckpointError(
                        f"{path} cannot be read: {error.strerror or error}"
                    ) from error
                advance(1)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def open_source_of_weights(
    path: Path, config: GrokConfig | None = None, layers: int | None = None
) -> Source:
    """Return the weights in `path`, every file checked by its header.

    Args:
        path: folder of a checkpoint, a store, or a bundle.
        config: of a checkpoint, if it has no `config.json` and is not Grok-1.
        layers: take only the first so many.

    Raises:
        BundleError: the bundle is damaged.
        CheckpointError: the checkpoint is damaged, or there is none.
        ConfigError: there are not so many layers, or a bundle was given a config.
    """
    if (path / MANIFEST).exists() and not holds_weights(path):
        return _of_bundle(path, config, layers)
    found, index = open_weights(path, config, layers)
    return Source(folder=path, config=found, index=index, tokenizer=tokenizer_beside(path))


def _of_bundle(path: Path, config: GrokConfig | None, layers: int | None) -> Source:
    if config is not None:
        raise ConfigError(f"{path} is a bundle and has its config: leave --config away")
    bundle = open_bundle(path)
    part, index = first_layers(bundle.config, layers, str(path)), bundle.index()
    weights = {name: index[name] for name in model_parameters(part)}
    used = {weight.file for weight in weights.values()}
    return Source(
        folder=path,
        config=part,
        index=WeightIndex(
            root=index.root,
            weights=weights,
            files={file: length for file, length in index.files.items() if file in used},
        ),
        tokenizer=bundle.tokenizer,
    )
