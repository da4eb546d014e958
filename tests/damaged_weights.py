"""Sound weights to damage, for tests of what finds it.

A module of tests takes the fixtures by importing them: `from tests.damaged_weights import whole`.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from export_grok.config import GrokConfig
from export_grok.export.check.plan import check_plan
from export_grok.export.check.soundness import Soundness, soundness_of
from export_grok.export.checkpoint import find_weights
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.weights import NUMPY_DTYPES, Weight

__all__ = ["CONFIG", "checked", "checkpoint", "place_of", "values_in", "whole"]

# An expert's matrix, and some rows of the embedding, are longer than a hole.
CONFIG = GrokConfig(
    num_layers=2,
    emb_size=128,
    num_q_heads=4,
    num_kv_heads=2,
    key_size=32,
    ffn_size=1024,
    vocab_size=512,
    num_experts=3,
    attn_output_multiplier=32**-0.5,
    embedding_multiplier_scale=128**0.5,
    output_multiplier_scale=3**-0.5,
    row_parallel_scale_groups=4,
)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that is sound; it is shared."""
    out = tmp_path_factory.mktemp("whole") / "checkpoint"
    write_random_checkpoint(CONFIG, out)
    return out


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """Return a copy that may be damaged."""
    return shutil.copytree(whole, tmp_path / "checkpoint")


def checked(path: Path, *, workers: int = 2, **plan: Any) -> Soundness:
    return soundness_of(check_plan(path, **plan), workers=workers)


def values_in(checkpoint: Path, name: str) -> NDArray[Any]:
    """Return a tensor as the file's own bytes: what is written to it is in the file."""
    weight = find_weights(checkpoint).index[name]
    return np.memmap(
        checkpoint / weight.file,
        NUMPY_DTYPES[weight.dtype],
        mode="r+",
        offset=weight.offset,
        shape=weight.shape,
    )


def place_of(checkpoint: Path, name: str) -> Weight:
    return find_weights(checkpoint).index[name]
