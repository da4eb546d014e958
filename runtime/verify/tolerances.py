"""How far an engine may be from the reference, by tensor, size and dtype; see `docs/accuracy.md`.

The error of a tensor is the largest over its tokens of

    max |engine - reference| / rms of the reference, over the values of the token

so it has no unit, a token of small values counts as much as one of large values, and a few large
channels hide an error in the others no more than they outweigh them.

A float32 engine computes the same sums as the reference in another order. What that leaves grows
as the root of their length, and on top of it kernels may leave something out. So a tensor may be
off by `fixed + sums * 2^-24 * sqrt(M)`. Each layer is fed the reference's input, so that nothing
grows with depth; where the engine runs free, errors of all layers add up, as roots do.

An engine of another dtype rounds in other places than the reference: it is held to the float32
reference by the mean over tokens, and may be `BFLOAT16_FACTOR` times as far from it as a
computation in its dtype that rounds wherever the original does.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from export_grok.config import Dtype, GrokConfig
from export_grok.errors import ConfigError

__all__ = ["BFLOAT16_FACTOR", "FREE_RUN", "TENSORS", "Allowance", "Tolerances", "tolerances_of"]

FREE_RUN = "free run"
EPSILON = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a tensor may be off by.

    Attributes:
        fixed: what kernels may leave out: of those built into ONNX Runtime, twice what was seen.
        sums: what the order of adding may do, in 2^-24 sqrt(M): twice what was seen.
    """

    fixed: float
    sums: float

    def of(self, config: GrokConfig, *, depth: int = 1) -> float:
        """Return the tolerance for a model, behind so many layers in a row."""
        return self.fixed + self.sums * EPSILON * math.sqrt(config.emb_size * depth)


# In the order of computing.
TENSORS: dict[str, Allowance] = {
    "h": Allowance(fixed=1e-6, sums=0),
    "k_out": Allowance(fixed=1.2e-5, sums=8),
    "v_out": Allowance(fixed=1.2e-5, sums=8),
    "heads": Allowance(fixed=6e-5, sums=12),
    "attention": Allowance(fixed=4e-5, sums=8),
    "experts": Allowance(fixed=0, sums=0),
    "gates": Allowance(fixed=1.5e-5, sums=4),
    "moe": Allowance(fixed=6e-5, sums=12),
    "h_out": Allowance(fixed=3e-5, sums=10),
    "logits": Allowance(fixed=0, sums=12),
    FREE_RUN: Allowance(fixed=1.2e-4, sums=20),
}

# A choice of experts decided by less is no fault: in float32, by less than gates may be off.
NEAR_TIE: dict[Dtype, float] = {"float16": 2e-3, "bfloat16": 2e-2}

BFLOAT16_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """What is allowed.

    Attributes:
        tensors: the largest error, by tensor.
        near_tie: by how much the last chosen expert must be more probable than the next one for
            a choice to be firm.
    """

    tensors: Mapping[str, float]
    near_tie: float


def tolerances_of(
    config: GrokConfig, dtype: Dtype = "float32", given: Mapping[str, float] | None = None
) -> Tolerances:
    """Return the tolerances for an engine.

    Args:
        config: of the model.
        dtype: of the engine.
        given: some that the user wants otherwise.

    Raises:
        ConfigError: there is no such tensor, or a number cannot be a tolerance; all are named.
    """
    given = given or {}
    faults = []
    for name, number in given.items():
        if name not in TENSORS:
            near = difflib.get_close_matches(name, TENSORS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            faults.append(f"there is no tensor {name!r}; {hint}known are {', '.join(TENSORS)}")
        if not (math.isfinite(number) and number >= 0):
            faults.append(f"the tolerance of {name} is {number}; it must be a number from 0")
    if faults:
        raise ConfigError("\n  ".join(faults))
    tensors = {name: allowance.of(config) for name, allowance in TENSORS.items()}
    tensors[FREE_RUN] = TENSORS[FREE_RUN].of(config, depth=config.num_layers)
    tensors |= given
    return Tolerances(tensors=tensors, near_tie=NEAR_TIE.get(dtype, tensors["gates"]))
