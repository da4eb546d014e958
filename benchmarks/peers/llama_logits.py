"""Write what llama.cpp predicts behind each token: llama_logits.py FILE TOKENS.npy OUT.npy.

Needs llama-cpp-python and numpy, like `run_llama.py`.
"""

import sys
from pathlib import Path

import numpy as np
from run_llama import Llama

THREADS = 2


def main(file: str, tokens_file: str, out: str) -> None:
    """Decode the tokens one by one."""
    llama = Llama(Path(file), THREADS)
    tokens = np.load(tokens_file)
    places = range(len(tokens))
    np.save(out, np.stack([llama.forward(tokens[at : at + 1], at) for at in places]))


if __name__ == "__main__":
    main(*sys.argv[1:])
