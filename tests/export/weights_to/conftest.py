"""Models that are written for others."""

from pathlib import Path

import pytest

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import open_weights
from export_grok.export.random_checkpoint import write_random_checkpoint
from tests.export.weights_to.expected import Model

# Twelve layers, so that sorted names are not in their order; heads as wide as the embedding, and
# whole blocks of 32 rows under each of two scales.
CONFIG = GrokConfig(
    num_layers=12,
    emb_size=64,
    num_q_heads=4,
    num_kv_heads=2,
    key_size=16,
    ffn_size=128,
    vocab_size=96,
    num_experts=3,
    sequence_len=32,
    attn_output_multiplier=0.25,
    embedding_multiplier_scale=8.0,
    output_multiplier_scale=0.5,
    row_parallel_scale_groups=2,
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a random model and its weights. They are shared: leave them as they are."""
    folder = tmp_path_factory.mktemp("weights_to") / "checkpoint"
    write_random_checkpoint(CONFIG, folder)
    return open_weights(folder)


@pytest.fixture
def checkpoint(model: Model) -> Path:
    """Return the folder of the random model."""
    return model[1].root
