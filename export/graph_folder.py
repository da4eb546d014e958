"""The stage from weights to a folder of graphs: trace once, stamp layers, write a manifest."""

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from export_grok.artifacts import (
    COPIED_WEIGHTS,
    WEIGHT_INDEX,
    Bundle,
    graph_file,
    record_of,
    write_manifest,
)
from export_grok.config import EXPORT, ExportOptions, GrokConfig
from export_grok.errors import CheckpointError, ExportGrokError
from export_grok.export.checkpoint import open_weights
from export_grok.export.contract import GRAPH_KINDS, GraphKind, ports
from export_grok.export.graphs import stamped, write_graph
from export_grok.export.head import head_error, write_head
from export_grok.export.index_source import IndexSource
from export_grok.export.needs import graph_needs
from export_grok.export.plan import Plan, begin, check_free, claim, current, finish, plan_of
from export_grok.export.store.folder import write_store
from export_grok.export.tokenizer_file import copy_tokenizer
from export_grok.export.trace import template_from_config
from export_grok.files import output_errors
from export_grok.manifest import FileRecord, Manifest, WeightsPlace
from export_grok.needs import Needs, OnNeeds
from export_grok.progress import progress_bar
from export_grok.weights import WeightIndex

__all__ = ["export_graphs"]

logger = logging.getLogger(__name__)


def export_graphs(
    source: Path,
    out: Path,
    options: ExportOptions = EXPORT,
    *,
    on_needs: OnNeeds = lambda needs: None,
) -> Bundle:
    """Write the graphs of a checkpoint and return their folder.

    A folder that is up to date is returned as it is. One whose making was broken off is continued:
    weights that were copied already stay.

    Args:
        source: folder of a checkpoint or store.
        out: folder to write. It may be `source` itself: then any ONNX tool finds the weights.
        options: how the graphs are made.
        on_needs: gets what that needs, before anything is written; nothing if all is there.

    Raises:
        BundleError: `out` holds something else.
        CheckpointError: the checkpoint is damaged, or cannot be pointed at.
        OutputError: `out` cannot be written. What was begun is removed.
    """
    config, index = open_weights(source, options.config, options.layers)
    if not options.copy_weights:
        _check_within(index)
    plan = plan_of(config, index, options)
    if not options.overwrite and (found := current(out, plan)):
        on_needs(Needs())
        finish(out)  # a run that was killed behind its manifest has left its plan
        return found
    check_free(out, source, copied=options.copy_weights, overwrite=options.overwrite)
    on_needs(graph_needs(plan, index, out))
    created = claim(out)
    try:
        return _write(plan, index, source, out)
    except ExportGrokError:
        if created:
            shutil.rmtree(out, ignore_errors=True)
        raise


def _check_within(index: WeightIndex) -> None:
    # ONNX Runtime and the ONNX checker refuse initialisers that leave the folder by a link.
    root = index.root.resolve()
    outside = [file for file in index.files if not (root / file).resolve().is_relative_to(root)]
    if outside:
        raise CheckpointError(
            f"{len(outside)} files of {index.root} are links that lead out of it, which ONNX "
            "Runtime refuses; copy the weights into the bundle with --weights copy, or give the "
            "folder that holds the files themselves",
            [f"{file} -> {(root / file).resolve()}" for file in outside[:3]],
        )


def _write(plan: Plan, index: WeightIndex, source: Path, out: Path) -> Bundle:
    resume = begin(out, plan)
    if plan.copied:
        index = _copy_weights(plan.config, index, out, resume=resume)
    index.write(out / WEIGHT_INDEX)
    names = [WEIGHT_INDEX]
    head, error = index, None
    if plan.head == "int8":
        head = write_head(plan.config, index, out, resume=resume)
        error = head_error(index, head)
        names += head.files
    names += [*_write_graphs(plan, index, head, out), *copy_tokenizer(source, out)]
    with output_errors(out):
        manifest = Manifest(
            kind="graphs",
            backend=None,
            config=plan.config,
            dtype=plan.dtype,
            head=plan.head,
            head_error=error,
            weights=_place(plan, index, out),
            source=plan.source,
            versions=plan.versions,
            files={name: record_of(out / name) for name in names},
            weight_files=_weight_records(plan, index),
            ports={
                kind: [
                    dataclasses.asdict(row) | {"shape": list(row.shape)}
                    for row in ports(kind, plan.config, plan.dtype)
                ]
                for kind in GRAPH_KINDS
            },
            lowering={},
        )
        write_manifest(out, manifest)
    finish(out)
    return Bundle(folder=out, weights_root=index.root, manifest=manifest)


def _copy_weights(
    config: GrokConfig, index: WeightIndex, out: Path, *, resume: bool
) -> WeightIndex:
    total = sum(weight.nbytes for weight in index)
    with progress_bar("copying weights", total, unit="bytes") as advance:
        source = IndexSource(config, index)
        store = write_store(source, out / COPIED_WEIGHTS, resume=resume, progress=advance)
    return WeightIndex(
        root=out,
        weights={
            weight.name: dataclasses.replace(weight, file=f"{COPIED_WEIGHTS}/{weight.file}")
            for weight in store
        },
        files={f"{COPIED_WEIGHTS}/{file}": length for file, length in store.files.items()},
    )


def _write_graphs(plan: Plan, index: WeightIndex, head: WeightIndex, out: Path) -> list[str]:
    config, dtype = plan.config, plan.dtype
    names = []
    with progress_bar("tracing", len(GRAPH_KINDS), unit="graphs") as advance:
        templates = {}
        for kind in GRAPH_KINDS:
            logger.info("tracing %s in %s", kind, dtype)
            templates[kind] = template_from_config(kind, config, dtype, plan.head)
            _check(templates[kind])
            advance(1)

    def write(model: ir.Model, name: str, progress: Callable[[int], None]) -> None:
        write_graph(model, out / name)
        names.append(name)
        progress(1)

    single: tuple[GraphKind, ...] = ("embedding", "head", "head_all")
    with progress_bar("writing graphs", len(single) + config.num_layers, unit="graphs") as advance:
        for kind, template in templates.items():
            write(template, graph_file(kind, variant="template"), lambda done: None)
        for kind in single:
            weights = index if kind == "embedding" else head
            model = stamped(templates[kind], kind, config, dtype, weights)
            write(model, graph_file(kind), advance)
        for layer in range(config.num_layers):
            model = stamped(templates["layer"], "layer", config, dtype, index, layer=layer)
            write(model, graph_file("layer", layer), advance)
    return names


def _check(template: ir.Model) -> None:
    """Hold a template to the ONNX standard; stamped graphs differ by initialisers only."""
    onnx.checker.check_model(ir.serde.serialize_model(template), full_check=True)


def _place(plan: Plan, index: WeightIndex, out: Path) -> WeightsPlace:
    if plan.copied:
        return WeightsPlace(copied=True, relative=".", absolute="")
    root = index.root.resolve()
    return WeightsPlace(
        copied=False, relative=os.path.relpath(root, out.resolve()), absolute=str(root)
    )


def _weight_records(plan: Plan, index: WeightIndex) -> dict[str, FileRecord]:
    if plan.copied:
        return {file: record_of(index.root / file) for file in index.files}
    return {
        file: FileRecord(bytes=length, fingerprint=plan.source[file])
        for file, length in index.files.items()
    }
