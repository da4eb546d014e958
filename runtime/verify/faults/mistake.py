"""Make a known mistake in the PyTorch model for a while."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from numpy.typing import NDArray
from torch import Tensor

from export_grok.config import GrokConfig
from export_grok.export import model
from export_grok.plugins.softcap_attention.reference import softcap_attention_
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.weights import Weight, WeightIndex, WeightReader

__all__ = ["Mistake", "mistaken"]


class Mistake:
    """What a mistake may change before the model is built and run.

    Attributes:
        config: of the model.
        index: where each weight lies.
    """

    def __init__(self, config: GrokConfig, index: WeightIndex, patches: ExitStack) -> None:
        """Take what may change.

        Args:
            config: of the model.
            index: where each weight lies.
            patches: undoes what is changed in modules and classes.
        """
        self.config = config
        self.index = index
        self._patches = patches

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Have the attribute `name` of a module or class be `value`."""
        self._patches.enter_context(mock.patch.object(owner, name, value))

    def attend(self, attention: Callable[..., Tensor]) -> None:
        """Have attention be what `attention` makes of the true op and its arguments."""
        self.patch(model, "softcap_attention_", functools.partial(attention, softcap_attention_))

    def configure(self, **values: Any) -> None:
        """Have some hyper-parameters be others."""
        self.config = dataclasses.replace(self.config, **values)

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Have every weight be found by another name."""
        weights = {new_name(name): weight for name, weight in self.index.weights.items()}
        self.index = dataclasses.replace(self.index, weights=weights)

    def read(self, change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> None:
        """Have weights be read as `change` makes them of their names and true values."""
        original = WeightReader.read

        def read(self: WeightReader, weight: Weight) -> NDArray[Any]:
            return change(weight.name, original(self, weight))

        self.patch(WeightReader, "read", read)


@contextmanager
def mistaken(fault: Fault, probe: TorchProbe) -> Iterator[TorchProbe]:
    """Yield the model of `probe` with a mistake in it, which it makes while the block lasts.

    Modules and classes are changed for that time, so whatever runs the PyTorch model meanwhile
    makes the mistake too, `probe` included; load and run what is wanted within the block.

    Raises:
        ValueError: the fault is known as a plant only.
    """
    if fault.mistake is None:
        raise ValueError(f"{fault.name} is no mistake of the model: it is known as a plant only")
    with ExitStack() as patches:
        made = Mistake(probe.config, probe.index, patches)
        fault.mistake(made)
        head = made.index if probe.head is probe.index else probe.head
        wrong = TorchProbe(made.config, made.index, head=head, dtype=probe.dtype)
        wrong.name = f"{probe.name}, {fault.name}"
        yield wrong
