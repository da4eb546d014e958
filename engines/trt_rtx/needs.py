"""What plans of TensorRT-RTX need: run or looked at, what those of TensorRT do."""

from export_grok.config import EngineOptions
from export_grok.engines.demand import Graphs
from export_grok.engines.trt import needs
from export_grok.engines.trt.needs import interpreter_needs, probe_needs, session_needs
from export_grok.needs import Needs

__all__ = ["build_needs", "interpreter_needs", "probe_needs", "session_needs"]


def build_needs(graphs: Graphs, options: EngineOptions) -> Needs:
    """Return what the plans of a folder of graphs take; nothing if they are there."""
    return needs.build_needs(graphs, options, "trt-rtx")
