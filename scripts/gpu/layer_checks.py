"""What is asked of a layer's plan: its values, its caches, its formats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export_grok.engines.trt.engine import Engine
from export_grok.engines.trt.tensors import CACHES
from scripts.gpu.device import KernelDevice
from scripts.gpu.layer import Array, LayerCase, Reference, random_layer
from scripts.gpu.plan_run import PlanRun

__all__ = [
    "Build",
    "Found",
    "in_place",
    "reformats",
    "row_errors",
    "values",
]

# Returns the engine of a case.
Build = Callable[[LayerCase], Engine]

# Of a token's vector, ||found - expected|| / ||expected||. Some ten values on the way are rounded
# to T, each by up to 2^-11 or 2^-8 of it, and not to one side.
BOUND = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
DRAWS = 8


@dataclass(kw_only=True)
class Found:
    """What came of a check: what is wrong, one line each, and figures."""

    faults: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


def values(
    device: KernelDevice,
    case: LayerCase,
    build: Build,
    random: np.random.Generator,
    reference: Reference,
) -> Found:
    """Hold a run of the plan to the reference, where the router's choice is clear."""
    inputs = random_layer(case, random)
    for _ in range(DRAWS):
        expected, clear = reference.run(inputs)
        if clear.any():
            break
        h = random.standard_normal(inputs["h"].shape, np.float32)
        inputs["h"] = h.astype(inputs["h"].dtype)
    else:
        raise AssertionError(f"the router's choice is never clear in {DRAWS} draws")
    run = PlanRun(device, build(case))
    run.write(inputs)
    run.enqueue()
    found = Found(figures={"tokens": int(clear.sum()), "of": clear.size})
    errors = {"h_out": row_errors(run.read("h_out"), expected["h_out"])[clear]}
    for name in ("k_out", "v_out"):
        mine, theirs = (
            _new_slots(case, inputs, cache) for cache in (run.read(name), expected[name])
        )
        errors[name] = row_errors(mine, theirs)
    for name, rows in errors.items():
        worst = float(np.nan_to_num(rows, nan=np.inf).max())
        found.figures[name] = worst
        if worst > BOUND[case.dtype]:
            found.faults.append(
                f"{name} of {case.label} is off by {worst:.2g} in its worst token, "
                f"{BOUND[case.dtype]:.0e} is allowed"
            )
    return found


def row_errors(found: Array, expected: Array) -> NDArray[np.float64]:
    """Return ||found - expected|| / ||expected|| of each row, the last axis."""
    one, other = (array.astype(np.float64) for array in (found, expected))
    errors: NDArray[np.float64] = np.linalg.norm(one - other, axis=-1) / np.linalg.norm(
        other, axis=-1
    )
    return errors


def in_place(
    device: KernelDevice, case: LayerCase, build: Build, random: np.random.Generator
) -> Found:
    """Check that a run writes the new slots of the caches where they lie, and nothing else."""
    engine, found = build(case), Found()
    aliases = {row.name: row.aliases for row in engine.tensors if row.direction == "out"}
    for cache, out in (("k_cache", "k_out"), ("v_cache", "v_out")):
        if aliases.get(out) != cache:
            found.faults.append(f"{case.label}: {out} aliases {aliases.get(out)}, not {cache}")
    inputs = random_layer(case, random)
    run = PlanRun(device, engine)
    run.write(inputs)
    run.enqueue()
    for cache in CACHES:
        before, after = inputs[cache], run.read(cache)
        new = _is_new(case, inputs)[:, None, :, None]
        changed = before.view(np.uint8) != after.view(np.uint8)
        changed = changed.reshape(*before.shape, -1).any(-1)
        beside = int((changed & ~new).sum())
        if beside:
            found.faults.append(f"{case.label}: {beside} elements of {cache} beside the new ones")
        kept = int((np.isnan(after) & new).sum())
        if kept:
            found.faults.append(f"{case.label}: {kept} new elements of {cache} are not written")
    return found


def reformats(information: Mapping[str, Any], weights: Sequence[str]) -> tuple[list[str], int]:
    """Return the layers of a plan that copy a weight to another format, and how many do so at all.

    Args:
        information: what the engine inspector tells in JSON.
        weights: names of inputs.
    """
    layers = [layer for layer in information["Layers"] if isinstance(layer, dict)]
    copies = [
        layer
        for layer in layers
        if "reformat" in str(layer.get("LayerType", "")).lower()
        or "reformatting copynode" in str(layer.get("Name", "")).lower()
    ]
    found = [
        f"{layer.get('Name')} of {row.get('Name')}"
        for layer in copies
        for row in layer.get("Inputs", ())
        if row.get("Name") in weights
    ]
    return found, len(copies)


def _is_new(case: LayerCase, inputs: Mapping[str, Array]) -> NDArray[np.bool_]:
    """Return which slots [B, T] a run writes."""
    start, slots = inputs["start"][:, None], np.arange(case.sizes.slots)
    tokens = case.sizes.rows(case.phase)[1]
    new: NDArray[np.bool_] = (slots >= start) & (slots < start + tokens)
    return new


def _new_slots(case: LayerCase, inputs: Mapping[str, Array], cache: Array) -> Array:
    """Return what a run wrote into a cache: [B * S, Hkv, D]."""
    rows: Array = cache.transpose(0, 2, 1, 3)[_is_new(case, inputs)]
    return rows
