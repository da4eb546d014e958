"""Compile the kernels of all plugin nodes at the sizes of Grok-1 and print what they need.

    python benchmarks/kernels.py --report docs/kernels.md

No GPU is needed, nothing is measured, and nothing runs but the compilers. What was compiled before
is taken from the disk; the first time it takes some minutes. Needed is

    pip install -c constraints.txt -e ".[triton]"
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from kernel_calls import SLOTS, TENSOR_PARALLEL, Case, distinct, matrices
from sections import write_section
from stages import told_in_a_line

from export_grok.config import DTYPES, Dtype
from export_grok.plugins.ptx.compiler import CompiledKernel, compile_all
from export_grok.plugins.ptx.ptxas import find_ptxas, ptxas_version
from export_grok.plugins.ptx.source import TARGETS, triton_version
from export_grok.plugins.registry import plugin_nodes

ABOVE = """\
## What the kernels need

A row is one kernel: calls whose sizes are aligned alike share it. Kernels for several dtypes T
share a row where all figures are the same. Under an architecture stand registers of a thread /
bytes it spills / bytes of shared memory of a block. Triton {triton}, ptxas {ptxas}.

{kernels}

The matrices, and R, the groups of rows that have scales of their own:

{matrices}"""

BELOW = """\
TP is the tensor-parallel size, B the batch of the decode step; prefill is the same for any chunk.
The cache has {slots} slots. Again, and the same on any machine with these versions:

    python benchmarks/kernels.py --report docs/kernels.md"""


@click.command()
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=DTYPES,
    show_default=True,
    help="Of the graphs.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    help="Markdown file to write a section of.",
)
def main(dtypes: tuple[Dtype, ...], report: Path | None) -> None:
    """Compile all kernels for all architectures and print a table."""
    with told_in_a_line():
        nodes, groups = plugin_nodes(), list(distinct(dtypes).values())
        calls = [
            (nodes[group[0].op_type], group[0].call, sm) for group in groups for sm in TARGETS
        ]
        kernels = iter(compile_all(calls))
        rows: dict[tuple[str, ...], list[str]] = {}
        for group in groups:
            row = _row(group, [next(kernels) for _ in TARGETS])
            rows.setdefault(row, []).append(group[0].call.dtype)
        head = ["kernel", "calls", "arguments", "warps", *(t.name for t in TARGETS.values()), "T"]
        above = ABOVE.format(
            triton=triton_version(),
            ptxas=ptxas_version(find_ptxas()),
            kernels=_table(head, sorted((*row, ", ".join(same)) for row, same in rows.items())),
            matrices=_matrices_table(),
        )
        click.echo(above)
        if report:
            write_section(report, "kernels", above=above, below=BELOW.format(slots=SLOTS))


def _row(group: Sequence[Case], kernels: Sequence[CompiledKernel]) -> tuple[str, ...]:
    """Return a row of the table: the calls that share a kernel, and it for each architecture."""
    graphs: dict[str, list[str]] = {}
    for case in group:
        graphs.setdefault(case.graph, []).extend([case.matrix] if case.matrix else [])
    calls = [f"{graph}: {', '.join(names)}" if names else graph for graph, names in graphs.items()]
    first = kernels[0]
    figures = (
        f"{kernel.registers} / {kernel.spills} / "
        f"{kernel.shared_bytes + kernel.static_shared_bytes:,}"
        for kernel in kernels
    )
    return (
        first.name,
        "; ".join(calls),
        f"{first.parameters - len(first.scalars)} pointers, {len(first.scalars)} int32",
        str(first.num_warps),
        *figures,
    )


def _matrices_table() -> str:
    sizes: Mapping[str, list[str]] = {name: [name] for name in matrices(1)}
    for ranks in TENSOR_PARALLEL:
        for name, matrix in matrices(ranks).items():
            lead = f"{matrix.experts} x " if matrix.experts else ""
            sizes[name].append(f"{lead}{matrix.rows} x {matrix.columns}, R {matrix.groups}")
    head = ["matrix", *(f"TP {ranks}" for ranks in TENSOR_PARALLEL)]
    return _table(head, list(sizes.values()))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    main()
