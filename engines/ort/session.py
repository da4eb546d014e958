"""Run a bundle in ONNX Runtime: one session a graph, the cache written in place.

With native kernels (`plugins.kernels`) the stamped graphs run as they are: the library's ops stand
for the op nodes. Without, the lowered graphs run by what ONNX Runtime has built in.

Keys, values and the residual stream live in arrays that are allocated once. They are bound by
address, input and output of a cache to one memory, so a step copies no cache and allocates none.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.arguments import check_tokens, checked_last
from export_grok.errors import BundleError
from export_grok.plugins.kernels import Kernels, native_kernels
from export_grok.progress import progress_bar

__all__ = ["OrtSession", "open_engine"]

_Array = NDArray[np.float32] | NDArray[np.int64]


def open_engine(
    bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
) -> "OrtSession":
    """Return the loaded engine; see `engines.backend.open_session`."""
    return OrtSession(bundle, batch=batch, max_length=max_length, threads=threads)


class OrtSession:
    """The graphs of a bundle, loaded, and a cache for `batch` rows of `max_length` tokens.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
        kernels: which run.
        keys: for each layer float32 [B, Hkv, T, D].
        values: for each layer, likewise.

    Raises:
        BundleError: a graph does not load.
    """

    def __init__(
        self, bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
    ) -> None:
        self.config = bundle.config
        self.batch = batch
        self.max_length = max_length
        self.kernels = native_kernels()
        self._bundle = bundle
        self._options = _session_options(bundle.weights_root, threads, self.kernels)
        # A float32 head is large: packed once more by ONNX Runtime, it would be private memory.
        mapped = self.kernels.library is not None
        self._head_options = _session_options(
            bundle.head_root, threads, self.kernels, packing=not mapped
        )
        config = bundle.config
        shape = (batch, config.num_kv_heads, max_length, config.key_size)
        # zeros() takes pages from the system when they are first written.
        self.keys = [np.zeros(shape, np.float32) for _ in range(config.num_layers)]
        self.values = [np.zeros(shape, np.float32) for _ in range(config.num_layers)]
        self._embedding = self._load("embedding", self._options)
        self._layers = []
        with progress_bar("loading", config.num_layers, unit="layers") as advance:
            for layer in range(config.num_layers):
                self._layers.append(self._load("layer", self._options, layer))
                advance(1)
        self._heads: dict[str, ort.InferenceSession] = {}
        self._chains: dict[int, _Chain] = {}

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [B, V]."""
        if last is not None:
            last = checked_last(self, last, tokens)
        hidden = self._run_layers(tokens, start)
        if last is None:
            return None
        return self._run_head("head", {"h": hidden, "last": last}, (self.batch,))

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        hidden = self._run_layers(tokens, start)
        return self._run_head("head_all", {"h": hidden}, hidden.shape[:2])

    def _run_layers(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        check_tokens(self, tokens, start)
        chain = self._chain(tokens.shape[1])
        chain.tokens[:] = tokens
        chain.start[:] = start
        for session, binding in chain.steps:
            session.run_with_iobinding(binding)
        return chain.hidden

    def _run_head(
        self, kind: str, inputs: dict[str, _Array], lead: tuple[int, ...]
    ) -> NDArray[np.float32]:
        if kind not in self._heads:
            self._heads[kind] = self._load(kind, self._head_options)
        session = self._heads[kind]
        logits = np.empty((*lead, self.config.vocab_size), np.float32)
        session.run_with_iobinding(_bound(session, inputs, {"logits": logits}))
        return logits

    def _chain(self, tokens: int) -> "_Chain":
        """Return the bound run of all layers for S new tokens; made at the first use."""
        if tokens not in self._chains:
            self._chains[tokens] = _Chain(self, self._embedding, self._layers, tokens)
        return self._chains[tokens]

    def _load(
        self, kind: str, options: ort.SessionOptions, layer: int | None = None
    ) -> ort.InferenceSession:
        variant = "" if self.kernels.library else "ort"
        path = self._bundle.folder / graph_file(kind, layer, variant=variant)
        try:
            return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no common base for its errors
            raise BundleError(
                f"{path} does not load in ONNX Runtime {ort.__version__}: {error}"
            ) from error


class _Chain:
    """Embedding and layers bound to their memory for one number of new tokens."""

    def __init__(
        self,
        session: OrtSession,
        embedding: ort.InferenceSession,
        layers: Sequence[ort.InferenceSession],
        tokens: int,
    ) -> None:
        batch, width = session.batch, session.config.emb_size
        self.tokens = np.zeros((batch, tokens), np.int64)
        self.start = np.zeros(batch, np.int64)
        # Layer by layer the residual stream goes from one of two arrays to the other.
        # A binding knows addresses only: what it names must live as long as it does.
        streams = [np.zeros((batch, tokens, width), np.float32) for _ in range(2)]
        self._streams = streams
        self.steps = [(embedding, _bound(embedding, {"tokens": self.tokens}, {"h": streams[0]}))]
        for number, layer in enumerate(layers):
            h, h_out = streams[number % 2], streams[(number + 1) % 2]
            keys, values = session.keys[number], session.values[number]
            inputs: dict[str, _Array] = {
                "h": h,
                "start": self.start,
                "k_cache": keys,
                "v_cache": values,
            }
            outputs = {"h_out": h_out, "k_out": keys, "v_out": values}
            self.steps.append((layer, _bound(layer, inputs, outputs)))
        self.hidden = streams[len(layers) % 2]


def _bound(
    session: ort.InferenceSession,
    inputs: dict[str, _Array],
    outputs: dict[str, NDArray[np.float32]],
) -> ort.IOBinding:
    binding = session.io_binding()
    for name, array in inputs.items():
        element = array.dtype.type
        binding.bind_input(name, "cpu", 0, element, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    return binding


def _session_options(
    weights_root: Path, threads: int | None, kernels: Kernels, *, packing: bool = True
) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
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
