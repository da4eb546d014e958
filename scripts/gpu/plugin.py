"""Step 1: one plugin, its kernel compiled from Triton ahead of time, in a plan of its own."""

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export_grok.config import Dtype
from export_grok.engines.trt.engine import Engine, PlanRuntime
from scripts.gpu.cases import Case, Matrix, product
from scripts.gpu.device import Gpu, KernelDevice
from scripts.gpu.inputs import random_inputs
from scripts.gpu.plan_run import PlanRun, built_plan, flavour_here
from scripts.gpu.references import reference
from scripts.gpu.step import Options, Outcome, Skipped

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["CASE", "check_plugin", "model_of_node", "run_node"]

DTYPE: Dtype = "bfloat16"
# Any numbers are right inputs of it: trtexec draws its own.
CASE = product("alone", DTYPE, 4, Matrix(rows=1024, columns=768, groups=8), parts=4)

SECONDS = 300


def check_plugin(options: Options) -> Outcome:
    """Build the plan of one plugin node, run it, and have trtexec run it."""
    flavour = flavour_here(options)
    if flavour.any_gpu:
        raise Skipped(f"{flavour.package} has no plugins")
    from export_grok.export.graphs import write_graph

    gpu = Gpu()
    file = Path(options.folder, "plugin.onnx")
    write_graph(model_of_node(CASE), file)
    plan = built_plan(flavour, file, gpu.sm)
    engine = PlanRuntime(flavour).engine(plan)
    excess = run_node(gpu, CASE, engine, np.random.default_rng(options.seed))
    said, ran = by_trtexec(plan)
    right = excess <= 1
    return Outcome(
        status="pass" if right and ran else "fail",
        text=f"{'right' if right else 'wrong'}, {excess:.2g} of the bound; {said}",
        figures={"excess": excess, "plan_bytes": plan.stat().st_size},
    )


def model_of_node(case: Case) -> "ir.Model":
    """Return a graph of one plugin node, with its function body."""
    import onnx_ir as ir
    from onnx_ir.tape import Tape

    from export_grok.plugins.op import DOMAIN
    from export_grok.plugins.plugin_graph import plugin_node
    from export_grok.plugins.registry import part

    call, node = case.call, case.node
    letters = {"T": call.dtype, "scale": call.scales}
    kinds = {"float32": ir.DataType.FLOAT}
    inputs = []
    for row in node.inputs:
        name = letters.get(row.dtype, row.dtype)
        dtype = kinds.get(name) or ir.DataType[name.upper()]
        shape = ir.Shape(call.shapes[row.name])
        inputs.append(ir.Value(name=row.name, shape=shape, type=ir.TensorType(dtype)))
    tape = Tape()
    outputs = plugin_node(tape, node.op_type, inputs, call.attributes)
    for value, row in zip(outputs, node.outputs, strict=True):
        value.name = row.name
    graph = ir.Graph(
        inputs, outputs, nodes=tape.nodes, opset_imports={"": 24, DOMAIN: 1}, name="one_plugin"
    )
    model = ir.Model(graph, ir_version=11)
    for body in part(node.op, "trt_function").FUNCTIONS:
        function = ir.serde.deserialize_function(body.to_function_proto())
        model.functions[function.identifier()] = function
    return model


def run_node(
    device: KernelDevice, case: Case, engine: Engine, random: np.random.Generator
) -> float:
    """Return the largest error of a run as a part of its bound."""
    run = PlanRun(device, engine)
    inputs = random_inputs(case, random)
    run.write(inputs)
    run.enqueue()
    expected = reference(case.op_type, case.call, inputs)
    names = [row.name for row in case.node.outputs]
    return max(within.excess(run.read(name)) for name, within in zip(names, expected, strict=True))


def by_trtexec(plan: Path) -> tuple[str, bool]:
    """Have trtexec run a plan, in which no Python is; return a sentence, and whether it did."""
    program = shutil.which("trtexec")
    if program is None:
        return "trtexec is not on PATH", True
    command = [program, f"--loadEngine={plan}", "--iterations=10", "--duration=0", "--warmUp=0"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"trtexec hangs: not done after {SECONDS} s", False
    if done.returncode == 0 and "PASSED" in done.stdout:
        return "trtexec runs it", True
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["it says nothing"]
    return f"trtexec fails with {done.returncode}: {last[0]}", False
