"""Build the plan of a lowered graph: what TensorRT runs, for one GPU architecture.

The build runs in a thread of its own. This one shows how far it is, and takes the user's Ctrl-C,
which must not be raised within TensorRT.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from export_grok.engines.trt.api import (
    Builder,
    BuilderConfig,
    HostMemory,
    Logger,
    Network,
    Parser,
    TensorRT,
)
from export_grok.engines.trt.callbacks import Progress, messages_of
from export_grok.engines.trt.contract import static_shapes
from export_grok.engines.trt.module import Flavour
from export_grok.errors import BuildError
from export_grok.files import atomic_file, output_errors
from export_grok.progress import progress_bar

__all__ = ["Plan", "plan_from_graph"]

logger = logging.getLogger(__name__)

PERCENT = 100
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a build came to: the plan's length, and how long it took."""

    bytes: int
    seconds: float


def plan_from_graph(
    graph: Path,
    out: Path,
    *,
    flavour: Flavour,
    sm: int,
    workspace_bytes: int | None = None,
    timing_cache: Path | None = None,
    tf32: bool = False,
) -> Plan:
    """Build the plan of a graph and write it, whole or not at all.

    What plugins the graph names must have been registered.

    Args:
        graph: ONNX file with fixed shapes.
        out: file of the plan.
        flavour: which package builds.
        sm: compute capability of the GPU, without the point.
        workspace_bytes: most that one layer of the plan may take for itself while it runs; None
            leaves it to TensorRT.
        timing_cache: file that keeps how fast kernels were, where the package times any. It is
            begun anew if it is missing, damaged, or of another version or GPU.
        tf32: let products of float32 round their operands to 10 bits of mantissa.

    Raises:
        BuildError: the graph cannot be read, a shape is not fixed, or TensorRT refuses it; all
            reasons are named.
        ConfigError: `sm` cannot be built for.
        MissingDependencyError: the package is not installed.
        OutputError: `out` or `timing_cache` cannot be written.
    """
    flavour.check_architectures((sm,))
    trt = flavour.load()
    messages = messages_of(trt)
    title = f"{flavour.package} {trt.__version__} cannot build {graph} for SM{sm}:"
    model = _read(graph)
    timings = timing_cache if flavour.keeps_timings else None

    def build(progress: Progress) -> HostMemory:
        messages.errors.clear()
        builder = trt.Builder(messages.logger)
        network, parser = _network_and_parser(trt, builder, messages.logger)
        if not parser.parse(model, str(graph)):
            raise BuildError("\n  ".join([title, *_parser_errors(parser)]))
        config = builder.create_builder_config()
        config.progress_monitor = progress.monitor(trt)
        _configure(trt, config, workspace_bytes=workspace_bytes, tf32=tf32)
        if flavour.any_gpu:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
        if timings is not None:
            _take_timings(config, timings)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError("\n  ".join([title, *_reasons(messages.errors)]))
        if timings is not None:
            _keep_timings(config, timings)
        return plan

    started = time.perf_counter()
    plan = _in_background(build, out.name)
    for error in messages.errors:
        logger.warning("%s built %s and says: %s", flavour.package, graph, error)
    with atomic_file(out) as file:
        file.write(plan)
    return Plan(bytes=plan.nbytes, seconds=time.perf_counter() - started)


def _in_background(build: Callable[[Progress], HostMemory], label: str) -> HostMemory:
    """Return what `build` does, in a thread of its own, while its progress is shown here.

    Whatever is raised here, such as KeyboardInterrupt, cancels the build before it goes on.
    """
    progress = Progress()
    with (
        ThreadPoolExecutor(max_workers=1) as pool,
        progress_bar(label, PERCENT, unit="%") as advance,
    ):
        try:
            shown = 0
            building = pool.submit(build, progress)
            while not building.done():
                wait([building], timeout=SECONDS_BETWEEN_LOOKS)
                reached = int(PERCENT * progress.fraction)
                advance(reached - shown)
                shown = reached
        except BaseException:
            progress.cancelled = True
            raise
    return building.result()


def _read(graph: Path) -> bytes:
    try:
        faults = static_shapes(ir.load(graph))
        content = graph.read_bytes()
    except Exception as error:  # a damaged file raises what its bytes lead protobuf to
        raise BuildError(f"{graph} cannot be read as ONNX: {error}") from error
    if shapes := list(faults):
        raise BuildError("\n  ".join([f"plans are built of fixed shapes, {graph} has:", *shapes]))
    return content


def _network_and_parser(trt: TensorRT, builder: Builder, log: Logger) -> tuple[Network, Parser]:
    known = trt.NetworkDefinitionCreationFlag
    # Of a plugin with a kernel compiled ahead of time and Python too, the kernel. RTX has neither.
    wanted = ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS")
    flags = [int(getattr(known, name)) for name in wanted if name in known.__members__]
    network = builder.create_network(sum(1 << flag for flag in flags))
    return network, trt.OnnxParser(network, log)


def _parser_errors(parser: Parser) -> Iterator[str]:
    for error in map(parser.get_error, range(parser.num_errors)):
        name = f" {error.node_name()!r}" if error.node_name() else ""
        stack = error.local_function_stack() if error.local_function_stack_size() else []
        where = f"node {error.node()} {error.node_operator()}{name}"
        where += "".join(f", in {function}" for function in stack)
        text = "; ".join(_reasons(error.desc().splitlines()))
        yield f"{where}: {text} ({error.code().name})"


def _reasons(lines: Sequence[str]) -> list[str]:
    """Return the lines less what RTX says besides of any fault where there is no driver."""
    found = [line.strip() for line in lines]
    return [line for line in found if "catchCudaError" not in line] or found


def _configure(
    trt: TensorRT, config: BuilderConfig, *, workspace_bytes: int | None, tf32: bool
) -> None:
    """Set what is the same for every GPU. The level of optimisation stays TensorRT's own, 3."""
    # The nodes of a layer are a chain: a second stream has nothing to do.
    config.max_aux_streams = 0
    # Formats and kernels of all layers can be asked of the plan.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if "REQUIRE_USER_ALLOCATION" in trt.BuilderFlag.__members__:  # RTX alone
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # or it cannot be captured
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)


def _take_timings(config: BuilderConfig, file: Path) -> None:
    with output_errors(file):
        found = file.read_bytes() if file.exists() else b""
    for kept in (found, b""):
        cache = config.create_timing_cache(kept)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return


def _keep_timings(config: BuilderConfig, file: Path) -> None:
    cache = config.get_timing_cache()
    if cache is not None:
        with atomic_file(file) as out:
            out.write(cache.serialize())
