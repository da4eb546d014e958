"""Step 6: two processes, one on each GPU, sum in a plan - as it is enqueued, and captured.

    python -m scripts.gpu.ranks RANK FOLDER BACKEND

is what each process runs. They meet in FOLDER, where rank 0 leaves NCCL's identifier. All ranks do
the same at the same time: a communicator that is set on one rank waits for the others.
"""

import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export_grok.engines.trt.callbacks import messages_of
from export_grok.engines.trt.device import CudaDevice
from export_grok.engines.trt.module import Flavour, flavour_of
from export_grok.engines.trt.tensors import ELEMENTS
from export_grok.files import atomic_file
from export_grok.optional import require
from scripts.gpu.device import gpu_count
from scripts.gpu.plan_run import built_plan, flavour_here
from scripts.gpu.step import Options, Outcome, Skipped

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["check_ranks", "collective_model", "wait_for"]

RANKS = 2
SHAPE = (4, 6144)
ROUNDS = 3
SECONDS = 300.0


def check_ranks(options: Options) -> Outcome:
    """Run the two processes."""
    flavour = flavour_here(options)
    if flavour.any_gpu:
        raise Skipped(f"{flavour.package} has no collectives")
    found = gpu_count()
    if found < RANKS:
        raise Skipped("one GPU" if found == 1 else "no GPU")
    folder = Path(options.folder, "ranks")
    folder.mkdir()
    command = [sys.executable, "-m", "scripts.gpu.ranks"]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder), options.backend])
        for rank in range(RANKS)
    ]
    end = time.monotonic() + SECONDS
    try:
        codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        return Outcome(status="fail", text=f"the ranks hang: not done after {SECONDS:g} s")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        return Outcome(status="fail", text=f"the ranks ended with {codes}")
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    faults = [fault for result in results for fault in result["faults"]]
    text = "; ".join(faults) or f"{RANKS} ranks agree, plain and captured, {ROUNDS} times each"
    return Outcome(status="fail" if faults else "pass", text=text, figures={"ranks": results})


def collective_model(ranks: int) -> "ir.Model":
    """Return a graph that sums x over the ranks, as a layer does."""
    import onnx_ir as ir
    from onnx_ir.tape import Tape

    from export_grok.plugins.all_reduce.trt_lowering import lower

    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape(SHAPE), type=kind)
    node = ir.Node("grok1", "GrokAllReduce", [x], [ir.AttrInt64("ranks", ranks)])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 24, "trt": 1}, name="sum")
    tape = Tape()
    (y,) = lower(node, graph, tape)
    y.name, y.shape, y.type = "y", ir.Shape(SHAPE), kind
    node.replace_input_with(0, None)  # it was the lowering's argument, and is no node of the graph
    graph.extend(tape.nodes)
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=11)


def main(rank: int, folder: Path, backend: str) -> None:
    """Do what one rank does."""
    from export_grok.export.graphs import write_graph

    flavour, device = flavour_of(backend), CudaDevice(rank)
    file = folder / f"sum{rank}.onnx"
    write_graph(collective_model(RANKS), file)
    context = _context(flavour, built_plan(flavour, file, device.sm))
    # Kept: TensorRT holds the bare pointer.
    communicator = _joined(rank, folder)
    context.set_communicator(_capsule(communicator.ptr))
    x, y = (device.allocate(4 * SHAPE[0] * SHAPE[1]) for _ in range(2))
    context.set_tensor_address("x", x)
    context.set_tensor_address("y", y)

    def enqueue() -> None:
        if not context.execute_async_v3(device.stream):
            raise RuntimeError("the plan cannot be enqueued")

    faults = _rounds(device, rank, x, y, enqueue, "plain")
    faults += _rounds(device, rank, x, y, device.captured(enqueue), "captured")
    with atomic_file(folder / f"rank{rank}.json") as out:
        out.write(json.dumps({"rank": rank, "faults": faults}).encode())


def _rounds(device: CudaDevice, rank: int, x: int, y: int, run: Any, how: str) -> list[str]:
    faults = []
    for number in range(ROUNDS):
        # Whole numbers: their sum is exact in any order. Every rank draws those of all.
        random = np.random.default_rng([number, how == "plain"])
        parts = random.integers(-1000, 1000, (RANKS, *SHAPE)).astype(np.float32)
        device.upload(x, parts[rank])
        device.upload(y, np.full(SHAPE, np.nan, ELEMENTS["float32"]))
        run()
        found = np.empty(SHAPE, np.float32)
        device.download(y, found)
        if not np.array_equal(found, parts.sum(0)):
            faults.append(f"rank {rank}, {how}: the sum is wrong in round {number}")
    return faults


def _context(flavour: Flavour, plan: Path) -> Any:
    trt: Any = flavour.load()
    runtime = trt.Runtime(messages_of(trt).logger)
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    return engine.create_execution_context()


def _joined(rank: int, folder: Path) -> Any:
    """Return the communicator of this rank."""
    nccl = require("nccl.core", extra="gpu")
    file = folder / "identifier"
    if rank == 0:
        identifier = nccl.get_unique_id()
        with atomic_file(file) as out:
            out.write(bytes(identifier))
    else:
        identifier = nccl.UniqueId.from_bytes(wait_for(file, SECONDS).read_bytes())
    return nccl.Communicator.init(RANKS, rank, identifier)


def _capsule(address: int) -> Any:
    """Return an address as TensorRT takes a communicator."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(address, b"ncclComm_t", None)


def wait_for(file: Path, seconds: float) -> Path:
    """Return the file once it is there.

    Raises:
        TimeoutError: it does not come.
    """
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} is not there after {seconds:g} s")
        time.sleep(0.05)
    return file


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
