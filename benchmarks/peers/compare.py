"""Run the same weights through export-grok and its peers, in alternating rounds.

    python benchmarks/peers/compare.py DIR --rounds 7 --report docs/performance.md

DIR takes 8 GB: a random checkpoint and its copies in the formats of the peers, made once, and the
results of every round, so that a comparison that was broken off goes on. Needed are

    pip install -c constraints.txt -e ".[export,onnxruntime,plot]"

and for the peer `llama`, here or in an environment of its own (then give --llama-python; numpy is
all that it needs besides):

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python

Seven rounds take some 20 minutes on 2 cores. Measure on a machine that does nothing else: the
report says what makes it doubtful.
"""

import contextlib
import hashlib
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from peers import PEERS, reason_to_leave_out
from prepare import prepare
from report import write_report
from results import Results
from rounds import Rounds
from tables import Comparison

from export_grok.errors import ExportGrokError
from export_grok.machine import this_machine
from export_grok.plugins.kernels import native_kernels

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("folder", metavar="DIR", type=FILE)
@click.option("--rounds", default=7, show_default=True, help="In each, every peer once.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([peer.name for peer in PEERS]),
    help="Measure this peer; may be repeated.",
)
@click.option("--tokens", default=64, show_default=True, help="Tokens to decode in a round.")
@click.option("--threads", type=int, help="Of every peer.  [default: as many as cores]")
@click.option("--llama-python", default=sys.executable, help="Interpreter with llama-cpp-python.")
@click.option("--fresh", is_flag=True, help="Forget earlier rounds, as after a change of a peer.")
@click.option("--report", "report_file", type=FILE, help="Markdown file to write, with a picture.")
def main(
    folder: Path,
    rounds: int,
    only: Sequence[str],
    tokens: int,
    threads: int | None,
    llama_python: str,
    fresh: bool,
    report_file: Path | None,
) -> None:
    """Compare the peers in DIR and print the tables; with --rounds 0 from earlier results."""
    # Ended by any signal, it takes the peer that runs along: it would spoil what is measured next.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threads = threads or this_machine().cores
    pythons = {peer.name: sys.executable for peer in PEERS} | {"llama": llama_python}
    chosen = [peer for peer in PEERS if peer.name in only or not only]
    reasons = {peer.name: reason_to_leave_out(peer, pythons[peer.name]) for peer in chosen}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        click.echo(f"{name} is left out: {reason}", err=True)
    peers = [peer for peer in chosen if peer.name not in left_out]

    with _told_in_a_line():
        weights, reference = prepare(folder, {peer.model for peer in peers})
        results_file = folder / "results.jsonl"
        if fresh:
            results_file.unlink(missing_ok=True)
        results = Results(results_file, _settings(tokens, threads))
        Rounds(folder, weights.index, reference, tokens, threads, pythons).run(
            peers, rounds, results
        )
        if not results.rows:
            raise click.ClickException(
                f"{results_file} has no results for these threads, tokens and kernels; "
                "measure with --rounds 7"
            )
        comparison = Comparison(
            config=weights.config,
            results=results,
            peers=[peer for peer in PEERS if peer.name in results.rows],
        )
        click.echo(comparison.tables())
        if report_file:
            from picture import draw

            picture = report_file.with_suffix(".png")
            draw(comparison, picture)
            machine = this_machine()
            write_report(
                report_file,
                comparison,
                left_out=left_out,
                machine={
                    "processor": f"{machine.cpu}, {machine.cores} cores",
                    "threads": str(threads),
                    "tokens": str(tokens),
                },
                versions=_versions(results),
                picture=picture.name,
            )


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    try:
        yield
    except ExportGrokError as error:
        raise click.ClickException(str(error)) from error


def _settings(tokens: int, threads: int) -> dict[str, Any]:
    """Return what must be the same for rounds to be compared."""
    kernels = native_kernels()
    library = kernels.library.read_bytes() if kernels.library else b""
    return {
        "tokens": tokens,
        "threads": threads,
        "cpu": this_machine().cpu,
        "kernels": kernels.isa,
        "library": hashlib.sha256(library).hexdigest()[:12],
    }


def _versions(results: Results) -> dict[str, str]:
    kernels = native_kernels()
    about = {name: fact for row in results.all_rows() for name, fact in row["about"].items()}
    return {
        **{name: about[name] for name in sorted(about)},
        "export-grok": version("export-grok"),
        "kernels": kernels.isa or f"built into ONNX Runtime: {kernels.reason}",
        "system": this_machine().system,
    }


if __name__ == "__main__":
    main()
