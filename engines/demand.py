"""What is asked of an engine: for what it is built, and for what it is opened."""

from dataclasses import dataclass
from pathlib import Path

from export_grok.artifacts import Bundle
from export_grok.config import Dtype, GrokConfig, HeadDtype
from export_grok.manifest import Manifest
from export_grok.weights import WeightIndex

__all__ = ["Demand", "Graphs"]


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """A folder of graphs as it is, or as it will be.

    Attributes:
        folder: that gets the engine.
        config: of the model.
        dtype: of the graphs.
        head: matrix of the head.
        index: where the weights lie.
        manifest: of the folder; None if its graphs are still to be written.
    """

    folder: Path
    config: GrokConfig
    dtype: Dtype
    head: HeadDtype
    index: WeightIndex
    manifest: Manifest | None = None

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> "Graphs":
        """Return the folder that a bundle is."""
        manifest = bundle.manifest
        return cls(
            folder=bundle.folder,
            config=manifest.config,
            dtype=manifest.dtype,
            head=manifest.head,
            index=bundle.index(),
            manifest=manifest,
        )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a session is opened for, and what it is asked then.

    Attributes:
        batch: rows.
        max_length: longest row, prompt and answer together, in tokens.
        prefill: tokens of each row that come in chunks.
        decode: steps of one token for each row.
        chunk: tokens of each row that come at once.
        whole: whether the logits of every token are asked for.
        threads: to compute with; None for all cores.
    """

    batch: int
    max_length: int
    prefill: int = 0
    decode: int = 0
    chunk: int = 1
    whole: bool = False
    threads: int | None = None

    @property
    def at_once(self) -> int:
        """Tokens of all rows that go through the layers at once, at the most."""
        return self.batch * max(1, min(self.chunk, self.prefill))
