"""The entry point of a kernel's PTX: it takes what TensorRT's launcher passes, and nothing else.

Triton puts two pointers behind the arguments of every kernel, to memory that its own launcher
brings where a kernel needs it. TensorRT passes the declared arguments alone, so a kernel that read
them would read what happens to lie there. They are taken out of the PTX, once it is proven from
its text that the kernel reads neither.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from export_grok.errors import BuildError

__all__ = ["HIDDEN", "declared_only"]

HIDDEN = ("global_scratch", "profile_scratch")

POINTER_BITS, SCALAR_BITS = 64, 32


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    text: str
    name: str
    bits: int
    pointer: bool


def declared_only(ptx: str, kernel: str, types: Sequence[str], *, threads: int) -> str:
    """Return the PTX with an entry point that takes the declared arguments alone.

    Args:
        ptx: of one kernel, as Triton wrote it.
        kernel: name of the entry point.
        types: of the declared arguments, in their order: "i32", or of a pointer, e.g. "*i8".
        threads: of a block.

    Raises:
        BuildError: the kernel takes other arguments, reads a hidden one, or wants another block.
    """
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    head = re.search(
        rf"\.visible \.entry {re.escape(kernel)}\((?P<list>[^)]*)\)(?P<directives>[^{{]*){{", ptx
    )
    if head is None or entries != [kernel]:
        raise BuildError(
            f"the PTX of kernel {kernel} has the entry points {', '.join(entries) or 'none'}; it "
            f"must have {kernel} alone"
        )
    parameters = [_parameter(kernel, text) for text in head["list"].split(",") if text.strip()]
    _check_types(kernel, parameters, types)
    declared, hidden = parameters[: len(types)], parameters[len(types) :]
    outside = ptx[: head.start("list")] + ptx[head.end("list") :]
    for parameter, meaning in zip(hidden, HIDDEN, strict=True):
        if re.search(rf"{re.escape(parameter.name)}(?![\w$])", outside):
            raise BuildError(
                f"kernel {kernel} reads its parameter {parameter.name} ({meaning}), which "
                "TensorRT does not pass: a kernel may use neither scratch memory nor profiling"
            )
    for parameter in declared:
        _check_reads(kernel, parameter, outside)
    if re.findall(r"\.reqntid\s+([^\n.]+)", head["directives"]) != [str(threads)]:
        raise BuildError(
            f"kernel {kernel} asks for a block of{head['directives'].rstrip()}; it is launched "
            f"with {threads} threads"
        )
    kept = ",\n".join(f"\t{parameter.text}" for parameter in declared)
    return f"{ptx[: head.start('list')]}\n{kept}\n{ptx[head.end('list') :]}"


def _parameter(kernel: str, text: str) -> _Parameter:
    text = text.strip()
    found = re.fullmatch(
        r"\.param \.[usb](?P<bits>\d+)(?P<pointer> \.ptr \.global \.align \d+)? (?P<name>[\w$]+)",
        text,
    )
    if found is None:
        raise BuildError(
            f"kernel {kernel} has the parameter {text!r}; TensorRT passes pointers and int32 alone"
        )
    return _Parameter(
        text=text,
        name=found["name"],
        bits=int(found["bits"]),
        pointer=found["pointer"] is not None,
    )


def _check_types(kernel: str, parameters: Sequence[_Parameter], types: Sequence[str]) -> None:
    if len(parameters) != len(types) + len(HIDDEN):
        raise BuildError(
            f"kernel {kernel} has {len(parameters)} parameters; {len(types)} are declared, and "
            f"Triton adds {len(HIDDEN)} ({', '.join(HIDDEN)})"
        )
    for parameter, kind in zip(parameters, [*types, *("*" for _ in HIDDEN)], strict=True):
        pointer = kind.startswith("*")
        bits = POINTER_BITS if pointer else SCALAR_BITS
        if (parameter.pointer, parameter.bits) != (pointer, bits):
            raise BuildError(
                f"parameter {parameter.name} of kernel {kernel} is {parameter.text!r}; declared "
                f"is {'a pointer' if pointer else kind} of {bits} bits"
            )


def _check_reads(kernel: str, parameter: _Parameter, outside: str) -> None:
    """Refuse what may reach beyond a declared parameter: its address, an offset, a wider load."""
    name = re.escape(parameter.name)
    mentions = len(re.findall(rf"{name}(?![\w$])", outside))
    reads = re.findall(rf"ld\.param\.[usb](\d+)\s+%\w+, \[{name}\];", outside)
    if len(reads) != mentions or any(int(bits) > parameter.bits for bits in reads):
        raise BuildError(
            f"kernel {kernel} does more with its parameter {parameter.name} than read its "
            f"{parameter.bits} bits: what lies behind it cannot be removed"
        )
