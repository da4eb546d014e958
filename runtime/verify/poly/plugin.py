"""What polygraphy's command gets by being installed beside it: our runners, and defaults that fit.

Polygraphy finds `argument_groups` by the entry point `polygraphy.run.plugins`, in every
`polygraphy run`, also of those who do not ask for our runners: so nothing heavy is imported here,
and without one of our runners nothing is changed.
"""

from collections.abc import Callable
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import (
    ComparatorPostprocessArgs,
    CompareFuncSimpleArgs,
    DataLoaderArgs,
    ModelArgs,
    RunnerSelectArgs,
)
from polygraphy.tools.args import util as args_util
from polygraphy.tools.args.base import BaseArgs, BaseRunnerArgs
from polygraphy.tools.script import inline, make_invocable, safe

__all__ = ["argument_groups"]

_POLY = "export_grok.runtime.verify.poly"

Part = Callable[..., Any]

# What polygraphy's own data loaders are told; with any of it theirs is asked for.
_OF_DATA = ("load_inputs_paths", "data_loader_script", "val_range", "data_loader_backend_module")
# What polygraphy's own comparison is told; with any of it theirs is asked for.
_OF_SIMPLE = (
    "rtol",
    "atol",
    "check_error_stat",
    "infinities_compare_equal",
    "save_heatmaps",
    "show_heatmaps",
    "save_error_metrics_plot",
    "show_error_metrics_plot",
    "error_quantile",
)


class _GrokRunnerArgs(BaseRunnerArgs):  # type: ignore[misc]  # polygraphy has no types
    """Grok-1 runner: running a graph of a bundle."""

    name = option = function = text = ""

    def get_name_opt_impl(self) -> tuple[str, str]:
        return self.name, self.option

    def get_extra_help_text_impl(self) -> str:
        return self.text

    def add_to_script_impl(self, script: Any) -> None:
        script.add_import(imports=[self.function], frm=f"{_POLY}.graph_runners")
        script.add_runner(_call(self.arg_groups, self.function))


class RefRunnerArgs(_GrokRunnerArgs):
    """Grok-1 reference: running the PyTorch model."""

    name, option, function = "the PyTorch model of Grok-1, in float32", "grok-ref", "ref_runner"
    text = "It is the reference of whatever it is compared with."


class OrtRunnerArgs(_GrokRunnerArgs):
    """Grok-1 ONNX Runtime: running an ort engine's graph."""

    name, option, function = "ONNX Runtime with the kernels of Grok-1", "grok-ort", "ort_runner"
    text = "As an ort engine runs the graph."


class FunctionsRunnerArgs(_GrokRunnerArgs):
    """Grok-1 function bodies: running the exported graph."""

    name, option = "ONNX Runtime by the function bodies of ops", "grok-functions"
    function = "functions_runner"
    text = "It needs no kernels of ours."


class TrtRunnerArgs(_GrokRunnerArgs):
    """Grok-1 TensorRT: running a plan of a TensorRT engine."""

    name, option, function = "the plan of a trt or trt-rtx engine", "grok-trt", "trt_runner"
    text = "It registers our plugins, and needs a GPU."


_RUNNERS = (RefRunnerArgs, OrtRunnerArgs, FunctionsRunnerArgs, TrtRunnerArgs)


class GraphArgs(BaseArgs):  # type: ignore[misc]
    """Grok-1 graphs: graphs of a bundle of export-grok, for the runners --grok-...

    Depends on:

        - RunnerSelectArgs
        - ModelArgs
        - DataLoaderArgs
        - CompareFuncSimpleArgs
        - ComparatorPostprocessArgs
    """

    def add_parser_args_impl(self) -> None:
        self.group.add_argument(
            "--weights-root",
            metavar="DIR",
            help="Folder that the weights of the bundle are in now, if they were moved.",
            default=None,
        )

    def parse_impl(self, args: Any) -> None:
        """Parse, and take the place of polygraphy's defaults if a runner of ours was selected.

        Attributes:
            weights_root (str): where the weights are.
        """
        self.weights_root = args_util.get(args, "weights_root")
        chosen = set(self.arg_groups[RunnerSelectArgs].runners.keys())
        if not any(runner.option in chosen for runner in _RUNNERS):
            return
        if args_util.get(args, "use_subprocess"):
            # What has computed with threads is not to be forked: the child would wait for them.
            G_LOGGER.critical(
                "the grok runners do not run in subprocesses: leave --use-subprocess away"
            )
        # Others keep these very groups (ComparatorCompareArgs maps --compare to them), so they
        # cannot be replaced by groups of ours. `add_to_script_impl` is what polygraphy lets a
        # group override to make its part of the script.
        data, compare = self.arg_groups[DataLoaderArgs], self.arg_groups[CompareFuncSimpleArgs]
        data.add_to_script_impl = self._data_loader(data, data.add_to_script_impl)
        compare.add_to_script_impl = self._comparison(compare, compare.add_to_script_impl)

    def _data_loader(self, data: Any, theirs: Part) -> Part:
        """Return what adds our inputs to a script, or checks of those that are asked for."""

        def add_to_script(script: Any, *args: Any, **kwargs: Any) -> Any:
            shapes = self.arg_groups[ModelArgs].input_shapes
            if not shapes and not any(getattr(data, name) for name in _OF_DATA):
                script.add_import(imports=["GraphInputs"], frm=f"{_POLY}.data")
                options = {"iterations": data.iterations, "seed": data.seed}
                made = _call(self.arg_groups, "GraphInputs", **options)
                self._inputs = script.set_data_loader(made)
                return self._inputs
            script.add_import(imports=["GivenInputs"], frm=f"{_POLY}.data")
            given = _call(self.arg_groups, "GivenInputs", theirs(script, *args, **kwargs))
            self._inputs = inline(safe("inputs"))
            script.append_suffix(safe("# Checked Inputs\n{:} = {:}", self._inputs, given))
            return self._inputs

        return add_to_script

    def _comparison(self, simple: Any, theirs: Part) -> Part:
        """Return what adds our comparison to a script, unless another one is asked for."""

        def add_to_script(script: Any) -> Any:
            changed = self.arg_groups[ComparatorPostprocessArgs]
            if changed.postprocess or changed.postprocess_func_script:
                return theirs(script)
            if any(getattr(simple, name) is not None for name in _OF_SIMPLE):
                return theirs(script)
            script.add_import(imports=["GraphCompare"], frm=f"{_POLY}.graph_compare")
            return make_invocable("GraphCompare", self._inputs)

        return add_to_script


def argument_groups() -> list[BaseArgs]:
    """Return what `polygraphy run` gets; the last group relies on all before it."""
    return [*(runner() for runner in _RUNNERS), GraphArgs()]


def _call(groups: Any, function: str, *args: Any, **kwargs: Any) -> Any:
    """Return a call on the graph that polygraphy was given."""
    root = groups[GraphArgs].weights_root
    return make_invocable(function, groups[ModelArgs].path, *args, **kwargs, weights_root=root)
