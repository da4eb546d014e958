"""Run TensorRT plans on one GPU: no torch, no ONNX, weights read straight into device memory.

A step of one token for every row is one CUDA graph: embedding, all layers, head. A longer piece of
text goes row by row through plans for a chunk of one row. Where ranks share the layers, this is
one of them: `engines.trt.ranks` opens it.
"""

import numpy as np
from numpy.typing import NDArray

from export_grok.artifacts import Bundle
from export_grok.engines.arguments import check_copy, check_tokens, checked_last, checked_rows
from export_grok.engines.group import Group
from export_grok.engines.trt.cache import RowCache, cache_bytes
from export_grok.engines.trt.chain import Chain, Parts, buffer_bytes, scratch_bytes
from export_grok.engines.trt.communicator import Communicator
from export_grok.engines.trt.device import CudaDevice, Device
from export_grok.engines.trt.engine import PlanRuntime, Runtime
from export_grok.engines.trt.fit import (
    check_engine,
    check_fit,
    check_room,
    flavour_of_record,
    plan_files,
)
from export_grok.engines.trt.pieces import Piece, pieces_of
from export_grok.engines.trt.record import PHASES, TrtRecord, record_in
from export_grok.engines.trt.weights import RankWeights

__all__ = ["TrtSession", "open_engine"]


def open_engine(
    bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
) -> "TrtSession":
    """Return the loaded engine; see `engines.backend.open_session`. A GPU has no use for threads.

    Raises:
        BundleError: the manifest does not say what the plans are.
        MissingDependencyError: TensorRT, `cuda.core`, the driver or a GPU is missing.
    """
    record = record_in(bundle.manifest)
    return TrtSession(
        bundle,
        record,
        batch=batch,
        max_length=max_length,
        device=CudaDevice(),
        runtime=PlanRuntime(flavour_of_record(record)),
    )


class TrtSession:
    """The plans of a bundle, loaded, and a cache for `batch` rows of `max_length` tokens.

    One of N ranks gives logits of its part of the vocabulary only: V is V/N below, and the parts
    of all ranks side by side are the whole.

    A decode plan is for all B rows. Those that a call does not name run along, parked: each gets a
    token behind the last one it holds, and keeps those. It costs what any row costs: attention
    reads all that it holds, and its token may choose experts that no other row has chosen, up to
    two in each layer.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: longest row, in tokens.
        prefill_rows: a chunk is of one row.
        weights: on the device.

    Raises:
        BundleError: the plans are incomplete, or not of these weights.
        CheckpointError: a weight file is missing or too short.
        ConfigError: the plans are not for what is asked or for this GPU, or memory does not
            suffice.
    """

    prefill_rows = 1

    def __init__(
        self,
        bundle: Bundle,
        record: TrtRecord,
        *,
        batch: int,
        max_length: int,
        device: Device,
        runtime: Runtime,
        group: Group | None = None,
        capture: bool = True,
    ) -> None:
        """Check everything, then load the plans, then the weights.

        Args:
            bundle: with the plans.
            record: of them.
            batch: rows.
            max_length: of the longest row.
            device: to run on.
            runtime: to load plans with.
            group: the ranks, of which this is one; None for a rank alone.
            capture: run a decode step as one CUDA graph; else as so many enqueues.
        """
        check_fit(
            record,
            bundle.folder,
            ranks=group.ranks if group else 1,
            batch=batch,
            max_length=max_length,
            version=runtime.version,
            device=device,
        )
        self.config = bundle.config
        self.batch = batch
        self.max_length = max_length
        self._device = device
        self._runtime = runtime
        self._capture = capture
        self._sizes = record.sizes
        self._rank = group.rank if group else 0
        self._entries = self.config.vocab_size // record.sizes.tensor_parallel
        self._plans = plan_files(record, bundle.folder, device.sm)
        self._loaded: dict[tuple[str, str], Parts] = {}
        self._chains: dict[tuple[str, str], Chain] = {}
        self.weights = RankWeights.of_bundle(bundle, record, rank=self._rank)

        layer, _ = self._plans["layer", "decode"][0]
        kinds = ("embedding", "layer", "head")
        needed = {
            "weights": self.weights.nbytes,
            "caches": cache_bytes(layer, self.config.num_layers),
            "activations": sum(
                buffer_bytes(*([graph for graph, _ in self._plans[kind, phase]] for kind in kinds))
                for phase in PHASES
            ),
        }
        check_room(device, **needed)
        # How much memory a plan works in, only the plan says.
        needed["scratch"] = sum(
            scratch_bytes(*(self._load(kind, phase) for kind in kinds)) for phase in PHASES
        )
        check_room(device, **needed)
        # Before the weights: they take longer, and it may fail.
        self._communicator = Communicator(group) if group and group.ranks > 1 else None
        self.weights.load(device)
        self._cache = RowCache(device, layer, self.config.num_layers)
        for phase in PHASES:
            self._chain(phase, "head")

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens of rows into the cache; return the logits of one of each, [R, V]."""
        rows = checked_rows(self, rows)
        if last is not None:
            last = checked_last(self, last, tokens, rows)
        check_tokens(self, tokens, start, rows)
        self._cache.end(rows, start + tokens.shape[1])
        if tokens.shape[1] == 1:
            chain = self._chain("decode", "head")
            every, places = self._cache.parked(rows, tokens, start)
            chain.write(tokens=every, start=places)  # its `last` is always 0
            if last is None:
                chain.enqueue(head=False)
                return None
            if self._capture:
                chain.replay()
            else:
                chain.enqueue()
            return chain.logits(self.batch)[rows]
        chain = self._chain("prefill", "head")
        logits = np.empty((len(rows), self._entries), np.float32)
        for piece in pieces_of(*tokens.shape, chunk=self._sizes.chunk):
            self._write(chain, piece, tokens, start)
            place = -1 if last is None else int(last[piece.row]) - piece.first
            asked = 0 <= place < piece.width
            if asked:
                chain.write(last=np.array([place]))
            chain.enqueue(int(rows[piece.row]), head=asked)
            if asked:
                logits[piece.row] = chain.logits(1)[0]
        return None if last is None else logits

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V]."""
        check_tokens(self, tokens, start)
        self._cache.end(np.arange(self.batch), start + tokens.shape[1])
        if tokens.shape[1] == 1:
            chain = self._chain("decode", "head_all")
            chain.write(tokens=tokens, start=start)
            chain.enqueue()
            return chain.logits(self.batch)[:, np.newaxis]
        chain = self._chain("prefill", "head_all")
        logits = np.empty((*tokens.shape, self._entries), np.float32)
        for piece in pieces_of(*tokens.shape, chunk=self._sizes.chunk):
            self._write(chain, piece, tokens, start)
            chain.enqueue(piece.row)
            logits[piece.row, piece.first : piece.end] = chain.logits(piece.width)
        return logits

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens that a row holds those of another; see `RowSession.copy`."""
        check_copy(self, source, target, length)
        self._cache.copy(source, target, length)

    def _write(
        self, chain: Chain, piece: Piece, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> None:
        """Write a piece where the plans find it, padded on the right.

        What the padding leaves in the cache lies behind the row's tokens, where it is overwritten
        before any token may see it. The cache has chunk - 1 slots more than a row may have tokens,
        so that the padding of a row's last piece fits.
        """
        padded = np.zeros((1, self._sizes.chunk), np.int64)
        padded[0, : piece.width] = tokens[piece.row, piece.first : piece.end]
        chain.write(tokens=padded, start=start[piece.row : piece.row + 1] + piece.first)

    def _chain(self, phase: str, head: str) -> Chain:
        """Return the run of one phase with one kind of head; made at the first use."""
        if (phase, head) not in self._chains:
            chain = self._chains[phase, head] = Chain(
                self._device,
                self._load("embedding", phase),
                self._load("layer", phase),
                self._load(head, phase),
                weights=self.weights,
                caches=self._cache.layers,
                communicator=self._communicator,
            )
            if self._communicator is not None:
                chain.write(first=np.array([self._rank * self._entries]))
        return self._chains[phase, head]

    def _load(self, kind: str, phase: str) -> Parts:
        """Return a graph and the engine of its plan, of every part; loaded at the first use."""
        if (kind, phase) not in self._loaded:
            parts = []
            for graph, plan in self._plans[kind, phase]:
                engine = self._runtime.engine(plan)
                check_engine(graph, engine, plan)
                parts.append((graph, engine))
            self._loaded[kind, phase] = parts
        return self._loaded[kind, phase]
