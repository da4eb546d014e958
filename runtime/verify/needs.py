"""What a verification needs: the reference and the engine, graph by graph and running free."""

import dataclasses

from export_grok.engines.backend import functions_needs, interpreter_needs, probe_needs
from export_grok.engines.demand import Demand
from export_grok.needs import Needs
from export_grok.runtime.needs import session_needs
from export_grok.runtime.torch_needs import module_needs
from export_grok.runtime.verify.work import CHUNK, Work

__all__ = ["verify_needs"]


def verify_needs(work: Work) -> Needs:
    """Return what the work takes. Time is that of the reference, which is the slower side."""
    needs = _beside(_reference(work, layers=1), _engine(work)) if work.engine else Needs()
    if work.options.layers is not None:
        return needs
    layers = work.bundle.config.num_layers
    sides = [_reference(work, layers=layers, free=True)]
    if work.options.interpret:
        sides.append(interpreter_needs(work.bundle, layers))
    else:
        sides.append(session_needs(work.bundle, _demand(work)))
    if work.reference.bundle is not None:
        sides.append(session_needs(work.reference.bundle, _demand(work)))
    for side in sides:
        needs = needs + side
    return needs


def _reference(work: Work, *, layers: int, free: bool = False) -> Needs:
    """Return what the reference takes with so many layers in memory."""
    reference = work.reference
    if reference.goldens is not None:
        return Needs()
    if reference.bundle is not None:
        return Needs() if free else probe_needs(reference.bundle)
    steps = [step.tokens.size for step in (work.run_steps if free else work.graph_steps)]
    if free:  # the prompts once more, and on from there
        steps *= 2
    modules = module_needs(work.bundle.config, steps)
    if work.options.against == "ort":
        return dataclasses.replace(functions_needs(work.bundle, layers), seconds=modules.seconds)
    return modules


def _engine(work: Work) -> Needs:
    """Return what one graph of the engine takes."""
    if work.options.interpret:
        return interpreter_needs(work.bundle, 1)
    return probe_needs(work.bundle)


def _beside(one: Needs, other: Needs) -> Needs:
    """Return what two take that are in memory together."""
    return dataclasses.replace(
        one + other, memory=one.memory + other.memory, mapped=one.mapped + other.mapped
    )


def _demand(work: Work) -> Demand:
    """Return what a session is asked that runs free."""
    return Demand(
        batch=len(work.rows.rows),
        max_length=work.max_length,
        prefill=2 * (work.max_length - work.decoded),
        decode=2 * work.decoded,
        chunk=CHUNK,
        whole=True,
        threads=work.threads,
    )
