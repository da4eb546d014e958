"""Speed of an engine, measured so that it can be trusted.

A round measures every setting once, one after the other (A B C ... A B C ...), so what a machine
does over minutes falls on all of them alike. Before the first setting and after each one the
read ceiling is measured too: a share of the ceiling is that of its own moment. One round comes
first that does not count, in which the engine's weights come into memory.

A setting reads the same random tokens in every round: what differs between rounds is the
machine. Decode steps are those of the runtime, head included; the choice of the next token is
not in them, as it is no part of the engine.
"""

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from export_grok.artifacts import HEAD_WEIGHTS, Bundle, open_bundle
from export_grok.engines.backend import RowSession
from export_grok.machine import this_machine
from export_grok.needs import OnNeeds
from export_grok.plugins.kernels import native_kernels
from export_grok.runtime.bench.ceiling import Ceiling
from export_grok.runtime.bench.machine import PeakMemory, cache_bytes, cores
from export_grok.runtime.bench.needs import bench_needs
from export_grok.runtime.bench.options import BenchOptions, Setting, cache_length, settings_of
from export_grok.runtime.bench.result import Bench, Engine, Measurement
from export_grok.runtime.bench.rounds import Rounds
from export_grok.runtime.bench.traffic import Traffic, step_traffic
from export_grok.runtime.open import open_session

__all__ = ["bench_bundle"]

# The package whose version says how fast a backend is.
PACKAGES = {"ort": "onnxruntime"}


def bench_bundle(
    folder: Path,
    options: BenchOptions,
    *,
    threads: int | None = None,
    tensor_parallel: int | None = None,
    weights_root: Path | None = None,
    on_needs: OnNeeds = lambda needs: None,
    on_round: Callable[[int], None] = lambda number: None,
) -> Bench:
    """Return how fast the engine of a bundle is, and which part of what this machine can do.

    The engines of all batches are open at once, so that they too are measured by turns.

    Args:
        folder: of the bundle.
        options: what is measured.
        threads: of the engine, and of the reader of the ceiling; as many as there are cores by
            default.
        tensor_parallel: ranks that the bundle must be for, if it matters.
        weights_root: where the weights are, if the bundle points at ones that were moved.
        on_needs: gets what that needs, before anything is loaded.
        on_round: gets the number of each round before it begins; 0 is the one that does not
            count.

    Raises:
        BundleError: the bundle is unfinished or damaged.
        ConfigError: it is for another number of ranks, or an environment variable asks for
            kernels that are not there.
        RankError: one of its ranks died or stalled.
        RequestError: a length is beyond what the model takes.
    """
    kernels = native_kernels()
    threads = threads or cores()
    began = perf_counter()
    bundle = open_bundle(folder, kind="engine", weights_root=weights_root)
    check_seconds = perf_counter() - began
    settings = settings_of(options, bundle.config)
    on_needs(
        bench_needs(bundle, options, settings, threads=threads, tensor_parallel=tensor_parallel)
    )
    sessions: dict[int, RowSession] = {}
    load_seconds = {}
    with contextlib.ExitStack() as opened:
        with PeakMemory() as memory:
            for batch in options.batch:
                began = perf_counter()
                sessions[batch] = opened.enter_context(
                    open_session(
                        bundle,
                        batch=batch,
                        max_length=cache_length(options, settings),
                        threads=threads,
                        tensor_parallel=tensor_parallel,
                    )
                )
                _first_token(sessions[batch])
                load_seconds[batch] = perf_counter() - began
            rounds = Rounds(sessions, settings, options)
            on_round(0)
            rounds.warm_up()
        # Made only now: the reader maps the weights too, and that is not the engine's memory.
        index, head = bundle.index(), bundle.manifest.files.get(HEAD_WEIGHTS)
        ceiling = Ceiling(index, threads)
        readings, samples = rounds.run(options.rounds, ceiling.reading, on_round)
    return Bench(
        engine=Engine(
            folder=folder,
            backend=str(bundle.manifest.backend),
            version=_version(bundle),
            kernels=kernels,
            weight_bytes=sum(weight.nbytes for weight in index) + (head.bytes if head else 0),
            check_seconds=check_seconds,
            load_seconds=load_seconds,
            private=memory.private,
            mapped=memory.mapped,
        ),
        machine=this_machine(),
        cache_bytes=cache_bytes(),
        options=options,
        threads=threads,
        method=ceiling.method,
        readings=tuple(readings),
        measurements=tuple(
            Measurement(
                setting=setting,
                samples=tuple(taken),
                traffic=_traffic(bundle, setting, options.decode_tokens),
            )
            for setting, taken in zip(settings, samples, strict=True)
        ),
    )


def _first_token(session: RowSession) -> None:
    """Run a token through all graphs: a session may load the head when it is first asked for."""
    zeros = np.zeros(session.batch, np.int64)
    session.forward(zeros[:, None], zeros, zeros)


def _traffic(bundle: Bundle, setting: Setting, steps: int) -> Traffic | None:
    if setting.stage == "prefill":
        return None
    # The first step attends to the context and its own token, each later one to one more.
    attended = setting.tokens + (steps + 1) / 2
    manifest = bundle.manifest
    return step_traffic(
        manifest.config, manifest.dtype, manifest.head, batch=setting.batch, attended=attended
    )


def _version(bundle: Bundle) -> str:
    package = importlib.import_module(PACKAGES[str(bundle.manifest.backend)])
    return f"{package.__name__} {package.__version__}"
