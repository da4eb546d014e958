"""The calls that kernels are checked and measured with are those of the graphs that are built."""

import itertools

import pytest

from export_grok.config import GROK_1
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.record import Phase, Sizes
from export_grok.export.contract import GRAPH_KINDS
from export_grok.export.trace import template_from_config
from export_grok.plugins.plugin_graph import plugin_calls
from export_grok.plugins.plugin_node import Call
from scripts.gpu.cases import decode_cases, prefill_cases

RANKS = (1, 8)
BATCHES = (1, 8)

Told = tuple[object, ...]


def told(op_type: str, call: Call) -> Told:
    """Return what tells calls apart; which expert is none of it."""
    attributes = {name: value for name, value in call.attributes.items() if name != "expert"}
    # a graph holds float32
    numbers = {name: pytest.approx(value, rel=1e-6) for name, value in attributes.items()}
    return op_type, dict(call.shapes), numbers, call.dtype, call.scales


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_every_plugin_node_of_the_full_graphs_is_checked(ranks: int) -> None:
    for kind in GRAPH_KINDS:
        template = template_from_config(kind, GROK_1, "bfloat16", "int8", ranks)
        runs: list[tuple[Phase, int]] = [("prefill", 1), *(("decode", rows) for rows in BATCHES)]
        for phase, batch in runs:
            sizes = Sizes(tensor_parallel=ranks, batch=batch)
            model = lower_template(template, kind, "bfloat16", sizes, phase)
            known = [*prefill_cases("bfloat16", ranks)]
            known += itertools.chain(*(decode_cases("bfloat16", ranks, n) for n in (1, batch)))
            cases = [told(case.op_type, case.call) for case in known]
            for node, call in plugin_calls(model.graph):
                assert told(node.op_type, call) in cases, f"{kind} {phase} B {batch}: {call}"
