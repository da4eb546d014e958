"""The runners of one graph of a bundle, by the path of its file, as polygraphy takes them."""

from collections.abc import Callable
from pathlib import Path

from polygraphy.logger import G_LOGGER

from export_grok.engines.backend import open_functions, open_probe
from export_grok.engines.probe import Probe
from export_grok.errors import BundleError, ConfigError
from export_grok.optional import require
from export_grok.plugins.kernels import Kernels
from export_grok.runtime.verify.poly.graph_file import GraphFile, plain_errors
from export_grok.runtime.verify.poly.runner import ProbeRunner

__all__ = [
    "REFERENCE",
    "GraphRunner",
    "functions_runner",
    "ort_runner",
    "ref_runner",
    "trt_runner",
]

REFERENCE = "grok-ref"


class GraphRunner(ProbeRunner):
    """Runs the graph in a file; its errors are polygraphy's."""

    def __init__(
        self,
        name: str,
        path: str | Path,
        open_probe: Callable[[GraphFile], Probe],
        *,
        weights_root: str | Path | None = None,
    ) -> None:
        """Find the graph.

        Args:
            name: of the runner, as polygraphy prints it.
            path: of the graph, in its bundle.
            open_probe: returns what runs it.
            weights_root: where the weights of the bundle are, if they were moved.

        Raises:
            PolygraphyException: the file is no graph of a bundle.
        """
        with plain_errors():
            file = GraphFile.at(path, weights_root=weights_root)

        def opened() -> Probe:
            probe = open_probe(file)
            G_LOGGER.info(f"{name:35} | {file.graph} of {file.bundle.folder}: {probe.name}")
            return probe

        super().__init__(name, file.graph, opened)

    def activate_impl(self) -> None:
        """Load the graph."""
        with plain_errors():
            super().activate_impl()


def ref_runner(path: str | Path, *, weights_root: str | Path | None = None) -> GraphRunner:
    """Return what runs the PyTorch model, in float32, on the weights of the bundle."""
    return GraphRunner(REFERENCE, path, _reference, weights_root=weights_root)


def ort_runner(path: str | Path, *, weights_root: str | Path | None = None) -> GraphRunner:
    """Return what runs the graph as an `ort` engine does; `*.ort.onnx` with built-in kernels."""
    return GraphRunner("grok-ort", path, _ort, weights_root=weights_root)


def functions_runner(path: str | Path, *, weights_root: str | Path | None = None) -> GraphRunner:
    """Return what runs the graph in ONNX Runtime as it is exported, ops by function bodies."""
    return GraphRunner("grok-functions", path, _functions, weights_root=weights_root)


def trt_runner(path: str | Path, *, weights_root: str | Path | None = None) -> GraphRunner:
    """Return what runs the graph's plan of a TensorRT engine; it needs a GPU."""
    return GraphRunner("grok-trt", path, _trt, weights_root=weights_root)


def _reference(file: GraphFile) -> Probe:
    require("torch", extra="verify")
    from export_grok.runtime.torch_probe import TorchProbe

    return TorchProbe.of_bundle(file.bundle)


def _functions(file: GraphFile) -> Probe:
    require("onnxruntime", extra="verify")
    if file.bundle.manifest.dtype == "bfloat16":
        raise ConfigError(
            f"the graphs of {file.bundle.folder} are bfloat16, for which ONNX Runtime has no "
            "kernels on a CPU; take --grok-ref, or --grok-functions with graphs in float32"
        )
    return open_functions(file.bundle)


def _ort(file: GraphFile) -> Probe:
    require("onnxruntime", extra="verify")
    _check_engine(file, ("ort",))
    if not file.variant:
        return open_probe(file.bundle)
    from export_grok.engines.ort.probe import OrtProbe

    kernels = Kernels(reason="the lowered graph is asked for")
    return OrtProbe(file.bundle, "ONNX Runtime, built-in kernels", kernels, variant=file.variant)


def _trt(file: GraphFile) -> Probe:
    _check_engine(file, ("trt", "trt-rtx"))
    return open_probe(file.bundle)


def _check_engine(file: GraphFile, backends: tuple[str, ...]) -> None:
    """Hold the engine of the bundle to the runner.

    Raises:
        BundleError: there is none.
        ConfigError: it is of another backend.
    """
    folder, backend = file.bundle.folder, file.bundle.manifest.backend
    if backend is None:
        raise BundleError(
            f"{folder} holds graphs and no engine; build one: export-grok build-engine {folder}, "
            "or take --grok-functions, which runs the graphs"
        )
    if backend not in backends:
        other = "--grok-ort" if backend == "ort" else "--grok-trt"
        raise ConfigError(f"the engine of {folder} is {backend}: take {other}")
