"""All known mistakes, by name."""

import difflib

from export_grok.errors import ConfigError
from export_grok.runtime.verify.faults import (
    attention,
    cache,
    ends,
    experts,
    layers,
    norms,
    positions,
    ranks,
    router,
    weights,
)
from export_grok.runtime.verify.faults.fault import Fault

__all__ = ["FAULTS", "fault_named"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (
        ends,
        norms,
        positions,
        attention,
        cache,
        router,
        experts,
        layers,
        weights,
        ranks,
    )
    for fault in module.FAULTS
}


def fault_named(name: str) -> Fault:
    """Return the fault of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FAULTS:
        near = difflib.get_close_matches(name.replace("-", "_"), FAULTS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"there is no fault {name!r}; {hint}known are {', '.join(FAULTS)}")
    return FAULTS[name]
