"""NCCL between the GPUs of all ranks, and how TensorRT's execution contexts get it.

One process for each rank. All that is here every rank calls, in the same order: NCCL and TensorRT
wait for the others, without end. So the group is asked first, which knows when one is gone. The
calls were read, in nccl4py 0.6 and in TensorRT's documentation; no two GPUs have run them yet.
"""

import ctypes
from typing import Any, Final

from export_grok.engines.group import Group
from export_grok.engines.trt.engine import Context
from export_grok.errors import ConfigError, ExportGrokError, MissingDependencyError
from export_grok.optional import require

__all__ = ["CAPSULE", "SUMMING", "Communicator", "capsule_of"]

# Graphs that sum over ranks. A context of another has no use for a communicator.
SUMMING: Final = frozenset({"embedding", "layer"})

# Name of the capsules that TensorRT looks into. A capsule keeps no copy of it.
CAPSULE: Final = b"ncclComm_t"

# What TensorRT's collectives are made for; source: its support matrix.
_OLDEST, _NEWEST = (2, 19), (3, 0)
_INSTALL: Final = "pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12, if CUDA is 12)"


class Communicator:
    """This rank's end of the connection between all GPUs, for as long as the process lives.

    Raises:
        ConfigError: NCCL cannot connect the GPUs.
        MissingDependencyError: nccl4py or NCCL itself is missing, or too old.
    """

    def __init__(self, group: Group) -> None:
        """Connect, once all ranks are here; the GPU must be this thread's current one."""
        nccl = require("nccl.core", extra="gpu")
        version = _checked_version(nccl)  # on every rank, before any waits for another
        self._core, self._library = nccl, require("nccl.bindings.nccl", extra="gpu")
        self._group = group
        mine = None
        try:
            if group.rank == 0:
                mine = bytes(nccl.get_unique_id())
            unique = nccl.UniqueId.from_bytes(group.broadcast(mine, "NCCL's unique id"))
            self._nccl = nccl.Communicator.init(group.ranks, group.rank, unique)
        except ExportGrokError:  # of the group
            raise
        except Exception as error:  # NCCL's own, which is not public
            raise ConfigError(
                f"NCCL {version} does not connect rank {group.rank} with the other GPUs "
                f"({' '.join(str(error).split())}); NCCL_DEBUG=INFO in the environment has it say "
                "why"
            ) from error
        self._capsule = capsule_of(self._nccl.ptr)

    def join(self, context: Context, where: str) -> None:
        """Have the sums of a context run over all ranks; before its first enqueue.

        Args:
            context: of the same graph on every rank.
            where: its graph, for the error that names a rank.
        """
        self._group.broadcast(b"" if self._group.rank == 0 else None, f"communicator of {where}")
        context.set_communicator(self._capsule)

    def all_reduce(self, address: int, elements: int, dtype: str, stream: int) -> None:
        """Enqueue a sum over all ranks, in place; every rank in the same order.

        Args:
            address: of this rank's summand, and then of the sum, on the device.
            elements: how many.
            dtype: of the elements, which NCCL calls by the same names.
            stream: that what makes the summand is enqueued on.
        """
        kind, op = int(self._core.NcclDataType[dtype.upper()]), int(self._core.NcclRedOp.SUM)
        # `Communicator.allreduce` takes arrays, and there is none of bfloat16 at an address.
        self._library.all_reduce(address, address, elements, kind, op, self._nccl.ptr, stream)


def capsule_of(pointer: int) -> object:
    """Return an `ncclComm_t` as a Python object that TensorRT takes."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = new(pointer, CAPSULE, None)
    return capsule


def _checked_version(nccl: Any) -> str:
    found = nccl.get_version().libnccl
    if found is None:
        raise MissingDependencyError(
            "ranks on GPUs are summed by NCCL, and its library, libnccl.so.2, cannot be loaded "
            f"here; {_INSTALL}"
        )
    if not _OLDEST <= tuple(found.version.release) < _NEWEST:
        raise MissingDependencyError(
            f"NCCL is {found.version}; TensorRT's collectives need 2.19 or newer, and not 3: "
            f"{_INSTALL}"
        )
    return str(found.version)
