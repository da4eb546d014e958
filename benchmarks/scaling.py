"""Tables of docs/tensor_parallel.md and docs/scaling.md: Grok-1 on several GPUs, on paper.

    python benchmarks/scaling.py tensor_parallel
    python benchmarks/scaling.py scaling

Nothing is measured: bytes and sums are counted, times are those of export/time_model.py.
"""

import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import comb

import click

from export_grok.config import GROK_1, TENSOR_PARALLEL_SIZES, GrokConfig, RankConfig
from export_grok.engines.trt.memory import memory_of
from export_grok.engines.trt.record import Sizes
from export_grok.export.data_sheets import DATA_SHEETS, INFINIBAND
from export_grok.export.parameters import Parameter, layer_parameters, model_parameters
from export_grok.export.partition import cut_axis
from export_grok.export.time_model import (
    BANDWIDTH_SHARE,
    Estimate,
    Workload,
    estimate,
    expected_experts,
    rank_bytes,
    rank_step,
)

LAYER = "layers.0."
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192)
CHUNK = 256
LATENCIES = (5, 12, 20, 40)
NODE = 8


@click.group()
def main() -> None:
    """Print tables in Markdown."""


@main.command("tensor_parallel")
def tensor_parallel() -> None:
    """Print what is cut where, and other ways to cut."""
    print_table(["tensor", "shape", "cut", *(f"TP {n}" for n in TENSOR_PARALLEL_SIZES)], tensors())
    print_table(["table of the vocabulary", "held", "read", "sums", "us"], vocabulary())
    head = ["rows", "experts chosen"]
    head += [f"TP {n}: {way}" for n in (2, 4, 8) for way in ("cut", "whole", "ratio")]
    print_table(head, placements())


@main.command("scaling")
def scaling() -> None:
    """Print memory and time of one and of two machines of 8 GPUs."""
    head = ["GPU", "GB", "weights", "chunk of a prompt", *(f"cache, {c:,}" for c in CONTEXTS)]
    print_table([*head, f"rows of {CONTEXTS[-1]:,}"], memory())
    for gpu in ("h100", "h200"):
        print(f"8 x {DATA_SHEETS[gpu].name}\n")
        print_table(
            ["rows", *(f"context {c:,}" for c in CONTEXTS), "ms to read", "to sum"], speed(gpu)
        )
    print_table(
        ["rows in all", "one machine", "two, rows shared out", "two, layers shared out"], nodes()
    )
    print_table(["GPU", *(f"TP {n}" for n in TENSOR_PARALLEL_SIZES)], sizes())
    print_table(["", *(f"{us} us" for us in LATENCIES)], assumptions())


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, and an empty line behind it."""
    print(f"| {' | '.join(head)} |")
    print(f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def tensors() -> Iterable[list[str]]:
    """Yield each tensor with its bytes on one rank."""
    ranks = [GROK_1.for_rank(size) for size in TENSOR_PARALLEL_SIZES]
    once = [p for p in model_parameters(GROK_1).values() if not p.name.startswith("layers.")]
    layer = list(layer_parameters(GROK_1, 0).values())
    for parameter in (*layer, *once):
        name = parameter.name.removeprefix(LAYER)
        axis = cut_axis(name, parameter.shape, ranks[-1])
        shape = " x ".join(map(str, parameter.shape))
        yield [
            f"`{name}`",
            shape,
            cut_in_words(name, parameter, axis),
            *bytes_on(ranks, [parameter]),
        ]
    yield ["a layer", "", "", *bytes_on(ranks, layer)]
    held = [rank_step(rank, "bfloat16", "float32", Workload()).held for rank in ranks]
    yield ["64 layers, table in bfloat16", "", "", *(f"{count / 1e9:,.2f} GB" for count in held)]


def cut_in_words(name: str, parameter: Parameter, axis: int | None) -> str:
    """Return what a rank has of a tensor."""
    if axis is None:
        return "each has it"
    if name == "embedding.weight":
        return "entries"
    if axis == len(parameter.shape) - 1:
        return "columns"
    return "groups of rows" if name.endswith("scales") else "rows"


def bytes_on(ranks: Iterable[RankConfig], parameters: list[Parameter]) -> list[str]:
    """Return the bytes of tensors on one rank of each group."""
    return [size(rank_bytes(parameters, rank, "float32")) for rank in ranks]


def vocabulary() -> Iterable[list[str]]:
    """Yield what the table of the vocabulary costs a rank of 8, cut or on every rank."""
    rank, sheet = GROK_1.for_rank(NODE), DATA_SHEETS["h100"]
    found = estimate(rank, "bfloat16", "float32", Workload(), sheet)
    whole = 2 * GROK_1.vocab_size * GROK_1.emb_size
    part = whole // NODE
    rate = sheet.bandwidth * BANDWIDTH_SHARE
    one_sum = found.sum_seconds / found.step.sums
    for way, held, read, sums in (
        ("cut, for embedding and head", part, part, 1),
        ("embedding on every rank, head cut (two tensors)", whole + part, part, 0),
        ("embedding on every rank, head a slice of it", whole, part, 0),
        ("embedding and head on every rank", whole, whole, 0),
    ):
        seconds = read / rate + sums * one_sum
        yield [way, size(held), size(read), str(sums), f"{seconds * 1e6:,.0f}"]


def placements() -> Iterable[list[str]]:
    """Yield the experts' bytes of a layer that the slowest rank reads, cut and whole."""
    one = expert_bytes(GROK_1)
    for batch in BATCHES:
        cells = [str(batch), f"{expected_experts(GROK_1, batch):.2f}"]
        for ranks in (2, 4, 8):
            cut = expected_experts(GROK_1, batch) / ranks
            whole = float(fullest_rank(GROK_1, batch, ranks))
            cells += [size(cut * one), size(whole * one), f"{whole / cut:.2f}"]
        yield cells


def expert_bytes(config: GrokConfig) -> int:
    """Return the bytes of one expert of one layer."""
    layer = layer_parameters(config, 0).values()
    experts = [parameter for parameter in layer if ".experts." in parameter.name]
    return rank_bytes(experts, config.for_rank(1), "float32") // config.num_experts


def fullest_rank(config: GrokConfig, batch: int, ranks: int) -> Fraction:
    """Return how many chosen experts lie on the rank that has most of them, on average.

    Each of `ranks` ranks owns as many whole experts; tokens choose as `expected_experts` says.
    """
    experts, chosen = config.num_experts, config.num_selected_experts
    chances = {0: Fraction(1)}  # of so many different ones
    for _ in range(batch):
        after: dict[int, Fraction] = {}
        for known, chance in chances.items():
            for new in range(max(0, chosen - known), min(chosen, experts - known) + 1):
                ways = comb(experts - known, new) * comb(known, chosen - new)
                share = chance * Fraction(ways, comb(experts, chosen))
                after[known + new] = after.get(known + new, Fraction(0)) + share
        chances = after
    mine = experts // ranks
    total = Fraction(0)
    for count, chance in chances.items():
        sets = list(itertools.combinations(range(experts), count))
        fullest = [max(sum(e // mine == r for e in each) for r in range(ranks)) for each in sets]
        total += chance * Fraction(sum(fullest), len(sets))
    return total


def memory() -> Iterable[list[str]]:
    """Yield what one GPU of 8 holds, in GB, for one row, and how many rows it holds."""
    rank = GROK_1.for_rank(NODE)
    for gpu in ("h100", "h200"):
        sheet = DATA_SHEETS[gpu]
        longest = CONTEXTS[-1]
        need = memory_of(rank, trt_sizes(1, longest), "bfloat16", "float32")
        row = rank_step(rank, "bfloat16", "float32", Workload(context=longest)).cache_held
        cells = [sheet.name, f"{sheet.memory / 1e9:.0f}", f"{need.weights / 1e9:.1f}"]
        cells.append(f"{need.prefill / 1e9:.2f}")
        for context in CONTEXTS:
            work = Workload(context=context)
            cells.append(f"{rank_step(rank, 'bfloat16', 'float32', work).cache_held / 1e9:.3f}")
        yield [*cells, str(int((sheet.memory - need.weights - need.prefill) // row))]


def trt_sizes(batch: int, length: int) -> Sizes:
    """Return the sizes of an engine on 8 GPUs."""
    return Sizes(tensor_parallel=NODE, batch=batch, chunk=CHUNK, max_length=length)


def speed(gpu: str) -> Iterable[list[str]]:
    """Yield tokens per second of a row and of all rows of 8 GPUs."""
    for batch in BATCHES:
        found = [on(NODE, gpu, batch, context) for context in CONTEXTS]
        cells = [both(each) for each in found]
        times = [f"{each * 1e3:.2f}" for each in (found[0].read_seconds, found[0].sum_seconds)]
        yield [str(batch), *cells, *times]


def both(found: Estimate) -> str:
    """Return the speed of a row and of all."""
    return f"{found.row_tokens_per_second:,.0f} / {found.tokens_per_second:,.0f}"


def on(ranks: int, gpu: str, batch: int, context: int) -> Estimate:
    """Return a step's time by the model's defaults."""
    work = Workload(batch=batch, context=context)
    return estimate(GROK_1.for_rank(ranks), "bfloat16", "float32", work, DATA_SHEETS[gpu])


def nodes() -> Iterable[list[str]]:
    """Yield tokens per second, of a row and of all, of one machine of 8 H100 and of two."""
    context = CONTEXTS[1]
    for batch in BATCHES[1:]:
        half = on(NODE, "h100", batch // 2, context)
        hop = transfer(batch // 2)
        # Half of the rows are in the first half of the layers while the others are in the second;
        # from one machine to the next goes h, and back the token.
        seconds = half.seconds + 2 * hop
        shared = f"{1 / half.seconds:,.0f} / {batch / half.seconds:,.0f}"
        pipeline = f"{1 / seconds:,.0f} / {batch / seconds:,.0f}"
        yield [str(batch), both(on(NODE, "h100", batch, context)), shared, pipeline]


def transfer(rows: int) -> float:
    """Return the seconds that h of so many rows takes to the GPU of the same rank elsewhere."""
    return INFINIBAND.latency + rows * GROK_1.emb_size * 2 / INFINIBAND.rate


def sizes() -> Iterable[list[str]]:
    """Yield tokens per second of one row at each TP, or how much of the memory it would take."""
    for gpu, sheet in DATA_SHEETS.items():
        cells = [sheet.name]
        for ranks in TENSOR_PARALLEL_SIZES:
            found = on(ranks, gpu, 1, CONTEXTS[1])
            part = (found.step.held + found.step.cache_held) / sheet.memory
            cells.append(f"{found.tokens_per_second:,.0f}" if part < 0.95 else f"needs {part:.0%}")
        yield cells


def assumptions() -> Iterable[list[str]]:
    """Yield tokens per second of one row on 8 H100 for other assumptions than the model's."""
    for share in (0.6, 0.8, 0.95):
        found = [
            estimate(
                GROK_1.for_rank(NODE),
                "bfloat16",
                "float32",
                Workload(context=CONTEXTS[1]),
                DATA_SHEETS["h100"],
                bandwidth_share=share,
                latency=us * 1e-6,
            )
            for us in LATENCIES
        ]
        yield [f"{share:.0%} of 3,350 GB/s", *(f"{each.tokens_per_second:,.0f}" for each in found)]


def size(count: float) -> str:
    """Return a length as people read it."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,.0f} B"


if __name__ == "__main__":
    main()
