"""Make a wrong copy of an engine, to see whether a check finds out."""

import dataclasses
import os
import shutil
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from export_grok.artifacts import (
    WEIGHT_INDEX,
    Bundle,
    graph_file,
    open_bundle,
    rank_folder,
    record_of,
    write_manifest,
)
from export_grok.config import GrokConfig
from export_grok.engines.ort.lower import lower_graph
from export_grok.errors import ConfigError
from export_grok.export.graphs import write_graph
from export_grok.files import check_new, new_folder, output_errors
from export_grok.manifest import FileRecord, Manifest, WeightsPlace
from export_grok.needs import Disk, Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.runtime.verify.faults.fault import Fault
from export_grok.weights import WeightIndex

__all__ = ["PLANTED", "plant_fault", "why_not"]

# Where the manifest of a wrong copy says so, among what it says of its engine.
PLANTED = "planted_fault"

# The program with the packages that edit graphs; and bytes a second of files that are copied.
MEMORY = 250_000_000
COPY_RATE = 400e6


def why_not(fault: Fault, bundle: Bundle, *, layer: int | None = None) -> str | None:
    """Return why the fault cannot be planted in the bundle, in a sentence; None if it can.

    Args:
        fault: to plant.
        bundle: with an engine.
        layer: to plant it in; the fault's own choice by default, which is mostly the middle.
    """
    manifest, config = bundle.manifest, bundle.config
    ranks = manifest.engine.get("tensor_parallel", 1)
    if manifest.backend != "ort":
        return f"it holds a {manifest.backend} engine, and faults are planted in ort engines"
    if PLANTED in manifest.engine:
        return f"it is wrong already: {manifest.engine[PLANTED]['name']} was planted in it"
    if fault.of_ranks is not None and ranks == 1:
        return "it is an engine of one rank, and only ranks can make this mistake"
    if fault.of_ranks is None and ranks > 1:
        return f"it is an engine of {ranks} ranks; those make mistakes of their own only"
    harmless = fault.harmless(config)
    if harmless is not None:
        return f"it is no mistake for this model: {harmless}"
    place = _layer(fault, config, layer)
    if place is not None and fault.weights_of is not None:
        source = fault.weights_of(place, config.num_layers)
        if source == place:
            return f"layer {place} has its own weights then too; choose another --layer"
    return None


def plant_fault(
    bundle: Bundle,
    fault: Fault,
    out: Path,
    *,
    layer: int | None = None,
    on_needs: OnNeeds = lambda needs: None,
) -> Bundle:
    """Write a wrong copy of an engine of ONNX Runtime and return it.

    The copy opens as whole. Its manifest says which fault it has, under `PLANTED`, and that its
    graphs are of no version of this program, so that no later build takes them for right ones;
    what it says of lowering is what was true of the right engine. Weights stay where they are,
    but those of ranks and of an int8 head, which are copied with the graphs.

    Args:
        bundle: with the right engine.
        fault: to plant.
        out: folder of the copy, new or empty.
        layer: to plant it in, if it is a layer's fault; mostly the middle one by default.
        on_needs: gets what that needs, before anything is written.

    Raises:
        ConfigError: the fault is none here, or there is no such layer.
        OutputError: `out` holds something, or cannot be written.
    """
    place = _layer(fault, bundle.config, layer)
    reason = why_not(fault, bundle, layer=layer)
    if reason is not None:
        raise ConfigError(f"{fault.name} cannot be planted in {bundle.folder}: {reason}")
    check_new(out)
    on_needs(_needs(bundle, out))
    with new_folder(out):
        _copy(bundle, out)
        if fault.of_ranks is not None:
            edited = _edit_rank(bundle, fault, out, place)
        else:
            edited = _edit_graphs(bundle, fault, out, place)
        with output_errors(out):
            records = {name: record_of(out / name) for name in edited}
        write_manifest(out, _manifest(bundle, fault, out, place, records))
    return open_bundle(out, kind="engine")


def _layer(fault: Fault, config: GrokConfig, layer: int | None) -> int | None:
    """Return the layer to plant a fault in; None if it is no layer's.

    Raises:
        ConfigError: there is no such layer, or one is given for a fault of another graph.
    """
    if fault.graph != "layer":
        if layer is not None:
            raise ConfigError(
                f"layer is {layer}, and {fault.name} is a fault of the {fault.graph}; leave "
                "--layer away"
            )
        return None
    if layer is None:
        return config.num_layers // 2
    if not 0 <= layer < config.num_layers:
        raise ConfigError(f"layer is {layer}; this model has layers 0 to {config.num_layers - 1}")
    return layer


def _needs(bundle: Bundle, out: Path) -> Needs:
    total = sum(record.bytes for record in bundle.manifest.files.values())
    return Needs(
        disk=(Disk(folder=out, nbytes=total),), memory=MEMORY, seconds=1 + total / COPY_RATE
    )


def _copy(bundle: Bundle, out: Path) -> None:
    files = bundle.manifest.files
    total = sum(record.bytes for record in files.values())
    with progress_bar("copying", total, unit="bytes") as advance, output_errors(out):
        for name, record in files.items():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(bundle.folder / name, out / name)
            advance(record.bytes)


def _edit_graphs(bundle: Bundle, fault: Fault, out: Path, layer: int | None) -> list[str]:
    """Write the graphs with the fault, as stamped and as lowered; return their names."""
    names = []
    for kind in ("head", "head_all") if fault.graph == "head" else (fault.graph,):
        source = layer
        if layer is not None and fault.weights_of is not None:
            source = fault.weights_of(layer, bundle.config.num_layers)
        model = ir.load(bundle.folder / graph_file(kind, source))
        root = bundle.head_root if fault.graph == "head" else bundle.weights_root
        ir.external_data.set_base_dir(model.graph, root)
        if layer is not None:
            model.graph.name = f"grok1_{kind}_{layer}"
        if fault.plant is not None:
            fault.plant(model, bundle.config)
            RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]  # not typed there
        lowered = model.clone()
        lower_graph(lowered, dtype=bundle.manifest.dtype)
        for variant, graph in (("", model), ("ort", lowered)):
            names.append(graph_file(kind, layer, variant=variant))
            write_graph(graph, out / names[-1])
    return names


def _edit_rank(bundle: Bundle, fault: Fault, out: Path, layer: int | None) -> list[str]:
    """Have rank 1 hold the wrong bytes; return the names of the files."""
    if fault.of_ranks is None:
        raise AssertionError("it is a fault of ranks")
    folders = [rank_folder(rank) for rank in range(2)]
    index = WeightIndex.read(bundle.folder / folders[0] / WEIGHT_INDEX, root=bundle.folder)
    names = set()
    for tensor in fault.of_ranks.tensors:
        weight = index[f"layers.{layer}.{tensor}"]  # all ranks have it at the same place
        names.add(f"{folders[1]}/{weight.file}")
        with output_errors(out):
            parts = []
            for folder in folders:
                with (bundle.folder / folder / weight.file).open("rb") as file:
                    file.seek(weight.offset)
                    parts.append(file.read(weight.nbytes))
            with (out / folders[1] / weight.file).open("r+b") as file:
                file.seek(weight.offset)
                file.write(fault.of_ranks.content(parts[1], parts[0]))
    return sorted(names)


def _manifest(
    bundle: Bundle, fault: Fault, out: Path, layer: int | None, records: dict[str, FileRecord]
) -> Manifest:
    manifest, root = bundle.manifest, bundle.weights_root.resolve()
    made_by = manifest.versions.get("export-grok", "")
    return dataclasses.replace(
        manifest,
        weights=WeightsPlace(
            copied=False, relative=os.path.relpath(root, out.resolve()), absolute=str(root)
        ),
        versions=manifest.versions | {"export-grok": f"{made_by} with {fault.name}".strip()},
        files=manifest.files | records,
        engine=manifest.engine | {PLANTED: {"name": fault.name, "layer": layer}},
    )
