"""One released weight file, read without running it: which arrays it holds, and where they lie.

A released file is a pickle, and a pickle is a program: whoever loads it runs what it names. Here
its steps are followed with stand-ins, so nothing is imported, called or allocated, and the arrays'
bytes, up to 3.2 GB of them, are stepped over.
"""

import math
import pickle
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.pickle_machine import PickleMachine
from export_grok.weights import NUMPY_DTYPES, StoredDtype, Weight

__all__ = ["arrays_in"]

# A released file takes about 110 steps. The bound keeps a hostile file from taking time.
MAX_STEPS = 1000
NEWEST_PROTOCOL = 5

# Bytes of the number that follows an opcode.
_WIDTHS = {
    pickle.BININT1: 1,
    pickle.BININT2: 2,
    pickle.SHORT_BINUNICODE: 1,
    pickle.BINUNICODE: 4,
    pickle.SHORT_BINBYTES: 1,
    pickle.BINBYTES: 4,
    pickle.BINBYTES8: 8,
    pickle.BINPUT: 1,
    pickle.LONG_BINPUT: 4,
    pickle.BINGET: 1,
    pickle.LONG_BINGET: 4,
}


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True)
class _Bytes:
    offset: int
    length: int


_ALLOWED = {
    _Global("__main__", "QuantizedWeight8bit"),
    _Global("numpy.core.multiarray", "_reconstruct"),
    _Global("numpy._core.multiarray", "_reconstruct"),  # what numpy 2 calls it
    _Global("numpy", "ndarray"),
    _Global("numpy", "dtype"),
    _Global("ml_dtypes", "bfloat16"),
    _Global("jax._src.array", "_reconstruct_array"),  # in files that were saved again by JAX
}
_DTYPES: dict[object, StoredDtype] = {
    "i1": "int8",
    "f4": "float32",
    _Global("ml_dtypes", "bfloat16"): "bfloat16",
}


@dataclass(eq=False)
class _Dtype:
    name: StoredDtype
    little_endian: bool = False  # until the stream says so


@dataclass(eq=False)
class _Array:
    weight: Weight | None = None  # until the stream gives its bytes


@dataclass(eq=False)
class _Quantised:
    parts: dict[object, object] | None = None


def arrays_in(path: Path) -> dict[str, Weight]:
    """Return where the arrays of a released weight file lie: `weight` and `scales`, or `array`.

    Every byte of the file is accounted for, but the arrays' own are not read. The `file` of the
    results is the name of `path`.

    Raises:
        UnsafePickleError: the file asks for anything but the names that arrays need.
        CheckpointError: the file cannot be read, is damaged, or holds no such arrays.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is no regular file; a released tensor file is needed")
        if status.st_size == 0:
            raise CheckpointError(f"{path} is empty; fetch it again")
        with path.open("rb", buffering=1024) as file:
            return _StandIns(path, file, status.st_size).run()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _StandIns(PickleMachine):
    """Follows the steps of a weight file."""

    def run(self) -> dict[str, Weight]:
        for _ in range(MAX_STEPS):
            opcode = self.take(1)
            if opcode == pickle.STOP:
                return self._result()
            self._step(opcode)
        raise self.fault(f"takes more than {MAX_STEPS} steps, a weight file takes 110")

    def _step(self, opcode: bytes) -> None:
        match opcode:
            case pickle.PROTO:
                if self.at != 1 or self.number(1) > NEWEST_PROTOCOL:
                    raise self.fault("does not name one known pickle protocol, at its start")
            case pickle.FRAME:
                self.open_frame(self.number(8))
            case pickle.MARK:
                self.marks.append(len(self.stack))
            case pickle.NONE:
                self.stack.append(None)
            case pickle.NEWTRUE | pickle.NEWFALSE:
                self.stack.append(opcode == pickle.NEWTRUE)
            case pickle.BININT1 | pickle.BININT2:
                self.stack.append(self.number(_WIDTHS[opcode]))
            case pickle.BININT:
                self.stack.append(self.number(4, signed=True))
            case pickle.LONG1:
                self.stack.append(self.number(self.number(1), signed=True))
            case pickle.SHORT_BINUNICODE | pickle.BINUNICODE:
                self.stack.append(self.text(self.number(_WIDTHS[opcode])))
            case pickle.SHORT_BINBYTES | pickle.BINBYTES | pickle.BINBYTES8:
                length = self.number(_WIDTHS[opcode])
                self.stack.append(_Bytes(self.skip(length), length))
            case pickle.EMPTY_TUPLE:
                self.stack.append(())
            case pickle.TUPLE1 | pickle.TUPLE2 | pickle.TUPLE3:
                count = opcode[0] - pickle.TUPLE1[0] + 1
                self.stack.append(tuple(self.pop() for _ in range(count))[::-1])
            case pickle.TUPLE:
                self.stack.append(tuple(self.pop_mark()))
            case pickle.EMPTY_DICT:
                self.stack.append({})
            case pickle.SETITEM:
                self.set_items([self.pop(), self.pop()][::-1])
            case pickle.SETITEMS:
                self.set_items(self.pop_mark())
            case pickle.MEMOIZE:
                self.memo[len(self.memo)] = self.top()
            case pickle.BINPUT | pickle.LONG_BINPUT:
                self.memo[self.number(_WIDTHS[opcode])] = self.top()
            case pickle.BINGET | pickle.LONG_BINGET:
                self.recall(self.number(_WIDTHS[opcode]))
            case pickle.GLOBAL:
                self._push_global(self.line(), self.line())
            case pickle.STACK_GLOBAL:
                name, module = self.pop(), self.pop()
                self._push_global(module, name)
            case pickle.REDUCE:
                arguments, function = self.pop(), self.pop()
                self._call(function, arguments)
            case pickle.NEWOBJ:
                arguments, function = self.pop(), self.pop()
                self._call(function, arguments, new=True)
            case pickle.BUILD:
                state = self.pop()
                self._build(self.top(), state)
            case _ if self.at == 1:
                raise self.fault("is no pickle")
            case _:
                raise self.fault(f"has step {opcode!r}, which no weight file has")

    # What a step may do: the calls that the stream asks for, answered by stand-ins.

    def _push_global(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise self.fault("asks for a name that is no text")
        asked = _Global(module, name)
        if asked not in _ALLOWED:
            raise UnsafePickleError(
                f"{self.path} asks for {f'{module}.{name}'!r}, which no weight file needs and "
                "which may do anything; nothing was run: fetch the file from where it was released"
            )
        self.stack.append(asked)

    def _call(self, function: object, arguments: object, *, new: bool = False) -> None:
        match function, arguments:
            case _Global("__main__", "QuantizedWeight8bit"), () if new:
                self.stack.append(_Quantised())
            case _Global("numpy", "dtype"), ((str() | _Global()) as code, False, True) if not new:
                if code not in _DTYPES:
                    name = code if isinstance(code, str) else code.name
                    raise self.fault(f"holds numbers of dtype {name!r}, not i1, f4 or bfloat16")
                self.stack.append(_Dtype(_DTYPES[code]))
            case (
                _Global(_, "_reconstruct"),
                (_Global("numpy", "ndarray"), (0,), _Bytes(_, 1)),
            ) if not new:
                self.stack.append(_Array())
            case (
                _Global("jax._src.array", "_reconstruct_array"),
                (_Global(_, "_reconstruct") as inner, tuple() as inputs, tuple() as state, dict()),
            ) if not new:  # a numpy array, and what JAX would make of it
                self._call(inner, inputs)
                self._build(self.top(), state)
            case _:
                raise self.fault("makes something that is no array")

    def _build(self, target: object, state: object) -> None:
        match target, state:
            case _Dtype(), (3, "<" | "|", None, None, None, int(), int(), int()):
                target.little_endian = True
            case _Dtype(), (3, str() as order, *_):
                raise self.fault(f"holds numbers of byte order {order!r}, not little endian '<'")
            case _Array(None), (1, tuple() as shape, _Dtype() as dtype, False, _Bytes() as data):
                target.weight = self._placed(shape, dtype, data)
            case _Array(None), (1, tuple(), _Dtype(), True, _Bytes()):
                raise self.fault("holds an array in Fortran order, not in C order")
            case _Quantised(None), dict():
                target.parts = state
            case _:
                raise self.fault("sets up something that is no array")

    def _placed(self, shape: tuple[object, ...], dtype: _Dtype, data: _Bytes) -> Weight:
        lengths = tuple(n for n in shape if type(n) is int and n >= 0)
        if len(lengths) != len(shape):
            raise self.fault("holds an array whose shape is not made of whole numbers from 0")
        if not dtype.little_endian:
            raise self.fault("holds numbers of unknown byte order")
        needed = math.prod(lengths) * NUMPY_DTYPES[dtype.name].itemsize
        if needed != data.length:
            raise self.fault(
                f"holds an array of {data.length} bytes whose shape and dtype need another length"
            )
        return Weight(
            name="array",  # until its key is known
            file=self.path.name,
            offset=data.offset,
            dtype=dtype.name,
            shape=lengths,
        )

    def _result(self) -> dict[str, Weight]:
        if self.at != self.size:
            raise self.fault(f"goes on for {self.size - self.at} bytes after its end")
        match [*self.stack, *self.marks]:
            case [_Array(Weight() as weight)]:
                return {"array": weight}
            case [
                _Quantised(
                    {"weight": _Array(Weight() as w), "scales": _Array(Weight() as s), **more}
                )
            ]:
                if not more:
                    return {
                        "weight": replace(w, name="weight"),
                        "scales": replace(s, name="scales"),
                    }
        raise self.fault("holds neither one array nor a weight with its scales")
