"""One graph of an `ort` bundle at a time, on arrays, with its taps as outputs.

The graph that runs is the bundle's, with the same kernels as in a session; taps are added to a
copy of it in memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.ort.graphs import (
    bound,
    head_options,
    load_graph,
    run_bound,
    session_options,
)
from export_grok.engines.probe import GraphName, Probe, Run
from export_grok.engines.taps import PREFIX, tapped, taps_of
from export_grok.errors import ConfigError
from export_grok.export.contract import CACHE_OF
from export_grok.export.graphs import content_of, read_graph
from export_grok.plugins.kernels import Kernels, native_kernels

__all__ = ["OrtProbe", "open_functions", "open_probe"]

FUNCTIONS = Kernels(reason="the function bodies are asked for")


def open_probe(bundle: Bundle, *, threads: int | None = None) -> Probe:
    """Return what runs the graphs of an engine; see `engines.backend.open_probe`."""
    if bundle.manifest.engine.get("tensor_parallel", 1) > 1:
        from export_grok.engines.ort.rank_probe import RankProbe

        return RankProbe(bundle, threads=threads)
    kernels = native_kernels()
    variant = "" if kernels.library else "ort"
    name = f"ONNX Runtime, {kernels_in_words(kernels)}"
    return OrtProbe(bundle, name, kernels, variant=variant, threads=threads)


def kernels_in_words(kernels: Kernels) -> str:
    """Return which kernels they are, in a few words."""
    return f"native {kernels.isa} kernels" if kernels.library else "built-in kernels"


def open_functions(bundle: Bundle, *, threads: int | None = None) -> "OrtProbe":
    """Return what runs the graphs as they are exported, ops by their function bodies.

    Raises:
        ConfigError: ONNX Runtime has no kernels for the dtype of the graphs.
    """
    dtype = bundle.manifest.dtype
    if dtype == "bfloat16":
        raise ConfigError(
            f"the graphs of {bundle.folder} are {dtype}, for which ONNX Runtime has no kernels on "
            "a CPU; compare with --against torch, or with a float32 engine of the same weights: "
            "export-grok build-engine CHECKPOINT --out DIR, and --against DIR"
        )
    return OrtProbe(
        bundle, "ONNX Runtime, function bodies", FUNCTIONS, variant="", threads=threads
    )


class OrtProbe:
    """Runs the graphs of a bundle; see `engines.probe.Probe`.

    Attributes:
        name: what runs, in a few words.
        config: of the model.
        dtype: of the graphs.
    """

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        kernels: Kernels,
        *,
        variant: str,
        threads: int | None = None,
    ) -> None:
        """Take a bundle.

        Args:
            bundle: with graphs.
            name: what runs them.
            kernels: that run.
            variant: of the graphs: "ort" for the lowered ones, empty for those exported.
            threads: to compute with; as many as there are cores by default.
        """
        self.name = name
        self.config = bundle.config
        self.dtype = bundle.manifest.dtype
        self._bundle = bundle
        self._variant = variant
        self._layer_options = session_options(bundle.weights_root, threads, kernels)
        self._head_options = head_options(bundle.head_root, threads, kernels)

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        """Load a graph and yield what runs it.

        Raises:
            BundleError: it does not load.
        """
        folder = self._bundle.folder
        exported = folder / graph_file(name.kind, name.layer)
        path = folder / graph_file(name.kind, name.layer, variant=self._variant)
        options = self._head_options if name.kind.startswith("head") else self._layer_options
        with loaded(path, options, taps=exported) as run:
            yield run


@contextmanager
def loaded(path: Path, options: ort.SessionOptions, *, taps: Path) -> Iterator[Run]:
    """Load the graph in a file with its taps as outputs, and yield what runs it.

    Args:
        path: of the graph.
        options: to load it with.
        taps: path of the exported graph, which tells what its taps are called.

    Raises:
        BundleError: a file is no graph, or does not load.
    """
    model = read_graph(path)
    exported = model if taps == path else read_graph(taps)
    taps_by_value = {tap: str(value.name) for tap, value in taps_of(exported).items()}
    session = load_graph(path, options, content=content_of(tapped(model, taps_by_value)))

    names = [value.name for value in session.get_outputs()]

    def run(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        # As in a session, a cache is written in place: kernels rely on it.
        outputs = {
            name: arrays[cache].copy() for name, cache in CACHE_OF.items() if cache in arrays
        }
        arrays |= {CACHE_OF[name]: array for name, array in outputs.items()}
        binding = bound(session, arrays, outputs)
        others = [name for name in names if name not in outputs]
        for name in others:
            binding.bind_output(name, "cpu")
        run_bound(session, binding)
        # They come in the order that they were bound in.
        found = dict(zip([*outputs, *others], binding.copy_outputs_to_cpu(), strict=True))
        return {name.removeprefix(PREFIX): array for name, array in found.items()}

    yield run
