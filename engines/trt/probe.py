"""One graph of a bundle of TensorRT plans at a time, on arrays: for comparing.

Tokens go through it as through a session: a single one of every row by the plan of the decode
phase, more of them row by row, in pieces, by that of the prefill phase. A plan shows what it gives
out and nothing in between, so there are no taps. It was tested on a fake device only: no GPU has
run it yet.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.probe import GraphName, Run
from export_grok.engines.trt.chain import Parts, Step, scratch_bytes
from export_grok.engines.trt.device import CudaDevice, Device
from export_grok.engines.trt.engine import PlanRuntime, Runtime
from export_grok.engines.trt.fit import check_engine, check_fit, flavour_of_record, plan_files
from export_grok.engines.trt.pieces import Piece, pieces_of
from export_grok.engines.trt.record import PHASES, Binding, Phase, Sizes, TrtRecord, record_in
from export_grok.engines.trt.tensors import CACHES, ELEMENTS, size_of, state_of
from export_grok.engines.trt.weights import RankWeights
from export_grok.errors import ConfigError, MissingDependencyError
from export_grok.plugins.tensorrt_plugins import register_plugins

__all__ = ["TrtProbe", "open_probe"]

Arrays = dict[str, NDArray[Any]]


def open_probe(bundle: Bundle, *, threads: int | None = None) -> "TrtProbe":
    """Return what runs the graphs; see `engines.backend.open_probe`. Threads are of no use.

    Raises:
        BundleError: the manifest does not say what the plans are.
        ConfigError: they are of ranks, or not for this GPU.
        MissingDependencyError: TensorRT, `cuda.core`, the driver or a GPU is missing.
    """
    record = record_in(bundle.manifest)
    ranks = record.sizes.tensor_parallel
    if ranks > 1:
        raise ConfigError(
            f"the plans in {bundle.folder} are for {ranks} ranks, each a process with a GPU of "
            "its own, and one graph at a time runs in one process; export-grok verify compares "
            "the whole engine with --no-graphs, and the graphs that its plans are built from with "
            "--interpret"
        )
    flavour = flavour_of_record(record)
    try:
        probe = TrtProbe(bundle, record, devices=CudaDevice, runtime=PlanRuntime(flavour))
        if not flavour.any_gpu:  # its plans have our plugins, which may be asked for
            register_plugins(probe.sm)
        return probe
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{error}; what can be verified without one are the graphs that the plans are built "
            f"from: export-grok verify {bundle.folder} --interpret"
        ) from error


class TrtProbe:
    """Runs the graphs of a bundle; see `engines.probe.Probe`.

    Inputs are rounded to the dtype of the plans. They may have fewer rows and shorter caches than
    the plans: what is missing is zeros. What the padding of a row's last piece leaves in its
    cache, behind its tokens, is not shown: no token sees it before it is overwritten.

    Attributes:
        name: what runs, in a few words.
        config: of the model.
        dtype: of activations and cache.
        sm: compute capability of the device, times ten.

    Raises:
        BundleError: a graph has no plan.
        ConfigError: the plans are not for this GPU, or of another version.
    """

    def __init__(
        self,
        bundle: Bundle,
        record: TrtRecord,
        *,
        devices: Callable[[], Device],
        runtime: Runtime,
    ) -> None:
        """Hold the plans to what is here; none is loaded yet.

        Args:
            bundle: with the plans.
            record: of them, for one rank.
            devices: gives the device to run on: another for each graph, with which its memory
                goes.
            runtime: to load plans with.
        """
        device = devices()
        check_fit(
            record,
            bundle.folder,
            ranks=1,
            batch=record.sizes.batch,
            max_length=record.sizes.max_length,
            version=runtime.version,
            device=device,
        )
        self.name = f"{record.module} {record.version} on {device.name}"
        self.config = bundle.config
        self.dtype = bundle.manifest.dtype
        self._bundle = bundle
        self._record = record
        self._devices = devices
        self._runtime = runtime
        self.sm = device.sm
        self._plans = plan_files(record, bundle.folder, device.sm)

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        """Load the plans of a graph and its weights, and yield what runs it.

        Raises:
            BundleError: a plan does not load, or is not of this graph or these weights.
            CheckpointError: a weight file is missing or too short.
            ConfigError: memory does not suffice.
        """
        # Whoever keeps `run` beyond the block keeps an empty list, and no memory of the device.
        loaded = [self._loaded(name)]
        try:
            yield lambda inputs: loaded[0].run(inputs)
        finally:
            loaded.clear()

    def _loaded(self, name: GraphName) -> "_Graph":
        weights = RankWeights.of_bundle(self._bundle, self._record, only=name)
        device = self._devices()
        plans = {phase: self._load(name.kind, phase) for phase in PHASES}
        return _Graph(device, plans, weights, layer=name.layer or 0, sizes=self._record.sizes)

    def _load(self, kind: str, phase: Phase) -> Parts:
        """Return a graph and the engine of its plan: one part, as nothing is summed over ranks."""
        ((graph, plan),) = self._plans[kind, phase]
        engine = self._runtime.engine(plan)
        check_engine(graph, engine, plan)
        return [(graph, engine)]


class _Graph:
    """The plans of one graph, with its weights and a cache for the rows of the decode plan."""

    def __init__(
        self,
        device: Device,
        plans: Mapping[Phase, Parts],
        weights: RankWeights,
        *,
        layer: int,
        sizes: Sizes,
    ) -> None:
        """Load the weights and allocate the rest."""
        self._device = device
        self._sizes = sizes
        weights.load(device)
        scratch = device.allocate(scratch_bytes(*plans.values()))
        ((decode, _),) = plans["decode"]
        self._caches = {
            row.name: _Tensor(device, row) for row in decode.bindings if row.name in CACHES
        }
        self._plans = {}
        for phase, ((graph, engine),) in plans.items():
            tensors = {row.name: _Tensor(device, row) for row in state_of(graph)}
            addresses = {name: row.address for name, row in (tensors | self._caches).items()}
            addresses |= weights.addresses(graph, layer)
            step = Step(engine.context(scratch), graph, addresses)
            self._plans[phase] = _Plan(device, step, tensors)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the outputs; the arrays given are left as they are."""
        rows, tokens = inputs["tokens" if "tokens" in inputs else "h"].shape[:2]
        self._check(rows, inputs)
        for name, cache in self._caches.items():
            cache.write(inputs[name])
        before = {name: cache.read() for name, cache in self._caches.items()}
        others = {name: array for name, array in inputs.items() if name not in CACHES}
        if tokens == 1:
            found = self._plans["decode"].run(others)
            found = {name: array[:rows] for name, array in found.items()}
        else:
            found = self._prefill(others, rows, tokens)
        for name, cache in self._caches.items():
            slots = inputs[name].shape[2]
            after = np.where(self._padding(inputs["start"], tokens), before[name], cache.read())
            found[name.replace("cache", "out")] = after[:rows, :, :slots].copy()
        return found

    def _padding(self, start: NDArray[np.int64], tokens: int) -> NDArray[np.bool_]:
        """Return which slots the padding of each row is written to, [B, 1, T, 1]."""
        sizes = self._sizes
        width = 1 if tokens == 1 else -(-tokens // sizes.chunk) * sizes.chunk
        place = np.arange(sizes.slots) - np.resize(start, sizes.batch)[:, np.newaxis]
        found: NDArray[np.bool_] = (place >= tokens) & (place < width)
        return found[:, np.newaxis, :, np.newaxis]

    def _prefill(self, inputs: Mapping[str, NDArray[Any]], rows: int, tokens: int) -> Arrays:
        """Return what comes out row by row, piece by piece."""
        found: Arrays = {}
        for piece in pieces_of(rows, tokens, chunk=self._sizes.chunk):
            own = {name: _of_piece(name, array, piece) for name, array in inputs.items()}
            single = "last" in inputs  # one token of a row is asked for
            if single and not 0 <= own["last"][0] < piece.width:
                continue
            for name, array in self._plans["prefill"].run(own, piece.row).items():
                shape = (rows, *array.shape[1:]) if single else (rows, tokens, *array.shape[2:])
                whole = found.setdefault(name, np.empty(shape, array.dtype))
                if single:
                    whole[piece.row] = array[0]
                else:
                    whole[piece.row, piece.first : piece.end] = array[0, : piece.width]
        return found

    def _check(self, rows: int, inputs: Mapping[str, NDArray[Any]]) -> None:
        sizes, faults = self._sizes, []
        if rows > sizes.batch:
            faults.append(f"for a batch of {sizes.batch}; {rows} rows are given")
        slots = max((inputs[name].shape[2] for name in self._caches), default=0)
        if slots > sizes.max_length:
            faults.append(
                f"for rows of up to {sizes.max_length} tokens; the caches have {slots} slots"
            )
        if faults:
            what_to_do = "give them less, or build them with a larger --batch or --max-length"
            raise ConfigError(
                "\n  ".join(["the plans do not suit; they are", *faults, what_to_do])
            )


class _Tensor:
    """An input or output in memory of the device, float32 or int64 on this side."""

    def __init__(self, device: Device, binding: Binding) -> None:
        self.address = device.allocate(size_of(binding))
        self.binding = binding
        self._device = device

    def write(self, array: NDArray[Any]) -> None:
        """Write an array, rounded to the nearest, with zeros where it is shorter."""
        whole = np.zeros(self.binding.shape, ELEMENTS[self.binding.dtype])
        whole[tuple(slice(length) for length in array.shape)] = array
        self._device.upload(self.address, whole)

    def read(self) -> NDArray[Any]:
        """Return what is there."""
        array = np.empty(self.binding.shape, ELEMENTS[self.binding.dtype])
        self._device.download(self.address, array)
        return array if self.binding.dtype == "int64" else array.astype(np.float32)


class _Plan:
    """The plan of one phase, with memory for what goes in and out."""

    def __init__(self, device: Device, step: Step, tensors: Mapping[str, _Tensor]) -> None:
        self._device = device
        self._step = step
        self._tensors = tensors

    def run(self, inputs: Mapping[str, NDArray[Any]], row: int = 0) -> Arrays:
        """Return the outputs, as long as those of the plan.

        Args:
            inputs: none longer than those of the plan.
            row: of the cache, if the plan is for one row.
        """
        for name, array in inputs.items():
            self._tensors[name].write(array)
        self._step.enqueue(self._device.stream, row)
        return {
            name: tensor.read()
            for name, tensor in self._tensors.items()
            if tensor.binding.direction == "out"
        }


def _of_piece(name: str, array: NDArray[Any], piece: Piece) -> NDArray[Any]:
    """Return of an input what belongs to a piece; a place in the row becomes one in the piece."""
    own = array[piece.row : piece.row + 1]
    if name == "start":
        return own + piece.first
    if name == "last":
        return own - piece.first
    return own[:, piece.first : piece.end]
