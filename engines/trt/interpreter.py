"""Run a bundle of TensorRT plans without TensorRT: ONNX Runtime interprets the graphs behind them.

The graphs are lowered once more in float32, plugin nodes run by their function bodies, and weights
are inputs, cut for ranks as plans take them. All that lies around a plan is what runs on a GPU:
pieces and their padding, addresses, caches that are written in place, weights as they are loaded.
No plan is loaded: what TensorRT and the kernels of plugins make of the graphs is not seen, nor
what is rounded in a narrower dtype.
"""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.assembly import Assembly, RankedPart
from export_grok.engines.ort.graphs import load_graph, session_options
from export_grok.engines.probe import TAPS, Run
from export_grok.engines.taps import PREFIX
from export_grok.engines.trt.host import HostDevice
from export_grok.engines.trt.probe import TrtProbe
from export_grok.engines.trt.record import Binding, GraphRecord, PlanRecord, TrtRecord, record_in
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.engines.trt.twin import DTYPE, Twin, check_graphs, twins_of
from export_grok.export.graphs import content_of
from export_grok.export.partition import part_of
from export_grok.plugins.kernels import Kernels

__all__ = ["open_interpreter"]

BODIES = Kernels(reason="plugin nodes are interpreted")

Arrays = dict[str, NDArray[Any]]


def open_interpreter(bundle: Bundle, *, threads: int | None = None) -> TrtProbe:
    """Return what interprets the graphs; see `engines.backend.open_interpreter`.

    Raises:
        BundleError: the manifest does not say what the plans are, or the graphs were made by
            another version of the program.
        MissingDependencyError: torch is not installed.
    """
    record = record_in(bundle.manifest)
    check_graphs(bundle, record)
    twins = twins_of(bundle, record)
    interpreter = Interpreter(bundle, twins, ranks=record.sizes.tensor_parallel, threads=threads)
    probe = TrtProbe(
        dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, dtype=DTYPE)),
        _record_of(twins, record, interpreter.version),
        devices=interpreter.device,
        runtime=interpreter,
    )
    ranks = f"of {interpreter.ranks} ranks, " if interpreter.ranks > 1 else ""
    probe.name = (
        f"graphs of {bundle.manifest.backend} plans, {ranks}interpreted in {DTYPE} by ONNX "
        f"Runtime {interpreter.version}"
    )
    return probe


def _record_of(twins: Sequence[Twin], record: TrtRecord, version: str) -> TrtRecord:
    """Return the record of a bundle with twins for graphs: of one rank, the whole model."""
    graphs, plans = [], []
    for twin in twins:
        name = _name(twin)
        graphs.append(
            GraphRecord(
                kind=twin.kind, phase=twin.phase, file=name, bindings=twin.bindings, nodes={}
            )
        )
        plans.append(PlanRecord(kind=twin.kind, phase=twin.phase, sm=HostDevice.sm, file=name))
    return dataclasses.replace(
        record,
        module="onnxruntime",
        version=version,
        sizes=dataclasses.replace(record.sizes, tensor_parallel=1),
        graphs=tuple(graphs),
        plans=tuple(plans),
    )


def _name(twin: Twin) -> str:
    return f"{twin.kind}.{twin.phase}"


class Interpreter:
    """A `engines.trt.engine.Runtime` whose plans are twins; each is loaded at its first use.

    Attributes:
        version: of ONNX Runtime.
        ranks: that share the model; all of them run here.
        entries: of the vocabulary that each rank has.
    """

    def __init__(
        self, bundle: Bundle, twins: Sequence[Twin], *, ranks: int, threads: int | None
    ) -> None:
        """Take the graphs.

        Args:
            bundle: that they are of.
            twins: all of them.
            ranks: that they are for.
            threads: to compute with; as many as there are cores by default.
        """
        self.version: str = ort.__version__
        self.ranks = ranks
        self.entries = bundle.config.for_rank(ranks).vocab_size
        self._twins = {_name(twin): twin for twin in twins}
        self._options = session_options(bundle.weights_root, threads, BODIES)
        self._sessions: dict[str, list[ort.InferenceSession]] = {}
        self._device: weakref.ref[HostDevice] | None = None

    def device(self) -> HostDevice:
        """Return a new device; engines that are asked for from then on run on it."""
        device = HostDevice()
        self._device = weakref.ref(device)  # its memory goes with the graph that it is for
        return device

    def engine(self, plan: Path) -> "InterpretedEngine":
        """Return the engine of a twin, given its name in place of a plan's."""
        device = None if self._device is None else self._device()
        assert device is not None
        twin = self._twins[plan.name]
        if plan.name not in self._sessions:
            self._sessions[plan.name] = [
                load_graph(plan, self._options, content=content_of(part)) for part in twin.parts
            ]
        return InterpretedEngine(self, device, twin, self._sessions[plan.name])


class InterpretedEngine:
    """A `engines.trt.engine.Engine` of a twin."""

    scratch = 0

    def __init__(
        self,
        interpreter: Interpreter,
        device: HostDevice,
        twin: Twin,
        sessions: Sequence[ort.InferenceSession],
    ) -> None:
        self.interpreter = interpreter
        self.device = device
        self.twin = twin
        self.sessions = sessions
        self.tensors = tuple(
            dataclasses.replace(row, weight=None, cut=None) for row in twin.bindings
        )

    def context(self, scratch: int) -> "InterpretedContext":
        """Return a context; it works in memory of ONNX Runtime."""
        return InterpretedContext(self)


class InterpretedContext:
    """A `engines.trt.engine.Context`: when it is enqueued, all ranks run."""

    def __init__(self, engine: InterpretedEngine) -> None:
        self._engine = engine
        self._ranks = engine.interpreter.ranks
        self._rows = {row.name: row for row in engine.twin.bindings}
        self._addresses: dict[str, int] = {}
        self._weights: dict[tuple[str, int, int], ort.OrtValue] = {}

    def bind(self, name: str, address: int) -> None:
        """Say where an input or output lies from the next enqueue on."""
        self._addresses[name] = address

    def set_communicator(self, capsule: object) -> None:
        """Refuse: sums are taken here."""
        raise AssertionError("plans that are interpreted sum by themselves")

    def enqueue(self, stream: int) -> None:
        """Run, and write what comes out where it is bound: a cache over what was read."""
        outputs = [name for name, row in self._rows.items() if row.direction == "out"]
        # It holds this context: kept in it, memory would stay till garbage is collected.
        assembly = Assembly(
            parts=[self._part(session) for session in self._engine.sessions],
            outputs=[name for name in outputs if name not in TAPS],
            entries=self._engine.interpreter.entries,
        )
        inputs = {
            name: self._array(row)
            for name, row in self._rows.items()
            if row.direction == "in" and row.weight is None
        }
        for name, array in assembly(inputs).items():
            self._array(self._rows[name])[...] = array

    def _array(self, row: Binding) -> NDArray[Any]:
        return self._engine.device.array(self._addresses[row.name], row)

    def _part(self, session: ort.InferenceSession) -> RankedPart:
        inputs = [value.name for value in session.get_inputs()]
        outputs = [value.name for value in session.get_outputs()]
        names = [name.removeprefix(PREFIX) for name in outputs]
        weights = [name for name in inputs if name in self._engine.twin.cuts]

        def on(rank: int) -> Run:
            def run(values: Mapping[str, NDArray[Any]]) -> Arrays:
                feeds = {name: _value(array) for name, array in values.items()}
                feeds |= {name: self._weight(name, rank) for name in weights}
                found = session.run_with_ort_values(outputs, feeds)
                return {name: value.numpy() for name, value in zip(names, found, strict=True)}

            return run

        return RankedPart(
            runs=[on(rank) for rank in range(self._ranks)],
            inputs=[name for name in inputs if name not in weights],
        )

    def _weight(self, name: str, rank: int) -> ort.OrtValue:
        """Return a rank's part of a weight, cut once."""
        key = (name, self._addresses[name], rank)
        if key not in self._weights:
            whole = self._array(self._rows[name])
            part = part_of(whole, self._engine.twin.cuts[name], rank, self._ranks)
            self._weights[key] = _value(part)
        return self._weights[key]


def _value(array: NDArray[Any]) -> ort.OrtValue:
    """Return an array for ONNX Runtime, in the same memory if it has no gaps."""
    array = np.ascontiguousarray(array)
    if array.dtype != ELEMENTS["bfloat16"]:
        return ort.OrtValue.ortvalue_from_numpy(array)
    # What numpy calls bfloat16 ONNX Runtime does not know; it takes the bits.
    bits = array.view(np.int16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(ir.DataType.BFLOAT16))
