"""Build the plans of full-size Grok-1 on a CPU, and say how long each took: a table in Markdown.

    python benchmarks/plans.py [--tp 1,8] [--sm 80,89,120] [--batch 1]

The graphs are traced without weights. The plans are of TensorRT-RTX, which has no plugins: nodes
are built by their function bodies.
"""

import resource
import tempfile
import time
from pathlib import Path

import click

from export_grok.config import GROK_1
from export_grok.engines.trt.contract import check_contract
from export_grok.engines.trt.lower import lower_template
from export_grok.engines.trt.module import flavour_of
from export_grok.engines.trt.plan import plan_from_graph
from export_grok.engines.trt.record import PHASES, Sizes
from export_grok.export.contract import GRAPH_KINDS
from export_grok.export.graphs import write_graph
from export_grok.export.trace import template_from_config

KB = 1000


@click.command()
@click.option("--tp", default="1,8", show_default=True, help="Tensor-parallel sizes.")
@click.option("--sm", default="80,89,120", show_default=True, help="GPU architectures.")
@click.option("--batch", default=1, show_default=True, help="Rows of a decode step.")
def plans(tp: str, sm: str, batch: int) -> None:
    """Print a row for each graph."""
    sms = [int(part) for part in sm.split(",")]
    flavour = flavour_of("trt-rtx")
    print("| ranks | graph | phase | nodes | trace and lower, s |", end="")
    print("".join(f" SM{one}: build, s | plan, KB |" for one in sms))
    print("|" + "---|" * (5 + 2 * len(sms)))
    for ranks in (int(part) for part in tp.split(",")):
        sizes = Sizes(tensor_parallel=ranks, batch=batch, max_length=GROK_1.sequence_len)
        for kind in GRAPH_KINDS:
            started = time.perf_counter()
            template = template_from_config(kind, GROK_1, "bfloat16", "float32", ranks)
            for phase in PHASES:
                model = lower_template(template, kind, "bfloat16", sizes, phase)
                check_contract(model)
                made = time.perf_counter() - started
                with tempfile.TemporaryDirectory() as folder:
                    graph = Path(folder, "graph.onnx")
                    write_graph(model, graph)
                    cells = []
                    for one in sms:
                        out = Path(folder, "plan")
                        plan = plan_from_graph(graph, out, flavour=flavour, sm=one)
                        cells += [f"{plan.seconds:.2f}", f"{plan.bytes / KB:.0f}"]
                count = sum(1 for _ in model.graph.all_nodes())
                row = [str(ranks), kind, phase, str(count), f"{made:.1f}", *cells]
                print(f"| {' | '.join(row)} |", flush=True)
                started = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"\nTensorRT-RTX {flavour.version()}; peak memory {peak:.2f} GB.")


if __name__ == "__main__":
    plans()
