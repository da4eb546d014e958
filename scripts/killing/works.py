"""The commands that are broken off, each on a small checkpoint."""

# NOTE: no onnx_ir and no torch at the top: a process that has them is slow to split.

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export_grok.config import GrokConfig
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.weights_to.export import plan_export
from export_grok.export.weights_to.options import WeightsOptions
from scripts.killing.answers import OUT, Answers, write_demo_bundle, write_requests
from scripts.killing.work import Bundles, Stores, Work

__all__ = ["WORKS", "keep_traces", "made", "trace_file"]

_BUILD = ("build-engine", "{checkpoint}", "--out", "OUT")
_COPY = (*_BUILD, "--weights", "copy")
_ASKED = ("{bundle}", "--jsonl", "{requests}", "--batch", "2", "--threads", "1")
_ANSWER = ("generate", *_ASKED, "--out", f"OUT/{OUT}")

# A command, and one that has written its folder before.
WORKS: dict[str, tuple[type[Work], tuple[str, ...], tuple[str, ...]]] = {
    "build": (Bundles, (*_COPY, "--head", "int8"), ()),
    "ranks": (Bundles, (*_BUILD, "--tp", "2"), ()),
    "overwrite": (Bundles, (*_COPY, "--overwrite"), (*_COPY, "--head", "int8")),
    "import": (Stores, ("import", "{checkpoint}", "OUT"), ()),
    "import-overwrite": (
        Stores,
        ("import", "{checkpoint}", "OUT", "--overwrite"),
        ("import", "{other}", "OUT"),
    ),
    "import-foreign": (Stores, ("import", "{foreign}", "OUT"), ()),
    "answers": (Answers, _ANSWER, ()),
    "answers-overwrite": (Answers, (*_ANSWER, "--overwrite"), (*_ANSWER, "--seed", "5")),
}


def made(name: str, checkpoint: Path, scratch: Path, bundle: Path | None = None) -> Work:
    """Return a command.

    Args:
        name: of it.
        checkpoint: that it reads.
        scratch: folder for other weights of the same sizes, for the same by other names, and for
            what else a command reads.
        bundle: that answers requests; one of the demo is built if there is none.
    """
    kind, command, before = WORKS[name]
    places = {"checkpoint": checkpoint}
    for place, write in _WRITTEN.items():
        places[place] = bundle if bundle and place == "bundle" else scratch / place
        if f"{{{place}}}" in (*command, *before) and not places[place].exists():
            write(checkpoint, places[place])
    filled = [tuple(word.format(**places) for word in words) for words in (command, before)]
    return kind(name=name, command=filled[0], before=filled[1])


def _write_other(checkpoint: Path, out: Path) -> None:
    write_random_checkpoint(GrokConfig.from_file(checkpoint / "config.json"), out)


def _write_foreign(checkpoint: Path, out: Path) -> None:
    plan_export(checkpoint, out, WeightsOptions(to="hf")).folder.write()


_WRITTEN: dict[str, Callable[[Path, Path], None]] = {
    "other": _write_other,
    "foreign": _write_foreign,
    "bundle": write_demo_bundle,
    "requests": write_requests,
}


def trace_file(kind: str, dtype: str, head: str, ranks: int) -> str:
    """Return the name of the file that a trace is kept in."""
    return f"{kind}.{dtype}.{head}.{ranks}.onnx"


def keep_traces(folder: Path) -> None:
    """Have graphs be traced once for all builds; a trace is kept in a folder for other runs."""
    import onnx_ir as ir

    from export_grok.export import graph_folder, trace
    from export_grok.export.graphs import write_graph

    plain: Callable[..., ir.Model] = trace.template_from_config

    @functools.cache
    def kept(
        kind: Any, config: Any, dtype: Any, head: str = "float32", ranks: int = 1
    ) -> ir.Model:
        path = folder / trace_file(kind, dtype, head, ranks)
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_graph(plain(kind, config, dtype, head, ranks), path)
        return ir.load(path)

    for module in (graph_folder, trace):
        module.template_from_config = kept  # type: ignore[attr-defined]
