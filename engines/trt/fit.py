"""Whether plans are for what is asked of them, and for the machine: told before any is loaded."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from export_grok.engines.trt.device import Device
from export_grok.engines.trt.engine import Engine
from export_grok.engines.trt.module import FLAVOURS, Flavour
from export_grok.engines.trt.record import Binding, GraphRecord, PlanRecord, Sizes, TrtRecord
from export_grok.errors import BundleError, ConfigError

__all__ = ["check_engine", "check_fit", "check_room", "flavour_of_record", "plan_files"]

GB = 1e9


def flavour_of_record(record: TrtRecord) -> Flavour:
    """Return the package that the plans run in.

    Raises:
        BundleError: there is no such package.
    """
    for flavour in FLAVOURS:
        if flavour.package == record.module:
            return flavour
    packages = " or ".join(flavour.package for flavour in FLAVOURS)
    raise BundleError(f"the plans are of {record.module!r}; {packages} can be run")


def check_fit(
    record: TrtRecord,
    folder: Path,
    *,
    ranks: int,
    batch: int,
    max_length: int,
    version: str,
    device: Device,
) -> None:
    """Hold the plans to what is asked and what is here.

    Args:
        record: of the plans.
        folder: of the bundle.
        ranks: that there are.
        batch: rows asked for.
        max_length: of the longest row asked for.
        version: of the package that is installed.
        device: to run on.

    Raises:
        ConfigError: something differs; all of it is named, and the command that puts it right.
    """
    sizes, sms = record.sizes, sorted({plan.sm for plan in record.plans})
    wanted = dataclasses.replace(
        sizes, tensor_parallel=ranks, batch=batch, max_length=max(max_length, sizes.max_length)
    )
    faults = []
    if sizes.tensor_parallel != ranks:
        fault = (
            f"for --tp {sizes.tensor_parallel}: needs {sizes.tensor_parallel} ranks, sees {ranks}"
        )
        if ranks == 1:
            fault += f"; export-grok generate {folder} starts them all"
        faults.append(fault)
    if sizes.batch != batch:
        faults.append(f"for a batch of {sizes.batch}; {batch} rows are asked for")
    if sizes.max_length < max_length:
        faults.append(f"for rows of up to {sizes.max_length} tokens; {max_length} are asked for")
    if record.version != version:
        faults.append(f"of {record.module} {record.version}; installed is {version}")
    if device.sm not in sms:
        built = ", ".join(f"SM{sm}" for sm in sms)
        faults.append(f"for {built}; {device.name} is SM{device.sm}")
    if faults:
        raise ConfigError(
            "\n  ".join(
                [
                    f"the plans in {folder} do not suit; they are",
                    *faults,
                    "build them again: " + _command(record, folder, wanted, device.sm),
                ]
            )
        )


def check_room(device: Device, **needed: int) -> None:
    """Hold bytes that are about to be allocated, by what they are for, to what is free.

    Raises:
        ConfigError: it is too much.
    """
    memory, total = device.memory(), sum(needed.values())
    if total > memory.free:
        parts = ", ".join(f"{what} {nbytes / GB:.3g}" for what, nbytes in needed.items())
        raise ConfigError(
            f"{total / GB:.3g} GB of device memory are needed ({parts}); of {device.name}'s "
            f"{memory.total / GB:.3g} GB {memory.free / GB:.3g} are free: end what else runs "
            "there, or build the engine with a smaller --batch or --max-length"
        )


def plan_files(
    record: TrtRecord, folder: Path, sm: int
) -> Mapping[tuple[str, str], tuple[tuple[GraphRecord, Path], ...]]:
    """Return graph and plan for an architecture, by kind and phase: of every part, in order.

    Raises:
        BundleError: a graph has no plan.
    """
    plans: dict[tuple[str, str, int], PlanRecord] = {
        (plan.kind, plan.phase, plan.part): plan for plan in record.plans if plan.sm == sm
    }
    missing = [
        f"{graph.kind} ({graph.phase})" + (f", part {graph.part}" if graph.part else "")
        for graph in record.graphs
        if (graph.kind, graph.phase, graph.part) not in plans
    ]
    if missing:
        raise BundleError(
            f"{folder} has no plan for SM{sm} of {', '.join(missing)}: build the engine again"
        )
    found: dict[tuple[str, str], tuple[tuple[GraphRecord, Path], ...]] = {}
    for graph in sorted(record.graphs, key=lambda graph: graph.part):
        plan = folder / plans[graph.kind, graph.phase, graph.part].file
        parts = found.get((graph.kind, graph.phase), ())
        found[graph.kind, graph.phase] = (*parts, (graph, plan))
    return found


def check_engine(graph: GraphRecord, engine: Engine, plan: Path) -> None:
    """Hold what a plan says of its inputs and outputs to the record.

    Raises:
        BundleError: they differ; all differences are named.
    """
    wanted = {
        binding.name: dataclasses.replace(binding, weight=None, cut=None)
        for binding in graph.bindings
    }
    found = {binding.name: binding for binding in engine.tensors}
    faults = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    faults += [f"{name} is not known" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        if wanted[name] != found[name]:
            faults.append(f"{name} is {_told(found[name])}, must be {_told(wanted[name])}")
    if faults:
        raise BundleError(
            "\n  ".join(
                [
                    f"{plan} is not the plan of {graph.file}, build the engine again:",
                    *sorted(faults),
                ]
            )
        )


def _command(record: TrtRecord, folder: Path, sizes: Sizes, sm: int) -> str:
    return (
        f"export-grok build-engine {folder} --backend {flavour_of_record(record).backend} "
        f"--sm {sm} --tp {sizes.tensor_parallel} --batch {sizes.batch} --chunk {sizes.chunk} "
        f"--max-length {sizes.max_length}"
        + (f" --sums {record.sums}" if record.sums != "plan" and sizes.tensor_parallel > 1 else "")
    )


def _told(binding: Binding) -> str:
    alias = f" at the address of {binding.aliases}" if binding.aliases else ""
    return f"{binding.direction}put {binding.dtype} {list(binding.shape)}{alias}"
