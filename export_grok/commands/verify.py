"""`export-grok verify`: whether an engine computes what the model says."""

import json
import os
from pathlib import Path

import click

from export_grok.commands.options import FOLDER, json_option, threads_option, weights_root_option
from export_grok.commands.preflight import asking, preflight_options
from export_grok.errors import VerificationError
from export_grok.optional import require

__all__ = ["verify"]


def _layers(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no list of layers; write e.g. 0,5,63.") from error


def _tolerances(
    _context: click.Context, _option: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    found = {}
    for value in values:
        name, equals, number = value.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError as error:
            what = f"{number!r} is no number" if equals else "it has no ="
            raise click.BadParameter(
                f"{value!r}: {what}; write TENSOR=NUMBER, e.g. h_out=1e-4."
            ) from error
    return found


@click.command()
@click.argument("bundle", type=FOLDER)
@click.option(
    "--against",
    default="torch",
    show_default=True,
    metavar="torch|ort|goldens|PATH",
    help="What is right: the PyTorch model on the bundle's weights, its graphs by function "
    "bodies, results of the original program, or the path of another bundle, of a checkpoint or "
    "of a goldens.npz.",
)
@click.option(
    "--layers",
    callback=_layers,
    metavar="N,...",
    help="Compare these layers only, and leave the free run out.",
)
@click.option(
    "--tokens",
    type=int,
    default=8,
    show_default=True,
    help="Tokens of each row that are decoded singly, and of greedy answers.",
)
@click.option(
    "--prompt", type=int, default=24, show_default=True, help="Tokens of the longest row before."
)
@click.option("--text", type=FOLDER, help="UTF-8 text to read. [default: some verses]")
@click.option(
    "--tolerance",
    "tolerances",
    multiple=True,
    callback=_tolerances,
    metavar="TENSOR=NUMBER",
    help="Allow a tensor another error; may be given several times.",
)
@click.option(
    "--graphs/--no-graphs",
    default=True,
    help="Compare graph by graph, or the whole engine only, running free: plans of several "
    "ranks are compared no other way.  [default: graphs]",
)
@click.option("--keep-going", is_flag=True, help="Compare what follows a failed graph too.")
@click.option(
    "--interpret",
    is_flag=True,
    help="TensorRT without a GPU: run no plans, but the graphs they are built from, in float32.",
)
@click.option(
    "--report", type=FOLDER, help="Write index.html and verification.json into this folder."
)
@threads_option
@weights_root_option
@json_option
@preflight_options
def verify(
    bundle: Path,
    against: str,
    layers: tuple[int, ...] | None,
    tokens: int,
    prompt: int,
    text: Path | None,
    tolerances: dict[str, float],
    graphs: bool,
    keep_going: bool,
    interpret: bool,
    report: Path | None,
    threads: int | None,
    weights_root: Path | None,
    as_json: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Hold the engine in BUNDLE to a reference: graph by graph, then running free.

    Leaves with exit code 1 at the first tensor that is farther off than its tolerance, and says
    where, by how much, and which known mistake looks just so.
    """
    for package in ("polygraphy", "torch", "onnx"):
        # Not imported yet: threads that wait by spinning, as torch's do, take the engine's cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        require(package, extra="verify")
    if report is not None:
        require("matplotlib", extra="verify")
    from export_grok.runtime.verify.options import VerifyOptions
    from export_grok.runtime.verify.result import failure
    from export_grok.runtime.verify.verify import verify_bundle

    result = verify_bundle(
        bundle,
        VerifyOptions(
            against=against,
            layers=layers,
            tokens=tokens,
            prompt=prompt,
            text=text,
            tolerances=tolerances,
            keep_going=keep_going or report is not None,
            graphs=graphs,
            interpret=interpret,
        ),
        threads=threads,
        weights_root=weights_root,
        on_needs=asking(
            force=force,
            dry_run=dry_run,
            writes="nothing" if report is None else f"a report into {report}",
        ),
    )
    if report is not None:
        from export_grok.runtime.verify.report import write_report

        click.echo(f"report: {write_report(result, report)}", err=True)
    if as_json:
        click.echo(json.dumps(result.to_dict()))
    else:
        from export_grok.runtime.verify.table import print_verification

        print_verification(result)
    if not result.passed:
        raise VerificationError(
            f"{bundle} does not compute what it must: {failure(result)}; do not use it before "
            "that is explained"
        )
