"""Who is compared: what each computes with, where its weights are, how it is started."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from storage import Storage

from export_grok.plugins.kernels import native_kernels

__all__ = ["PEERS", "Peer", "reason_to_leave_out"]

RELEASED = Storage(scale=2)
INT8_HEAD = Storage(scale=4)
BLOCKS_OF_256 = Storage(scale=4, block=256)
Q8_0 = Storage(scale=2, block=32)
BFLOAT16 = Storage(weight=2, scale=0)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to run the model.

    Attributes:
        text: what it is, for the report.
        runner: program in this folder.
        model: file or folder it is given, below the folder of the comparison.
        environment: variables that are set for it.
    """

    name: str
    text: str
    runner: str
    model: str
    matrices: Storage
    head: Storage
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, folder: Path, python: str, *options: str) -> list[str]:
        """Return the command line that measures this peer."""
        program = Path(__file__).with_name(self.runner)
        return [python, str(program), str(folder / self.model), *options]


def _grok(name: str, text: str, **environment: str) -> Peer:
    return Peer(
        name=name,
        text=text,
        runner="run_grok.py",
        model="engine",
        matrices=RELEASED,
        head=INT8_HEAD,
        environment=environment,
    )


PEERS = (
    _grok("grok", "export-grok with its own kernels, int8 weights mapped where they lie"),
    _grok(
        "grok-avx512",
        "the same without VNNI: prefill in float32 too, not as three 8-bit terms",
        EXPORT_GROK_ISA="avx512",
    ),
    _grok(
        "ort-int8",
        "export-grok on ONNX Runtime's own MatMulIntegerToFloat, activations as three 7-bit terms",
        EXPORT_GROK_KERNELS="builtin",
    ),
    Peer(
        name="ort-nbits",
        text="ONNX Runtime's own MatMulNBits of 8 bits, blocks of 256, accuracy level 4, which "
        "takes activations as int8; one graph made for it",
        runner="run_nbits.py",
        model="nbits",
        matrices=BLOCKS_OF_256,
        head=BLOCKS_OF_256,
    ),
    Peer(
        name="llama",
        text="llama.cpp, Q8_0 (activations as int8), its defaults",
        runner="run_llama.py",
        model="llama.gguf",
        matrices=Q8_0,
        head=Q8_0,
    ),
    Peer(
        name="torch-bf16",
        text="PyTorch, a plain eager loop in bfloat16, weights dequantised once",
        runner="run_torch.py",
        model="checkpoint",
        matrices=BFLOAT16,
        head=BFLOAT16,
    ),
)


def reason_to_leave_out(peer: Peer, python: str) -> str | None:
    """Return why this peer cannot be measured here, or None.

    Args:
        peer: to be measured.
        python: interpreter for it.
    """
    kernels = native_kernels()
    if peer.name == "grok-avx512" and kernels.isa != "avx512_vnni":
        return f"grok is exact with {kernels.isa or 'the kernels built into ONNX Runtime'}"
    if peer.name == "ort-int8" and kernels.library is None:
        return f"it is what grok computes with here: {kernels.reason}"
    if peer.name == "llama":
        # A folder of this project may be called as a package is: look from another one.
        found = subprocess.run(
            [python, "-c", "import llama_cpp"], capture_output=True, cwd=os.sep, check=False
        )
        if found.returncode:
            own = " (or say where it is with --llama-python)" if python == sys.executable else ""
            return f"{python} has no llama-cpp-python: install it{own}"
    return None
