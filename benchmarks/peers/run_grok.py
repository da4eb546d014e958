"""Put an engine of export-grok through `measure`: python run_grok.py BUNDLE --threads N ..."""

from pathlib import Path

import numpy as np
import onnxruntime
from measure import CONTEXT, measure
from numpy.typing import NDArray

from export_grok.artifacts import open_bundle
from export_grok.engines.backend import open_session
from export_grok.plugins.kernels import native_kernels
from export_grok.runtime.batching.batch import CHUNK


class Grok:
    """An engine of one row; see `measure.Peer`."""

    def __init__(self, folder: Path, threads: int) -> None:
        bundle = open_bundle(folder, kind="engine")
        self._session = open_session(bundle, batch=1, max_length=CONTEXT, threads=threads)
        self.vocabulary = bundle.config.vocab_size
        kernels = native_kernels().isa or "built into ONNX Runtime"
        self.about = {"kernels": kernels, "onnxruntime": onnxruntime.__version__}

    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Write the tokens in chunks, as `runtime.decode` does; return the last one's logits."""
        for first in range(0, len(tokens), CHUNK):
            chunk = tokens[None, first : first + CHUNK]
            ends = first + CHUNK >= len(tokens)
            last = np.array([chunk.shape[1] - 1]) if ends else None
            logits = self._session.forward(chunk, np.array([start + first]), last)
        return logits[0]


if __name__ == "__main__":
    measure(Grok)
