"""How far good bfloat16 computations are apart, and which mistakes are seen through that."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from export_grok.config import Dtype, GrokConfig
from export_grok.engines.probe import GraphName, Probe, Run
from export_grok.export.checkpoint import open_weights
from export_grok.runtime.torch_probe import TorchProbe
from export_grok.runtime.verify.faults.library import FAULTS
from export_grok.runtime.verify.faults.mistake import mistaken
from export_grok.runtime.verify.free_run import Heard, judge
from export_grok.runtime.verify.result import FreeRun, GraphResult
from export_grok.runtime.verify.steps import Step, faint, steps_of
from export_grok.runtime.verify.tolerances import FREE_RUN, tolerances_of
from export_grok.runtime.verify.walk import graph_names, walk

__all__ = ["bfloat16_section"]

ABOVE = """\
## bfloat16: how far good computations are apart

Logits of the prompts of the reference models, against the original program in float32. `bf16` is
the original with every rounding that it asks for, `bf16_fused` the same program as XLA compiles it
on a CPU, where fusion drops many of them. The rule is that of a free run.

{logits}

Layer by layer, both fed the same: the PyTorch model with the original's roundings against the
PyTorch model in float32, and in between an "engine" that keeps float32 within a layer and rounds
what comes out. Errors are the mean over tokens of the difference's rms, in parts of the tolerance
(half of it is the roundings' own error).

{layers}

Of the mistakes of a layer, planted in the bfloat16 model, the rule sees {seen} of {planted}. It
does not see on any of the {models} models: {unseen}."""

Arrays = dict[str, NDArray[Any]]

LENGTHS = (32, 25, 11)
DECODED = 8


def bfloat16_section(models: Mapping[str, Path]) -> str:
    """Return the section of the report.

    Args:
        models: folders of the reference models, by name.
    """
    torch.set_num_threads(1)  # the models are too small to share among more
    logits = ["| model | | mean error | same likeliest token | KL, nats | by the rule |"]
    logits.append("|---|---|---|---|---|---|")
    layers = ["| model | | choices of experts | others | near ties | largest error |"]
    layers.append("|---|---|---|---|---|---|")
    seen: set[str] = set()
    tried: set[str] = set()
    for name, folder in models.items():
        for variant, run in _by_logits(folder).items():
            rule = "the floor" if run.floor is None else "passes" if run.passed else "fails"
            logits.append(
                f"| {name} | {variant} | {run.mean_error:.3f} | {run.top_1:.1%} "
                f"| {run.kl_mean:.1e} | {rule} |"
            )
        config, index = open_weights(folder)
        model = TorchProbe(config, index, dtype="bfloat16")
        reference, rounded = _Kept(TorchProbe(config, index)), _Kept(model)
        for label, engine in (
            ("the original's roundings", model),
            ("float32 within a layer", _Fused(TorchProbe(config, index))),
        ):
            found = _layers(reference, engine, rounded)
            parts = [one.ratio for result in found for one in result.deviations]
            layers.append(
                f"| {name} | {label} | {sum(one.choices for one in found)} "
                f"| {sum(one.flips for one in found)} "
                f"| {sum(one.near_ties for one in found)} | {max(parts):.2f} |"
            )
        for fault in FAULTS.values():
            if fault.mistake is None or fault.graph != "layer" or fault.harmless(config):
                continue
            tried.add(fault.name)
            if fault.name in seen:
                continue
            # Whatever runs the model now makes the mistake: the others give what they gave.
            with mistaken(fault, model) as wrong:
                if not all(result.passed for result in _layers(reference, wrong, rounded)):
                    seen.add(fault.name)
    return ABOVE.format(
        logits="\n".join(logits),
        layers="\n".join(layers),
        seen=len(seen),
        planted=len(tried),
        models=len(models),
        unseen=", ".join(sorted(tried - seen)) or "none",
    )


def _by_logits(folder: Path) -> dict[str, FreeRun]:
    """Return how the bfloat16 results of the original are judged beside its float32 ones."""
    config, _ = open_weights(folder)
    with np.load(folder / "goldens.npz") as file:
        tokens = file["tokens"].astype(np.int64)
        logits = {name: file[f"{name}/prefill_logits"] for name in ("f32", "bf16", "bf16_fused")}
    rows, length = tokens.shape
    step = Step(
        name="prefill",
        tokens=tokens,
        start=np.zeros(rows, np.int64),
        length=np.full(rows, length),
    )
    nothing = np.empty((rows, 0))
    heard = {
        name: Heard(
            logits=(values.reshape(-1, values.shape[-1]),),
            greedy=nothing.astype(np.int64),
            margins=nothing,
        )
        for name, values in logits.items()
    }
    tolerance = tolerances_of(config, "bfloat16").tensors[FREE_RUN]

    def judged(name: str, floor: FreeRun | None = None) -> FreeRun:
        return judge(
            [step],
            tokens.tolist(),
            heard[name],
            heard["f32"],
            tolerance=tolerance,
            floor=floor,
        )

    floor = judged("bf16")
    return {"bf16": floor, "bf16_fused": judged("bf16_fused", floor)}


def _layers(reference: Probe, engine: Probe, floor: Probe) -> list[GraphResult]:
    config = reference.config
    random = np.random.default_rng(0)
    rows = [random.integers(3, config.vocab_size, length).tolist() for length in LENGTHS]
    steps = steps_of(rows, decode=DECODED, chunk=16, max_length=max(LENGTHS))
    layers = [name for name in graph_names(config.num_layers) if name.kind == "layer"]
    found = walk(
        reference,
        engine,
        (*steps, faint(steps[0])),
        tolerances_of(config, "bfloat16"),
        max_length=max(LENGTHS),
        floor=floor,
        chosen=layers,
    )
    return [result for result, _, _ in found]


class _Kept:
    """Computes once: asked again for the same steps, it gives what it gave before."""

    def __init__(self, probe: Probe) -> None:
        self.name, self.dtype, self.config = probe.name, probe.dtype, probe.config
        self._probe = probe
        self._outputs: dict[GraphName, list[Arrays]] = {}

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        if name in self._outputs:
            kept = iter(self._outputs[name])
            yield lambda inputs: next(kept)
            return
        made = self._outputs[name] = []
        with self._probe.graph(name) as run:

            def keep(inputs: Mapping[str, NDArray[Any]]) -> Arrays:
                made.append(run(inputs))
                return made[-1]

            yield keep


class _Fused:
    """Computes in float32 and rounds what goes in and comes out: another good bfloat16 engine."""

    name = "float32 within a graph"
    dtype: Dtype = "bfloat16"

    def __init__(self, inside: Probe) -> None:
        self._inside = inside
        self.config: GrokConfig = inside.config

    @contextmanager
    def graph(self, name: GraphName) -> Iterator[Run]:
        with self._inside.graph(name) as run:
            yield lambda inputs: {
                key: array if key == "probabilities" else _rounded(array)
                for key, array in run(
                    {key: _rounded(array) for key, array in inputs.items()}
                ).items()
            }


def _rounded(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind != "f":
        return array
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)
