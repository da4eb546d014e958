"""Put a GGUF file through `measure` with llama.cpp: python run_llama.py FILE --threads N ...

Through the low-level interface of llama-cpp-python, by token ids, with llama.cpp's own defaults.
"""

import re
from pathlib import Path

import llama_cpp
import numpy as np
from measure import CONTEXT, PREFILLS, measure
from numpy.typing import NDArray

ROW = 0


class Llama:
    """A context of one row; see `measure.Peer`."""

    def __init__(self, file: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {file}; delete it to have it made again")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT
        params.n_batch = params.n_ubatch = max(PREFILLS)
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(max(PREFILLS), 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        # "CPU : AVX = 1 | AVX2 = 1 | ..."
        features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        self.about = {
            "llama-cpp-python": llama_cpp.__version__,
            "llama.cpp was compiled with": " ".join(features),
        }

    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the last one's logits."""
        if start == 0:
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_clear(memory, False)
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens.tolist()):
            batch.token[place] = token
            batch.pos[place] = start + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = ROW
            batch.logits[place] = place == len(tokens) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens returned {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, len(tokens) - 1)
        return np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).copy()


if __name__ == "__main__":
    measure(Llama)
