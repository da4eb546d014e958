"""The graph that polygraphy was given the file of: which of a bundle's graphs it is."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polygraphy.logger import G_LOGGER

from export_grok.artifacts import MANIFEST, RANK_GRAPHS, Bundle, graph_file, open_bundle
from export_grok.engines.probe import GraphName
from export_grok.errors import BundleError, ExportGrokError
from export_grok.export.contract import GraphKind

__all__ = ["GraphFile", "plain_errors"]

TEMPLATE = "template"

_NAME = re.compile(
    r"(?P<kind>embedding|layer|head_all|head)(_(?P<layer>\d+))?(\.(?P<variant>[\w-]+))?\.onnx"
)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Make errors that a user can act on polygraphy's, which its command says without traceback.

    Raises:
        PolygraphyException: with the text of the error, which is logged too.
    """
    try:
        yield
    except ExportGrokError as error:
        G_LOGGER.critical(str(error))


@dataclass(frozen=True, kw_only=True)
class GraphFile:
    """A graph of a bundle, found by the path of its file.

    Attributes:
        path: of the file.
        bundle: that it is of; a folder of graphs without an engine too.
        graph: which graph.
        variant: the backend it is lowered for; empty for the graph as it is exported.
    """

    path: Path
    bundle: Bundle
    graph: GraphName
    variant: str

    @classmethod
    def at(cls, path: str | Path, *, weights_root: str | Path | None = None) -> "GraphFile":
        """Return the graph in a file.

        Args:
            path: of the file.
            weights_root: where the weights of the bundle are, if they were moved.

        Raises:
            BundleError: it is no graph of a bundle or none that runs, or the bundle is unfinished
                or damaged.
        """
        path = Path(path)
        folder = path.parent
        if not (folder / MANIFEST).exists():
            raise BundleError(_outside(path))
        bundle = open_bundle(folder, weights_root=Path(weights_root) if weights_root else None)
        match = _NAME.fullmatch(path.name)
        if match is None or path.name not in bundle.manifest.files:
            raise BundleError(
                f"{path} is no graph of the bundle that it lies in: its graphs are "
                f"{_graphs(bundle)}"
            )
        if match["variant"] == TEMPLATE:
            wanted = graph_file(match["kind"], 0 if match["kind"] == "layer" else None)
            raise BundleError(
                f"{path} is a template: its weights are inputs; give {folder / wanted}, which has "
                "them"
            )
        layer = match["layer"]
        return cls(
            path=path,
            bundle=bundle,
            graph=GraphName(
                kind=cast(GraphKind, match["kind"]), layer=None if layer is None else int(layer)
            ),
            variant=match["variant"] or "",
        )


def _outside(path: Path) -> str:
    """Return what is wrong with a file that no manifest lies beside."""
    if not path.is_file():
        return f"{path} is no file; give a graph of a bundle, e.g. engine/layer_00.onnx"
    bundle = path.parent.parent
    if (bundle / MANIFEST).exists():
        what = "a part of a graph" if path.parent.name == RANK_GRAPHS else "made for an engine"
        name = re.sub(r"(\.[\w-]+)*\.onnx$", ".onnx", path.name)
        whole = bundle / name
        if not whole.exists():
            whole = bundle / graph_file("layer", 0)
        return (
            f"{path} is {what}, and does not run alone: give the whole graph, {whole}, or hold "
            f"the engine to the model with export-grok verify {bundle}"
        )
    return (
        f"{path} lies in no bundle: there is no {MANIFEST} beside it. The grok runners take a "
        "graph in the --out folder of build-engine or export, e.g. engine/layer_00.onnx"
    )


def _graphs(bundle: Bundle) -> str:
    layers = bundle.config.num_layers
    numbers = [0] if layers == 1 else [0, layers - 1]
    names = ["embedding.onnx", *(graph_file("layer", number) for number in numbers)]
    if layers > 2:
        names.insert(2, "...")
    return ", ".join([*names, "head.onnx", "head_all.onnx"])
