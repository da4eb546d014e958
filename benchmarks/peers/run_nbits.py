"""Put the graph of `nbits_model` through `measure`: python run_nbits.py FOLDER --threads N ..."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from measure import CONTEXT, measure
from nbits_model import GRAPH
from numpy.typing import NDArray


class NBits:
    """One session for the whole model, with ONNX Runtime's own defaults; see `measure.Peer`."""

    def __init__(self, folder: Path, threads: int) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(
            str(folder / GRAPH), options, providers=["CPUExecutionProvider"]
        )
        self.vocabulary = self._session.get_outputs()[0].shape[-1]
        self.about = {"onnxruntime": ort.__version__}
        self._logits = np.empty((1, self.vocabulary), np.float32)
        self._binding = self._session.io_binding()
        self._bind_output("logits", self._logits)
        self._caches = []
        for value in self._session.get_inputs():
            if value.name.startswith(("keys_", "values_")):
                _, heads, _, size = value.shape
                cache = np.zeros((1, heads, CONTEXT, size), np.float32)
                self._bind_input(value.name, cache)
                self._bind_output(value.name.replace("_", "_out_"), cache)
                self._caches.append(cache)

    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the last one's logits."""
        end = start + len(tokens)
        inputs = {
            "tokens": tokens[None].copy(),
            "last": np.array([end - 1], np.int32),
            "total": np.array(end, np.int32),
        }
        for name, array in inputs.items():
            self._bind_input(name, array)
        self._session.run_with_iobinding(self._binding)
        return self._logits[0].copy()

    def _bind_input(self, name: str, array: NDArray[np.generic]) -> None:
        place = array.ctypes.data
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, place)

    def _bind_output(self, name: str, array: NDArray[np.float32]) -> None:
        place = array.ctypes.data
        self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, place)


if __name__ == "__main__":
    measure(NBits)
