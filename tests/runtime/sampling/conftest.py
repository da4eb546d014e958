"""What the original program's sampler computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="session")
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(DATA / "sampler_goldens.npz") as file:
        return dict(file)
