"""Hold the engine of a bundle to a reference: graph by graph, then running free."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from export_grok.artifacts import Bundle, open_bundle
from export_grok.engines.backend import Session
from export_grok.engines.probe import GraphName, Probe
from export_grok.needs import OnNeeds
from export_grok.optional import require
from export_grok.progress import progress_bar
from export_grok.runtime.open import open_session
from export_grok.runtime.probe_session import open_probe_session
from export_grok.runtime.verify.few_rows import FewRows
from export_grok.runtime.verify.free_run import Heard, judge, listen
from export_grok.runtime.verify.needs import verify_needs
from export_grok.runtime.verify.options import VerifyOptions
from export_grok.runtime.verify.result import Cause, FreeRun, GraphResult, Verification
from export_grok.runtime.verify.tolerances import FREE_RUN
from export_grok.runtime.verify.work import CHUNK, Work

__all__ = ["verify_bundle"]


def verify_bundle(
    folder: Path,
    options: VerifyOptions,
    *,
    threads: int | None = None,
    weights_root: Path | None = None,
    on_needs: OnNeeds = lambda needs: None,
) -> Verification:
    """Return how the engine of a bundle compares with a reference.

    Memory is that of one layer, of the reference in float32, and of the engine: a model of any
    number of layers can be verified.

    Args:
        folder: of the bundle.
        options: what is compared with what.
        threads: for the engine to compute with; as many as there are cores by default.
        weights_root: where the weights are, if the bundle points at ones that were moved.
        on_needs: gets what that needs, before any weights are loaded.

    Raises:
        BundleError: a bundle is unfinished or damaged.
        ConfigError: there is no such reference, layer or tensor, or it is of another model.
        MissingDependencyError: polygraphy, torch, or what the engine needs is not installed.
        RankError: one of the engine's ranks died or stalled.
        RequestError: the text or the goldens cannot be read, or tokens do not fit.
        VerificationError: the engine and the reference have no tensor in common.
    """
    require("polygraphy", extra="verify")
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    work = Work.of(bundle, options, threads)
    on_needs(verify_needs(work))
    graphs, cause = _graphs(work, work.engine) if work.engine and options.graphs else ([], None)
    notes = list(work.reference.notes)
    if options.interpret:
        notes.append(
            "no plan ran: the graphs they are built from were interpreted in float32 by ONNX "
            "Runtime"
        )
    if not options.graphs:
        notes.append("no graph was compared by itself: where something is wrong stays open")
    free_run = None
    if options.layers is not None:
        notes.append("the free run was left out, as layers were chosen")
    elif not options.keep_going and not all(graph.passed for graph in graphs):
        notes.append("what follows the first failed graph was left out; --keep-going goes on")
    else:
        free_run = _free_run(work)
    return Verification(
        bundle=str(folder),
        engine=work.engine.name if work.engine else f"{bundle.manifest.backend} engine",
        reference=work.reference.probe.name,
        dtype=work.dtype,
        layers=bundle.config.num_layers,
        rows=tuple(len(row) for row in work.rows.rows),
        decoded=work.decoded,
        text=work.rows.source,
        graphs=tuple(graphs),
        free_run=free_run,
        cause=cause,
        notes=tuple(notes),
    )


def _graphs(work: Work, engine: Probe) -> tuple[list[GraphResult], Cause | None]:
    from export_grok.runtime.verify.walk import graph_names, walk

    names = graph_names(work.bundle.config.num_layers)
    chosen = names
    if work.options.layers is not None:
        chosen = tuple(GraphName(kind="layer", layer=layer) for layer in work.options.layers)
    results: list[GraphResult] = []
    cause = None
    with progress_bar("graphs", len(names), unit="graphs") as advance:
        for result, feed, outputs in walk(
            work.reference.probe,
            engine,
            work.graph_steps,
            work.tolerances,
            max_length=work.max_length,
            floor=work.floor,
            chosen=chosen,
            advance=advance,
        ):
            results.append(result)
            if result.passed:
                continue
            if cause is None:
                cause = _cause(work, result, feed.given, outputs)
            if not work.options.keep_going:
                break
    return results, cause


def _cause(
    work: Work, result: GraphResult, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Cause | None:
    """Return the known mistake behind a failed graph, where there is a model to try them on."""
    from export_grok.runtime.torch_probe import TorchProbe
    from export_grok.runtime.verify.diagnose import cause_of

    reference = work.reference.probe
    if not isinstance(reference, TorchProbe) or work.floor is not None:
        return None
    return cause_of(result, inputs, outputs, work.graph_steps, reference, work.tolerances)


def _free_run(work: Work) -> FreeRun:
    batch = len(work.rows.rows)
    prompts = [row[: len(row) - work.decoded] for row in work.rows.rows]
    sides = 2 + (work.floor is not None) - (work.reference.goldens is not None)
    total = sides * (len(work.run_steps) + work.decoded)
    with progress_bar("free run", total, unit="steps") as advance:

        def heard(session: Session) -> Heard:
            return listen(
                session,
                work.run_steps,
                prompts,
                greedy=work.decoded,
                chunk=CHUNK,
                advance=advance,
            )

        def heard_by(probe: Probe) -> Heard:
            with open_probe_session(probe, batch=batch, max_length=work.max_length) as session:
                return heard(session)

        def heard_in(bundle: Bundle) -> Heard:
            rows = bundle.sizes.get("batch", batch)
            with open_session(
                bundle, batch=rows, max_length=work.max_length, threads=work.threads
            ) as session:
                return heard(FewRows(session, batch))

        def judged(found: Heard, floor: FreeRun | None = None) -> FreeRun:
            return judge(
                work.run_steps,
                work.rows.rows,
                found,
                wanted,
                tolerance=work.tolerances.tensors[FREE_RUN],
                floor=floor,
            )

        reference = work.reference
        if reference.goldens is not None:
            wanted = reference.goldens.heard(work.run_steps)
        elif reference.bundle is not None:
            wanted = heard_in(reference.bundle)
        else:
            wanted = heard_by(reference.probe)
        floor = None if work.floor is None else judged(heard_by(work.floor))
        interpreted = work.engine if work.options.interpret else None
        engine = heard_by(interpreted) if interpreted else heard_in(work.bundle)
        return judged(engine, floor)
