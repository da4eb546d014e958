"""Mistakes in which layer has which weights."""

from collections.abc import Callable

from export_grok.runtime.verify.faults.fault import Fault
from export_grok.runtime.verify.faults.mistake import Mistake

__all__ = ["FAULTS"]


def _numeric(layer: int, layers: int) -> int:
    """Return which layer stands at the place `layer` where names are sorted as text."""
    return sorted(range(layers), key=str)[layer]


def _next(layer: int, layers: int) -> int:
    return (layer + 1) % layers


def _renumbered(weights_of: Callable[[int, int], int]) -> Callable[[Mistake], None]:
    def mistake(made: Mistake) -> None:
        layers = made.config.num_layers
        place = {weights_of(layer, layers): layer for layer in range(layers)}

        def renumbered(name: str) -> str:
            head, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            return f"layers.{place[int(number)]}.{rest}" if head == "layers" else name

        made.rename(renumbered)

    return mistake


def _other_layer(
    name: str, title: str, weights_of: Callable[[int, int], int], fewest: int
) -> Fault:
    return Fault(
        name=name,
        title=title,
        graph="layer",
        shows="k_out",
        mistake=_renumbered(weights_of),
        plant=None,
        weights_of=weights_of,
        harmless=lambda config: (
            f"it has {config.num_layers} layers, and this takes {fewest} or more"
            if config.num_layers < fewest
            else None
        ),
    )


FAULTS = (
    _other_layer(
        "layers_in_numeric_order",
        "files are taken in the order of layer numbers, and they are stored in that of their text",
        _numeric,
        fewest=11,
    ),
    _other_layer(
        "swapped_layers",
        "a layer computes with the weights of the next one, the last with those of the first",
        _next,
        fewest=2,
    ),
)
