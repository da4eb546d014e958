"""Build plans by TensorRT-RTX: on a CPU, for GPUs it supports, without plugins.

Plugin nodes run by their function bodies there: right, and slow at full size. What such a build
proves of TensorRT itself is told in docs/tensorrt.md.
"""

from export_grok.artifacts import Bundle
from export_grok.config import ENGINE, Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.trt.build import DTYPES, build_plans, check_plans, summary
from export_grok.engines.trt.module import flavour_of

__all__ = ["BACKEND", "DTYPES", "build_engine", "check_options", "summary"]

BACKEND = "trt-rtx"


def build_engine(graphs: Bundle, options: EngineOptions = ENGINE) -> Bundle:
    """Build the plans of a folder of graphs; see `engines.trt.build.build_plans`."""
    return build_plans(graphs, options, flavour_of(BACKEND))


def check_options(
    config: GrokConfig, dtype: Dtype, head: HeadDtype, options: EngineOptions
) -> None:
    """Hold options to model and machine; see `engines.trt.build.check_plans`."""
    check_plans(config, dtype, head, options, flavour_of(BACKEND))
