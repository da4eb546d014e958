"""The command line: its entry, its errors, and the list of commands.

Results go to stdout, everything else to stderr.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from export_grok import __version__
from export_grok.commands.bench import bench
from export_grok.commands.build_engine import build_engine
from export_grok.commands.c_library import c_library
from export_grok.commands.chat import chat
from export_grok.commands.check import check
from export_grok.commands.demo_checkpoint import demo_checkpoint
from export_grok.commands.doctor import doctor
from export_grok.commands.evaluate import evaluate
from export_grok.commands.export import export
from export_grok.commands.export_weights import export_weights
from export_grok.commands.generate import generate
from export_grok.commands.import_checkpoint import import_checkpoint
from export_grok.commands.index import index
from export_grok.commands.inspect import inspect
from export_grok.commands.logits import logits
from export_grok.commands.package import package
from export_grok.commands.plant_fault import plant_fault
from export_grok.commands.quantise_report import quantise_report
from export_grok.commands.verify import verify
from export_grok.errors import ExportGrokError

__all__ = ["cli", "main"]

# \b keeps click from filling the lines behind it.
HELP = """\
Grok-1 from its released files to engines that run.

\b
checkpoint -> graphs -> engine -> text
    import     export    build-engine   generate
    check                verify         evaluate
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(args)
    except (Exception, KeyboardInterrupt) as error:
        if not _was_interrupted(error):
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more, from impatience, changes nothing
        click.echo(
            "Aborted. A stage that writes files goes on where it was when run again.", err=True
        )
        sys.exit(130)
    sys.exit(0)


def _run(args: list[str]) -> None:
    try:
        cli.main(args=args, prog_name="export-grok", standalone_mode=False)
    except ExportGrokError as error:
        _tell(str(error), debug="--debug" in args)
        sys.exit(error.exit_code)
    except MemoryError:
        _tell(
            "memory ran out; see with --dry-run what this needs, and free or allow so much",
            debug="--debug" in args,
        )
        sys.exit(1)
    except OSError as error:  # what no stage foresaw: a full disk behind stdout, a failing one
        reason = error.strerror or str(error)
        named = f"{error.filename}: {reason}" if error.filename else reason
        _tell(named, debug="--debug" in args)
        _drop_stdout()
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error; packages on the way may have made it another."""
    while error is not None:
        if isinstance(error, (click.Abort, KeyboardInterrupt)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell(text: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(f"Error: {text}", err=True)


def _drop_stdout() -> None:
    """Let what stdout still holds go nowhere: Python would try to write it at its end."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # not the real one
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@click.group(
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
)
@click.version_option(__version__, prog_name="export-grok")
@click.option("--debug", is_flag=True, help="Show the traceback of an error, and debug logs.")
@click.option("-v", "--verbose", is_flag=True, help="Show what is done, on stderr.")
def cli(debug: bool, verbose: bool) -> None:
    """Set up logging for all commands."""
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


@cli.result_callback()
def _written(_result: object, **_options: object) -> None:
    # Here a reader that went away, or a full disk, is an error that is handled; at the end of
    # the program it is a complaint of Python's.
    sys.stdout.flush()


for command in (
    index,
    import_checkpoint,
    check,
    export,
    build_engine,
    generate,
    chat,
    logits,
    evaluate,
    verify,
    bench,
    inspect,
    doctor,
    quantise_report,
    plant_fault,
    export_weights,
    package,
    c_library,
    demo_checkpoint,
):
    cli.add_command(command)
