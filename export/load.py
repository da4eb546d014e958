"""Put the weights of an index into the modules of `export.model`, without copying them."""

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export_grok.config import Dtype, GrokConfig
from export_grok.export.model import DecoderLayer, Embedding, Grok1, Head
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = [
    "embedding_from_index",
    "head_from_index",
    "layer_from_index",
    "model_from_index",
    "tensor_from_array",
]


def tensor_from_array(array: NDArray[Any]) -> Tensor:
    """Return a tensor on the memory of `array`, which must not be written if `array` must not."""
    is_bfloat16 = array.dtype == ml_dtypes.bfloat16
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def model_from_index(config: GrokConfig, index: WeightIndex, dtype: Dtype) -> Grok1:
    """Return the whole model; its weights are views of the index's files."""
    with torch.device("meta"):
        model = Grok1(config, dtype)
    weights = dict(index.weights)
    # The head owns the final norm and shares the embedding.
    weights["head.embedding.weight"] = weights["embedding.weight"]
    weights["head.final_norm.scale"] = weights.pop("final_norm.scale")
    _fill(model, weights, index)
    return model.eval()


def layer_from_index(config: GrokConfig, index: WeightIndex, layer: int) -> DecoderLayer:
    """Return one decoder layer; its weights are views of the index's files."""
    with torch.device("meta"):
        module = DecoderLayer(config)
    _fill(module, index.below(f"layers.{layer}."), index)
    return module.eval()


def embedding_from_index(config: GrokConfig, index: WeightIndex, dtype: Dtype) -> Embedding:
    """Return the embedding; its weights are views of the index's files."""
    with torch.device("meta"):
        module = Embedding(config, dtype)
    _fill(module, index.below("embedding."), index)
    return module.eval()


def head_from_index(config: GrokConfig, index: WeightIndex, dtype: Dtype) -> Head:
    """Return the head; its weights are views of the index's files.

    Args:
        config: of the model.
        index: of the model, or of an int8 head (`export.head.head_index`).
        dtype: of the hidden states.
    """
    int8 = "unembedding.weight" in index.weights
    with torch.device("meta"):
        module = Head(config, dtype, None if int8 else Embedding(config, dtype))
    wanted = dict(module.named_buffers())
    _fill(module, {name: index[name] for name in wanted}, index)
    return module.eval()


def _fill(module: nn.Module, weights: dict[str, Weight], index: WeightIndex) -> None:
    reader = WeightReader(index.root)
    state = {name: tensor_from_array(reader.read(weight)) for name, weight in weights.items()}
    module.load_state_dict(state, assign=True)
