"""What cffi reads: the types of export_grok.h, and the functions of interface.h between C and it.

Both are taken from the headers that the C files are compiled with, so there is no second copy.
"""

import re
from pathlib import Path

__all__ = ["declarations"]

HERE = Path(__file__).parent
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_TYPE = re.compile(
    r"^typedef (?:(?:enum|struct) \w+ \{.*?\}[^;]*|[^{;]*);", re.DOTALL | re.MULTILINE
)
_CALLED_BY_C = re.compile(r"^eg_status eg_py_\w+\([^;]*;", re.MULTILINE)
_CALLED_BY_PYTHON = re.compile(r"^eg_status eg_tell_text\([^;]*;", re.MULTILINE)


def declarations() -> str:
    """Return them for `cffi.FFI.cdef`."""
    public, shared = (
        _COMMENT.sub("", (HERE / name).read_text(encoding="utf-8"))
        for name in ("export_grok.h", "interface.h")
    )
    called = "\n".join(_CALLED_BY_C.findall(shared))
    return "\n".join(
        [
            *_TYPE.findall(public),
            *_CALLED_BY_PYTHON.findall(shared),
            f'extern "Python+C" {{\n{called}\n}}',
        ]
    )
