"""One graph of an `ort` bundle of ranks at a time: all ranks' parts of it, in one process.

Seen from outside it is the graph of the whole model; `engines.assembly` puts it together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from export_grok.artifacts import Bundle, rank_folder
from export_grok.engines.assembly import Assembly, RankedPart
from export_grok.engines.cut import SUM
from export_grok.engines.ort.graphs import head_options, session_options
from export_grok.engines.ort.probe import kernels_in_words, loaded
from export_grok.engines.ort.ranks import part_files
from export_grok.engines.probe import GraphName, Run
from export_grok.engines.taps import taps_of
from export_grok.export.contract import ports
from export_grok.export.graphs import read_graph
from export_grok.plugins.kernels import native_kernels

__all__ = ["RankProbe"]


class RankProbe:
    """Runs the graphs of a bundle of ranks; see `engines.probe.Probe`.

    Where ranks differ and must not, there is no number; see `engines.assembly`.

    Attributes:
        name: what runs, in a few words.
        config: of the model.
        dtype: of the graphs.
    """

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        """Take a bundle.

        Args:
            bundle: with an engine of ranks.
            threads: to compute with; as many as there are cores by default.
        """
        self._bundle = bundle
        self._kernels = native_kernels()
        self._threads = threads
        self._ranks: int = bundle.manifest.engine["tensor_parallel"]
        self.name = f"ONNX Runtime, {self._ranks} ranks, {kernels_in_words(self._kernels)}"
        self.config = bundle.config
        self.dtype = bundle.manifest.dtype

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        """Load all parts of a graph for every rank, and yield what runs them.

        Raises:
            BundleError: one does not load.
        """
        outputs = [
            row.name for row in ports(name.kind, self.config, self.dtype) if row.direction == "out"
        ]
        with ExitStack() as stack:
            yield Assembly(
                parts=self._parts(name, stack),
                outputs=outputs,
                entries=self.config.for_rank(self._ranks).vocab_size,
            )

    def _parts(self, name: GraphName, stack: ExitStack) -> list[RankedPart]:
        options_of = head_options if name.kind.startswith("head") else session_options
        options = [
            options_of(self._bundle.folder / rank_folder(rank), self._threads, self._kernels)
            for rank in range(self._ranks)
        ]
        lowered = self._kernels.library is None
        parts = []
        for exported, file in zip(
            part_files(self._bundle, name.kind, name.layer, lowered=False),
            part_files(self._bundle, name.kind, name.layer, lowered=lowered),
            strict=True,
        ):
            graph = read_graph(exported)
            runs = [stack.enter_context(loaded(file, rank, taps=exported)) for rank in options]
            inputs = [str(value.name) for value in graph.graph.inputs]
            sums = [tap for tap, value in taps_of(graph).items() if value.name == SUM]
            parts.append(RankedPart(runs=runs, inputs=inputs, sums=sums))
        return parts
