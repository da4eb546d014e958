"""The part of TensorRT's Python API that plans are built with, for mypy to hold us to.

Neither `tensorrt` nor `tensorrt_rtx` publishes types. Both have these names (source: the bindings
of tensorrt 11.4 and of tensorrt_rtx 1.7.1; the tests hold the latter's classes to this file). What
only one of them has says so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

__all__ = [
    "Builder",
    "BuilderConfig",
    "Enumeration",
    "HostMemory",
    "Logger",
    "Member",
    "Network",
    "Parser",
    "ParserError",
    "ProgressMonitor",
    "TensorRT",
    "TimingCache",
]


class Member(Protocol):
    """A member of one of TensorRT's enumerations."""

    @property
    def name(self) -> str: ...
    def __int__(self) -> int: ...


class Enumeration(Protocol):
    """One of TensorRT's enumerations."""

    @property
    def __members__(self) -> Mapping[str, Member]: ...
    def __getattr__(self, name: str) -> Member: ...


class Logger(Protocol):
    """`ILogger`: TensorRT calls it, from any thread."""

    def log(self, severity: Member, text: str) -> None: ...


class ProgressMonitor(Protocol):
    """`IProgressMonitor`: TensorRT calls it, from any thread."""

    def phase_start(self, name: str, parent: str | None, steps: int) -> None: ...
    def step_complete(self, name: str, step: int) -> bool: ...
    def phase_finish(self, name: str) -> None: ...


class HostMemory(Protocol):
    """`IHostMemory`: bytes that TensorRT owns."""

    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...


class TimingCache(Protocol):
    """`ITimingCache`."""

    def serialize(self) -> HostMemory: ...


class Network(Protocol):
    """`INetworkDefinition`."""

    @property
    def num_outputs(self) -> int: ...


class BuilderConfig(Protocol):
    """`IBuilderConfig`. Compute capabilities are RTX's alone."""

    max_aux_streams: int
    profiling_verbosity: Member
    progress_monitor: ProgressMonitor
    num_compute_capabilities: int

    def set_compute_capability(self, capability: Member, index: int) -> bool: ...
    def set_flag(self, flag: Member) -> None: ...
    def clear_flag(self, flag: Member) -> None: ...
    def set_memory_pool_limit(self, pool: Member, limit: int) -> None: ...
    def create_timing_cache(self, serialised: bytes) -> TimingCache | None: ...
    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool: ...
    def get_timing_cache(self) -> TimingCache | None: ...


class Builder(Protocol):
    """`Builder`."""

    def create_network(self, flags: int) -> Network: ...
    def create_builder_config(self) -> BuilderConfig: ...
    def build_serialized_network(
        self, network: Network, config: BuilderConfig
    ) -> HostMemory | None: ...


class ParserError(Protocol):
    """`ParserError`."""

    def code(self) -> Member: ...
    def desc(self) -> str: ...
    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...
    def local_function_stack(self) -> list[str]: ...
    def local_function_stack_size(self) -> int: ...


class Parser(Protocol):
    """`OnnxParser`."""

    @property
    def num_errors(self) -> int: ...
    def parse(self, model: bytes, path: str) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...
    def supports_operator(self, op_name: str) -> bool: ...


class TensorRT(Protocol):
    """The module: `tensorrt` or `tensorrt_rtx`."""

    __version__: str
    ILogger: Any
    IProgressMonitor: Any
    Builder: Callable[[Logger], Builder]
    OnnxParser: Callable[[Network, Logger], Parser]
    BuilderFlag: Enumeration
    MemoryPoolType: Enumeration
    NetworkDefinitionCreationFlag: Enumeration
    ProfilingVerbosity: Enumeration
    ComputeCapability: Enumeration  # tensorrt_rtx alone

    def __hash__(self) -> int: ...
