"""What building an engine of ONNX Runtime needs, and what running one does.

Bytes of tensors are counted. What else memory holds, and every speed, was measured: docs/scale.md
has the figures of a full-size layer and of 64, docs/performance.md those of speed, and both the
commands. Of memory it is the peak of a process's own (RssAnon) that counts here.
"""

import math
import sys
from typing import Final

from export_grok.artifacts import Bundle, rank_folder
from export_grok.config import EngineOptions
from export_grok.engines.demand import Demand, Graphs
from export_grok.export.head import head_index
from export_grok.export.needs import TRACE_MAPPED, TRACE_MEMORY, TRACE_SECONDS
from export_grok.export.parameters import layer_parameters
from export_grok.export.rank_weights import rank_index
from export_grok.export.time_model import RankStep, Workload, rank_bytes, rank_step
from export_grok.machine import available_memory, this_machine
from export_grok.needs import Disk, Needs
from export_grok.plugins.kernels import native_kernels

__all__ = ["build_needs", "functions_needs", "probe_needs", "session_needs"]

MB: Final = 10**6

# The program with ONNX Runtime and its threads; its libraries are mapped.
PROGRAM: Final = 80 * MB
LIBRARIES: Final = 200 * MB
# build-engine of 64 layers: 5.6 s, 0.12 GB at the peak. A lowered layer's file has 128 KB.
LOWER_SECONDS: Final = 0.1
LOWER_MEMORY: Final = 120 * MB
LOWERED_FILE: Final = 150_000
# Bytes a second of ranks' weights that are packed: 9 GB in 18 s.
PACK_RATE: Final = 500 * MB
# Bytes of scratch for each token, chosen expert and column of an expert: gate, up, and their
# product in the form that kernels read; from prefills of 128 and 512 tokens.
NATIVE_SCRATCH: Final = 12
BUILTIN_SCRATCH: Final = 24
# Built-in kernels keep the int8 matrices and the head in an order of their own: 8 GB in 12 s.
REPACK_RATE: Final = 650 * MB
# Bytes a second that a core reads of weights in memory, and products a second that it makes.
READ_RATE: Final = 16_000 * MB
PRODUCT_RATE: Final = 50_000 * MB
MOST_READERS: Final = 8  # more cores read no faster: memory does not give more
# Of a disk; and of files of which nobody knows how much is in memory already.
DISK_RATE: Final = 1_000 * MB
FIRST_RATE: Final = 3_000 * MB
# The function bodies make float32 of all experts, which ONNX Runtime does when it loads them:
# 4.5 times the matrices' float32 was the peak of `verify --against ort`.
FUNCTION_COPIES: Final = 4.5

ONE: Final = Demand(batch=1, max_length=1)


def build_needs(graphs: Graphs, options: EngineOptions) -> Needs:
    """Return what the engine of a folder of graphs takes; nothing if it is there."""
    from export_grok.engines.ort.build import is_current

    if graphs.manifest is not None and is_current(graphs.manifest, options):
        return Needs()
    config, ranks = graphs.config, options.tensor_parallel
    lowered = Disk(folder=graphs.folder, nbytes=LOWERED_FILE * config.num_layers * ranks)
    seconds = LOWER_SECONDS * config.num_layers
    if ranks == 1:
        return Needs(disk=(lowered,), memory=LOWER_MEMORY, mapped=LIBRARIES, seconds=seconds)
    own = graphs.head == "int8"
    head = head_index(config, graphs.folder) if own else graphs.index
    files = rank_index(config, graphs.index, head, graphs.folder, ranks).files
    weights = Disk.of_files(
        graphs.folder,
        {
            f"{rank_folder(rank)}/{file}": length
            for rank in range(ranks)
            for file, length in files.items()
        },
    )
    return Needs(
        disk=(lowered, weights),
        memory=TRACE_MEMORY,
        mapped=TRACE_MAPPED + max(graphs.index.files.values()),
        seconds=seconds + TRACE_SECONDS + weights.nbytes / PACK_RATE,
    )


def session_needs(bundle: Bundle, demand: Demand) -> Needs:
    """Return what a session takes with what it is asked, all ranks together."""
    config, ranks = bundle.config, _ranks(bundle)
    native = native_kernels().library is not None
    step = _step(bundle, demand, demand.batch)
    packed = 0 if native else config.num_layers * _layer_bytes(bundle) + round(step.head)
    columns = config.num_selected_experts * config.ffn_size
    scratch = (NATIVE_SCRATCH if native else BUILTIN_SCRATCH) * demand.at_once * columns
    logits = 4 * config.vocab_size * (demand.at_once if demand.whole else demand.batch)
    return Needs(
        # The logits of a chunk are held, and looked at, while the next are made.
        memory=ranks * PROGRAM + packed + step.cache_held + scratch + 3 * logits,
        # The head's graph maps its matrix once more. A limit of addresses is that of each rank.
        mapped=LIBRARIES + (step.held + round(step.head)) // ranks,
        seconds=packed / REPACK_RATE + _seconds(bundle, demand),
    )


def probe_needs(bundle: Bundle) -> Needs:
    """Return the memory that one graph takes at a time, as `probe` loads it."""
    held = max(_layer_bytes(bundle), round(_step(bundle, ONE, 1).head))
    packed = 0 if native_kernels().library else held
    return Needs(memory=_ranks(bundle) * PROGRAM + packed, mapped=LIBRARIES + held)


def functions_needs(bundle: Bundle, layers: int) -> Needs:
    """Return the memory of so many layers at once whose ops run by their function bodies."""
    nbytes = layers * _layer_bytes(bundle)
    return Needs(memory=PROGRAM + round(FUNCTION_COPIES * 4 * nbytes), mapped=LIBRARIES + nbytes)


def _seconds(bundle: Bundle, demand: Demand) -> float:
    """Return about how long a session takes for what it is asked."""
    cores = min(demand.threads or sys.maxsize, this_machine().cores)
    rate = READ_RATE * min(cores, MOST_READERS)

    def weights(tokens: int) -> float:
        step = _step(bundle, demand, tokens)
        return step.read - step.cache  # its rows are tokens here

    first = weights(demand.batch * (demand.prefill + demand.decode)) / FIRST_RATE
    decoded = _step(bundle, demand, demand.batch)
    if decoded.held > available_memory():  # nothing stays in memory until the next step
        rate, first = DISK_RATE, 0
    one = _step(bundle, demand, 1)
    products = one.dense + one.experts
    if demand.whole:
        products += bundle.config.emb_size * bundle.config.vocab_size
    prefill = max(
        math.ceil(demand.prefill / demand.chunk) * weights(demand.at_once) / rate,
        demand.batch * demand.prefill * products / (PRODUCT_RATE * cores),
    )
    return first + prefill + demand.decode * decoded.read / rate


def _step(bundle: Bundle, demand: Demand, tokens: int) -> RankStep:
    """Return what a step reads in which so many tokens go through the layers."""
    manifest = bundle.manifest
    workload = Workload(batch=max(1, tokens), context=demand.max_length)
    return rank_step(bundle.config.for_rank(1), manifest.dtype, manifest.head, workload)


def _layer_bytes(bundle: Bundle) -> int:
    config = bundle.config
    parameters = layer_parameters(config, 0).values()
    return rank_bytes(parameters, config.for_rank(1), bundle.manifest.dtype)


def _ranks(bundle: Bundle) -> int:
    ranks: int = bundle.manifest.engine.get("tensor_parallel", 1)
    return ranks
