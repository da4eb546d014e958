"""Made-up logits."""

import numpy as np
from numpy.typing import NDArray

INF = float("inf")
NAN = float("nan")

Float32 = NDArray[np.float32]


def rows(*values: list[float]) -> Float32:
    return np.array(values, dtype=np.float32)


def random_logits(count: int, vocabulary: int, seed: int = 0) -> Float32:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((count, vocabulary)) * 3).astype(np.float32)


def log_softmax(logits: Float32) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities of one row [V], the plain way."""
    exact = logits.astype(np.float64)
    result: NDArray[np.float64] = exact - np.logaddexp.reduce(exact)
    return result
