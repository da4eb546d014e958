"""The PyTorch model, one module at a time, with what it computes on the way: the reference."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export_grok.artifacts import Bundle
from export_grok.config import Dtype, GrokConfig
from export_grok.engines.probe import GraphName, Run
from export_grok.export.head import head_index
from export_grok.export.load import embedding_from_index, head_from_index, layer_from_index
from export_grok.export.model import DecoderLayer, Routing
from export_grok.weights import WeightIndex

__all__ = ["TorchProbe"]

Arrays = dict[str, NDArray[Any]]


class TorchProbe:
    """Runs the modules of `export.model`; see `engines.probe.Probe`.

    Weights are read where they lie, and only while their module is loaded: memory is that of one
    layer, whatever the number of layers.

    Attributes:
        name: what runs, in a few words.
        config: of the model.
        dtype: of activations and cache; bfloat16 rounds wherever the original does.
        index: where the weights lie.
        head: where those of the head lie.
    """

    def __init__(
        self,
        config: GrokConfig,
        index: WeightIndex,
        *,
        head: WeightIndex | None = None,
        dtype: Dtype = "float32",
    ) -> None:
        """Take the weights.

        Args:
            config: of the model.
            index: where they lie.
            head: where those of an int8 head lie; None for the embedding's table.
            dtype: to compute in.
        """
        self.name = f"PyTorch, {dtype}"
        self.config = config
        self.dtype = dtype
        self.index = index
        self.head = head or index

    @classmethod
    def of_bundle(cls, bundle: Bundle, dtype: Dtype = "float32") -> "TorchProbe":
        """Return the model on the weights of a bundle, its int8 head if it has one included."""
        head = None
        if bundle.manifest.head == "int8":
            head = head_index(bundle.config, bundle.head_root)
        return cls(bundle.config, bundle.index(), head=head, dtype=dtype)

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        """Load the module that a graph is made of, and yield what runs it."""
        module = self._module(name)
        dtype: torch.dtype = getattr(torch, self.dtype)

        @torch.no_grad()
        def run(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
            tensors = {key: _tensor(array, dtype) for key, array in inputs.items()}
            if isinstance(module, DecoderLayer):
                found = _layer(module, tensors)
            else:
                found = {"h" if name.kind == "embedding" else "logits": module(**tensors)}
            return {key: _array(tensor) for key, tensor in found.items()}

        yield run

    def _module(self, name: GraphName) -> nn.Module:
        if name.layer is not None:
            return layer_from_index(self.config, self.index, name.layer)
        if name.kind == "embedding":
            return embedding_from_index(self.config, self.index, self.dtype)
        return head_from_index(self.config, self.head, self.dtype)


def _layer(module: DecoderLayer, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs and taps of a layer; the caches that come in are not written."""
    taps: dict[str, Tensor] = {}

    def keep(name: str, choose: Callable[[Any, Any], Tensor]) -> Callable[..., None]:
        def hook(_module: nn.Module, given: Any, output: Any) -> None:
            taps[name] = choose(given, output)

        return hook

    def routed(_module: nn.Module, _given: Any, output: Routing) -> None:
        taps["gates"], taps["experts"] = output.gates, output.experts
        taps["probabilities"] = output.probabilities

    hooks = [
        module.attention.out.register_forward_hook(keep("heads", lambda given, _: given[0])),
        module.attention.register_forward_hook(keep("attention", lambda _, output: output[0])),
        module.router.register_forward_hook(routed),
        module.experts.register_forward_hook(keep("moe", lambda _, output: output)),
    ]
    caches = [inputs[cache].clone() for cache in ("k_cache", "v_cache")]
    try:
        h_out, k_out, v_out = module(inputs["h"], inputs["start"], *caches)
    finally:
        for hook in hooks:
            hook.remove()
    return {**taps, "h_out": h_out, "k_out": k_out, "v_out": v_out}


def _tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(dtype) if array.dtype.kind == "f" else tensor


def _array(tensor: Tensor) -> NDArray[Any]:
    wide = tensor.float() if tensor.is_floating_point() else tensor
    array: NDArray[Any] = wide.contiguous().numpy()
    return array
