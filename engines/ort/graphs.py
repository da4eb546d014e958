"""How a graph is loaded into ONNX Runtime, and bound to memory."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.errors import BundleError
from export_grok.plugins.kernels import Kernels

__all__ = ["Array", "bound", "head_options", "load_graph", "run_bound", "session_options"]

Array = NDArray[np.float32] | NDArray[np.int64]


def load_graph(
    path: Path, options: ort.SessionOptions, *, content: bytes | None = None
) -> ort.InferenceSession:
    """Return the graph in a file, ready to run.

    Args:
        path: of the file.
        options: to load it with.
        content: to take in place of the file's.

    Raises:
        BundleError: it does not load.
    """
    try:
        # Without its fallback, which prints what went wrong and tries the same again.
        return ort.InferenceSession(
            content or str(path), options, ["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # ONNX Runtime has no common base for its errors
        raise BundleError(
            f"{path} does not load in ONNX Runtime {ort.__version__}: {_in_a_line(error)}"
        ) from error


def bound(
    session: ort.InferenceSession, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> ort.IOBinding:
    """Return arrays bound to inputs and outputs by their addresses; keep them alive as long.

    Raises:
        BundleError: the graph has no such inputs and outputs.
    """
    binding = session.io_binding()
    with _graph_errors(session):
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    return binding


def run_bound(session: ort.InferenceSession, binding: ort.IOBinding) -> None:
    """Run a graph on the memory that it is bound to.

    Raises:
        BundleError: it computes something else than that memory is for, or cannot be computed.
    """
    with _graph_errors(session):
        session.run_with_iobinding(binding)


@contextlib.contextmanager
def _graph_errors(session: ort.InferenceSession) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ONNX Runtime has no common base for its errors
        raise BundleError(
            f"graph {session.get_modelmeta().graph_name!r} does not run in ONNX Runtime "
            f"{ort.__version__}: {_in_a_line(error)}; if it is damaged, build the bundle again"
        ) from error


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def head_options(weights_root: Path, threads: int | None, kernels: Kernels) -> ort.SessionOptions:
    """Return the options that a head is loaded with; see `session_options`."""
    # A float32 head is large: packed once more by ONNX Runtime, it would be private memory.
    return session_options(weights_root, threads, kernels, packing=kernels.library is None)


def session_options(
    weights_root: Path, threads: int | None, kernels: Kernels, *, packing: bool = True
) -> ort.SessionOptions:
    """Return the options that a graph is loaded with.

    Args:
        weights_root: folder that its initialisers start from.
        threads: to compute with; as many as there are cores by default.
        kernels: that run.
        packing: let ONNX Runtime keep matrices in an order of its own, in memory of its own.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised, and need not be printed too
    if threads is not None:
        options.intra_op_num_threads = threads
    entries = {
        # Initialisers lie where the manifest says, in the bundle or not.
        "session.model_external_initializers_file_folder_path": str(weights_root),
        # Each session has its own threads. Spinning on, those of one layer would take the cores
        # from the next: 17 times slower with 24 sessions on 2 cores.
        "session.force_spinning_stop": "1",
        "session.disable_prepacking": "0" if packing else "1",
    }
    if kernels.library is not None:
        options.register_custom_ops_library(str(kernels.library))
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options
