"""A layer, and 64 of them, as one CUDA graph: the same bits as without, and how fast they are."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from export_grok.engines.trt.record import Binding
from export_grok.engines.trt.tensors import CACHES, size_of
from scripts.gpu.bandwidth import Rate
from scripts.gpu.device import KernelDevice
from scripts.gpu.layer import Array, Arrays, LayerCase, random_layer
from scripts.gpu.layer_checks import Build, Found
from scripts.gpu.plan_run import PlanRun

__all__ = ["LAYERS", "capture", "moved_by_layer"]

LAYERS = 64


def capture(
    device: KernelDevice,
    case: LayerCase,
    build: Build,
    random: np.random.Generator,
    read_rate: Rate,
    *,
    samples: int,
) -> Found:
    """Run one layer and then 64, with one set of weights, plain and as a CUDA graph."""
    run = PlanRun(device, build(case))
    inputs = random_layer(case, random)
    run.write(inputs)
    caches = [{name: run.addresses[name] for name in CACHES}]
    found = Found()
    moved = moved_by_layer(run.tensors.values(), inputs, case)
    for layers in (1, LAYERS):
        while len(caches) < layers:
            caches.append(_cache_copy(device, run, caches[0]))
        chain = _Chain(device, run, caches)
        chain.restart(inputs["h"])
        chain.enqueue()
        plain = chain.state()
        replay = device.captured(chain.enqueue)
        chain.restart(inputs["h"])
        replay()
        differ = [
            name
            for name, array in chain.state().items()
            if array.tobytes() != plain[name].tobytes()
        ]
        if differ:
            found.faults.append(
                f"{case.label}: {', '.join(differ)} of {layers} layers differ when replayed"
            )
        times, shares, plain_times = [], [], []
        for _ in range(samples):
            rate = read_rate()
            times.append(_milliseconds(device, replay, layers))
            shares.append(moved / times[-1] / rate)
            plain_times.append(_milliseconds(device, chain.enqueue, layers))
        found.figures[f"{layers}"] = {
            "layer_us": 1e3 * statistics.median(times),
            "plain_layer_us": 1e3 * statistics.median(plain_times),
            "share": statistics.median(shares),
            "bytes": moved,
        }
    return found


def _milliseconds(device: KernelDevice, work: Callable[[], None], layers: int) -> float:
    """Return the time of a layer, taken of 64 whatever their number in one piece of work."""

    def repeated() -> None:
        for _ in range(LAYERS // layers):
            work()

    return device.milliseconds(repeated) / LAYERS


def moved_by_layer(
    tensors: Iterable[Binding], inputs: Mapping[str, Array], case: LayerCase
) -> int:
    """Return the fewest bytes that a decode step of a layer moves.

    Of the experts' matrices as many count as there can be chosen, of caches the slots that are
    seen.
    """
    config, batch = case.config, case.sizes.batch
    chosen = min(config.num_experts, batch * config.num_selected_experts) / config.num_experts
    seen = float((inputs["start"] + 1).sum()) / (batch * case.sizes.slots)
    shares = dict.fromkeys(CACHES, seen)
    return round(
        sum(
            size_of(row)
            * (chosen if row.name.startswith("experts.") else shares.get(row.name, 1.0))
            for row in tensors
            if not row.aliases
        )
    )


class _Chain:
    """So many enqueues of one plan, each with caches of its own and the same weights."""

    def __init__(
        self,
        device: KernelDevice,
        run: PlanRun,
        caches: Sequence[Mapping[str, int]],
    ) -> None:
        self._device, self._run, self._caches = device, run, caches
        self._nbytes = size_of(run.tensors["h"])
        self._source, *streams = (device.allocate(self._nbytes) for _ in range(3))
        self._streams, self._last = streams, streams[len(caches) % 2]
        self._steps = [
            {
                "h": streams[number % 2],
                "h_out": streams[(number + 1) % 2],
                **cache,
                "k_out": cache["k_cache"],
                "v_out": cache["v_cache"],
            }
            for number, cache in enumerate(caches)
        ]

    def restart(self, h: Array) -> None:
        """Set what the residual stream begins as; what it was is gone."""
        for address in self._streams:
            self._device.fill(address, self._nbytes, 0xFF)
        self._device.upload(self._source, h)

    def enqueue(self) -> None:
        """Enqueue all layers; the residual stream begins as it was set."""
        self._device.copy(self._streams[0], self._source, self._nbytes)
        for step in self._steps:
            self._run.enqueue(step)

    def state(self) -> Arrays:
        """Return the residual stream behind the last layer, and that layer's caches."""
        last = self._caches[-1]
        return {
            "h_out": self._run.read("h_out", self._last),
            **{name: self._run.read(name, last[name]) for name in CACHES},
        }


def _cache_copy(device: KernelDevice, run: PlanRun, cache: Mapping[str, int]) -> dict[str, int]:
    copies = {}
    for name, address in cache.items():
        nbytes = size_of(run.tensors[name])
        copies[name] = device.allocate(nbytes)
        device.copy(copies[name], address, nbytes)
    return copies
