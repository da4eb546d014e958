"""A plan, deserialised: the few calls of TensorRT that a session makes.

`Runtime`, `Engine` and `Context` are what sessions rely on. `PlanRuntime` gives them by `tensorrt`
or `tensorrt_rtx`, and tests by fakes: deserialising needs a GPU, and none has done it yet.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, cast

from export_grok.engines.trt.api import Enumeration, Logger, Member, TensorRT
from export_grok.engines.trt.callbacks import messages_of
from export_grok.engines.trt.module import Flavour
from export_grok.engines.trt.record import Binding
from export_grok.errors import BundleError
from export_grok.optional import require

__all__ = ["Context", "Engine", "PlanRuntime", "Runtime"]

# Names of `tensorrt.DataType` -> ours.
_DTYPES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT64": "int64",
}


class Context(Protocol):
    """An execution context: it holds the addresses of the next enqueue."""

    def bind(self, name: str, address: int) -> None:
        """Say where an input or output lies from the next enqueue on."""

    def set_communicator(self, capsule: object) -> None:
        """Have its sums run over all ranks; returns once every rank has called it.

        Args:
            capsule: of an `ncclComm_t`, see `communicator.capsule_of`.
        """

    def enqueue(self, stream: int) -> None:
        """Enqueue everything the plan does. The addresses may be changed right after."""


class Engine(Protocol):
    """A deserialised plan.

    Attributes:
        tensors: all inputs and outputs, as the plan knows them: of no source and no cut.
        scratch: bytes of device memory that an enqueue works in.
    """

    tensors: tuple[Binding, ...]
    scratch: int

    def context(self, scratch: int) -> Context:
        """Return a context that works in the memory at an address, `self.scratch` bytes.

        On one stream the memory may serve several contexts, which run one after the other.
        """


class Runtime(Protocol):
    """What deserialises plans.

    Attributes:
        version: of the package.
    """

    version: str

    def engine(self, plan: Path) -> Engine:
        """Return the engine of a plan's file.

        Raises:
            BundleError: it does not load.
        """


class _TrtContext(Protocol):
    def set_device_memory(self, memory: int, size: int) -> None: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def set_communicator(self, communicator: object) -> bool: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...


class _TrtEngine(Protocol):
    @property
    def num_io_tensors(self) -> int: ...
    @property
    def device_memory_size_v2(self) -> int: ...
    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_shape(self, name: str) -> Any: ...
    def get_tensor_dtype(self, name: str) -> Member: ...
    def get_tensor_mode(self, name: str) -> Member: ...
    def get_aliased_input_tensor(self, name: str) -> str | None: ...
    def create_execution_context(self, strategy: Member) -> _TrtContext | None: ...


class _TrtRuntime(Protocol):
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> _TrtEngine | None: ...


class _Trt(TensorRT, Protocol):
    Runtime: Callable[[Logger], _TrtRuntime]
    ExecutionContextAllocationStrategy: Enumeration


class PlanRuntime:
    """A `Runtime` by one of the two packages.

    Raises:
        MissingDependencyError: the package is not installed.
    """

    def __init__(self, flavour: Flavour) -> None:
        self._trt = cast(_Trt, require(flavour.package, extra=flavour.extra))
        self._name = flavour.package
        self._runtime: _TrtRuntime | None = None
        self.version = self._trt.__version__

    def engine(self, plan: Path) -> "PlanEngine":
        """Return the engine of a plan's file."""
        messages = messages_of(self._trt)
        messages.errors.clear()
        self._runtime = self._runtime or self._trt.Runtime(messages.logger)
        try:
            found = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        except OSError as error:
            raise BundleError(f"{plan} cannot be read: {error.strerror}") from error
        if found is None:
            said = "; ".join(messages.errors) or "it does not say why"
            raise BundleError(f"{plan} does not load in {self._name} {self.version}: {said}")
        return PlanEngine(self._trt, found, plan)


class PlanEngine:
    """An `Engine` of TensorRT's own."""

    def __init__(self, trt: _Trt, engine: _TrtEngine, plan: Path) -> None:
        self._trt = trt
        self._engine = engine
        self._plan = plan
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors = tuple(self._tensor(name) for name in names)
        self.scratch = engine.device_memory_size_v2

    def context(self, scratch: int) -> "PlanContext":
        """Return a context that works in the memory at an address, `self.scratch` bytes."""
        messages = messages_of(self._trt)
        messages.errors.clear()
        # Memory that is ours counts before it is taken, and is nobody's to move.
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise BundleError(
                f"{self._plan} gives no execution context: {'; '.join(messages.errors)}"
            )
        context.set_device_memory(scratch, self.scratch)
        return PlanContext(self._trt, context, self._plan)

    def _tensor(self, name: str) -> Binding:
        engine = self._engine
        dtype = engine.get_tensor_dtype(name).name
        output = engine.get_tensor_mode(name).name == "OUTPUT"
        return Binding(
            name=name,
            direction="out" if output else "in",
            shape=tuple(engine.get_tensor_shape(name)),
            dtype=_DTYPES.get(dtype, dtype),
            aliases=(engine.get_aliased_input_tensor(name) or None) if output else None,
        )


class PlanContext:
    """A `Context` of TensorRT's own."""

    def __init__(self, trt: _Trt, context: _TrtContext, plan: Path) -> None:
        self._trt = trt
        self._context = context
        self._plan = plan

    def bind(self, name: str, address: int) -> None:
        """Say where an input or output lies from the next enqueue on."""
        if not self._context.set_tensor_address(name, address):
            self._fail(f"address {address:#x} for {name}")

    def set_communicator(self, capsule: object) -> None:
        """Have its sums run over all ranks; returns once every rank has called it."""
        if not self._context.set_communicator(capsule):
            self._fail("the communicator of all ranks")

    def enqueue(self, stream: int) -> None:
        """Enqueue everything the plan does."""
        if not self._context.execute_async_v3(stream):
            self._fail("to be enqueued")

    def _fail(self, what: str) -> None:
        said = "; ".join(messages_of(self._trt).errors)
        raise RuntimeError(f"{self._plan} refused {what}: {said}")
