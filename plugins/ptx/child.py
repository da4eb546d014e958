"""Compiles one kernel to PTX, as a program of its own: `python -m ... FOLDER`.

Triton decides when it is imported whether kernels are compiled or interpreted, and LLVM ends the
process with some errors: so this is not done in the process that asks.

FOLDER holds `source.json`, a `KernelSource`; `kernel.json` is written there.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_grok.optional import require

__all__ = ["main"]


def main(folder: Path) -> None:
    """Write PTX, and what Triton says of it, into `kernel.json`.

    Raises:
        SystemExit: the kernel does not compile; the text says why.
    """
    source = json.loads((folder / "source.json").read_text())
    try:
        kernel = _compiled(source)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    (folder / "kernel.json").write_text(json.dumps(kernel))


def _compiled(source: Mapping[str, Any]) -> dict[str, Any]:
    triton = require("triton", extra="triton")
    function = _function(source)
    types = [kind for _, kind in source["arguments"]]
    types += ["constexpr"] * len(source["constants"])
    aligned = [
        index for index, (name, _) in enumerate(source["arguments"]) if name in source["aligned"]
    ]
    compiled = triton.compile(
        triton.compiler.ASTSource(
            function,
            signature=dict(zip(function.arg_names, types, strict=True)),
            constexprs=source["constants"],
            attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
        ),
        target=triton.backends.compiler.GPUTarget("cuda", source["sm"], 32),
        options={
            "num_warps": source["num_warps"],
            "num_stages": source["num_stages"],
            "ptx_version": source["ptx_version"],
            # said, as Triton's default is about to change
            "enable_fp_fusion": True,
        },
    )
    said = compiled.metadata
    return {
        "ptx": compiled.asm["ptx"],
        "num_warps": said.num_warps,
        "shared": said.shared,
        "scratch": {
            "global_scratch": said.global_scratch_size,
            "profile_scratch": said.profile_scratch_size,
        },
    }


def _function(source: Mapping[str, Any]) -> Any:
    """Return the Triton function; its arguments are what the node declares, then constants.

    It is loaded from its file, whose text is in the hash.
    """
    spec = importlib.util.spec_from_file_location(source["module"], source["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source["module"]] = module
    spec.loader.exec_module(module)
    function = getattr(module, source["kernel"])
    declared = [name for name, _ in source["arguments"]]
    has = [name.lower() for name in function.arg_names[: len(declared)]]
    if has != [name.lower() for name in declared]:
        raise TypeError(
            f"its first arguments are {', '.join(has)}; its node declares {', '.join(declared)}"
        )
    constants = function.arg_names[len(declared) :]
    if set(constants) != set(source["constants"]):
        raise TypeError(
            f"its constants are {', '.join(constants)}; its node's are "
            f"{', '.join(source['constants'])}"
        )
    return function


if __name__ == "__main__":
    main(Path(sys.argv[1]))
