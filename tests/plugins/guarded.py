"""Run all calls with each operand ending, or beginning, where memory ends: used as a program.

    python -m tests.plugins.guarded SIDE ISA

SIDE is `end` or `begin`. An access beyond an operand kills the process, and so does a write to an
input. Then, in a process each, operands of some calls are moved one element beyond that side; it
prints which of them were noticed.
"""

import ctypes
import mmap
import os
import signal
import sys

import numpy as np

from export_grok.plugins.kernels import ISA, native_kernels, read_streams
from tests.plugins.calls import CALLS
from tests.plugins.formulas import Array, Call, assert_right
from tests.plugins.ort_calls import run

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
WRITTEN = ("y", "k_cache", "v_cache")
# They use both ends of each operand.
MOVED = (
    "linear-one-token",
    "linear-tile-and-one",
    "experts-nine-tokens",
    "experts-more-choices-than-go-at-once",
    "attention-prompt-fills-the-cache",
    "attention-last-slot",
)


def protect(address: int, size: int, protection: int) -> None:
    if size and LIBC.mprotect(address, size, protection):
        raise OSError(ctypes.get_errno(), "mprotect failed")


class Memory:
    """Places each array against one of two pages that nobody may touch."""

    def __init__(self, side: str, moved: str = "") -> None:
        self.side = side
        self.moved = moved

    def place(self, name: str, array: Array) -> Array:
        """Return a copy there, or one element further on."""
        size = array.nbytes
        pages = -(-size // PAGE) * PAGE
        region = mmap.mmap(-1, pages + 2 * PAGE)
        offset = PAGE + (pages - size if self.side == "end" else 0)
        copy: Array = np.frombuffer(region, np.uint8, size, offset)
        copy[:] = array.reshape(-1).view(np.uint8)
        if name == self.moved:
            offset += array.itemsize if self.side == "end" else -array.itemsize
            copy = np.frombuffer(region, np.uint8, size, offset)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        protect(address, PAGE, NO_ACCESS)
        protect(address + PAGE + pages, PAGE, NO_ACCESS)
        if name not in WRITTEN:
            protect(address + PAGE, pages, mmap.PROT_READ)
        placed: Array = copy.view(array.dtype).reshape(array.shape)
        return placed


def kills(call: Call, memory: Memory) -> bool:
    """Return whether another process that runs the call dies of it."""
    process = os.fork()
    if not process:
        run(call, place=memory.place)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGSEGV


def main(side: str, isa: str) -> None:
    """Run the calls."""
    os.environ[ISA] = isa
    assert native_kernels().isa == isa
    for case, call in CALLS.items():
        print(case, end=" ", flush=True)
        assert_right(call, run(call, place=Memory(side).place), isa)
        print("is right")
    for size in (1, 63, 1027, 2 * PAGE + 5):
        read_streams(Memory(side).place("x", np.ones(size, np.uint8)))
        print(size, "bytes were read")
    for case in MOVED:
        call = CALLS[case]
        for name in (*call.inputs, "y"):
            noticed = kills(call, Memory(side, moved=name))
            print(case, name, "was noticed" if noticed else "WAS NOT NOTICED")


if __name__ == "__main__":
    main(*sys.argv[1:])
