"""The steps in their order."""

from scripts.gpu.step import Step

__all__ = ["STEPS", "step_of"]

STEPS = (
    Step(key="0", title="what is here", function="scripts.gpu.facts:facts"),
    Step(
        key="a",
        title="every kernel, loaded from its PTX, equals its formula in float64",
        function="scripts.gpu.check:check_kernels",
    ),
    Step(
        key="b",
        title="share of the memory bandwidth that each kernel reaches",
        function="scripts.gpu.bandwidth:measure_kernels",
    ),
    Step(
        key="1",
        title="a plan with one plugin, built, run, and run by trtexec",
        function="scripts.gpu.plugin:check_plugin",
    ),
    Step(
        key="2",
        title="a layer with weights as inputs equals ONNX Runtime",
        function="scripts.gpu.layer_steps:check_values",
    ),
    Step(
        key="3",
        title="a layer writes its caches in place, the new slots alone",
        function="scripts.gpu.layer_steps:check_caches",
    ),
    Step(
        key="4",
        title="inputs and outputs are row-major, no weight is reformatted",
        function="scripts.gpu.layer_steps:check_formats",
    ),
    Step(
        key="5",
        title="one layer, then 64, captured as a CUDA graph, equal the plain run",
        function="scripts.gpu.layer_steps:check_capture",
    ),
    Step(
        key="6",
        title="the sum of two ranks in a plan, plain and captured",
        function="scripts.gpu.ranks:check_ranks",
    ),
    Step(
        key="7",
        title="the demo model, built and run as a user does, equals the CPU engine",
        function="scripts.gpu.demo:check_demo",
    ),
)


def step_of(key: str) -> Step:
    """Return the step of that key."""
    return next(step for step in STEPS if step.key == key)
