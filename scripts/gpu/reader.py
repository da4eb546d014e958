"""A kernel that reads memory as fast as it can: what others are measured against.

It is written in PTX, so that no compiler is between it and what it does: four loads of 16 bytes
are on their way for each thread at a time, and neighbouring threads read neighbouring bytes. All
that was read goes into the result, the exclusive or of everything.
"""

from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Call, Launch, PluginNode
from export_grok.plugins.ptx.compiled_kernel import CompiledKernel
from scripts.gpu.launch import Compiled

__all__ = ["READ", "reader"]

BLOCK = 256  # threads
LOADS = 4  # of 16 bytes, of a thread at a time
WORDS = 4  # of 4 bytes: of a load, and of the result of a thread
BLOCKS_OF_MULTIPROCESSOR = 8


def _ptx() -> str:
    """Return the kernel (source, int32 steps, result).

    Step i of thread t reads vectors t + (i * LOADS + j) * threads, j below LOADS.
    """
    loads = [f"\tld.global.v4.b32 {{{_words(j)}}}, [%a{j}];" for j in range(LOADS)]
    mixes = [
        f"\txor.b32 %x{word}, %x{word}, %v{j}_{word};"
        for j in range(LOADS)
        for word in range(WORDS)
    ]
    return "\n".join(
        [
            ".version 7.0",
            ".target sm_80",
            ".address_size 64",
            ".visible .entry read_all(",
            "\t.param .u64 .ptr .global .align 16 read_all_param_0,",
            "\t.param .u32 read_all_param_1,",
            "\t.param .u64 .ptr .global .align 16 read_all_param_2",
            ")",
            f".reqntid {BLOCK}",
            "{",
            "\t.reg .pred %more;",
            "\t.reg .b32 %step, %steps, %thread, %in_block, %block, %threads;",
            f"\t.reg .b32 {', '.join(f'%x{word}' for word in range(WORDS))};",
            f"\t.reg .b32 {', '.join(_words(j) for j in range(LOADS))};",
            "\t.reg .b64 %source, %result, %own, %stride;",
            f"\t.reg .b64 {', '.join(f'%a{j}' for j in range(LOADS))};",
            "\tld.param.u64 %source, [read_all_param_0];",
            "\tld.param.u32 %steps, [read_all_param_1];",
            "\tld.param.u64 %result, [read_all_param_2];",
            "\tmov.u32 %in_block, %tid.x;",
            "\tmov.u32 %block, %ctaid.x;",
            f"\tmad.lo.u32 %thread, %block, {BLOCK}, %in_block;",
            "\tmov.u32 %threads, %nctaid.x;",
            f"\tmul.wide.u32 %stride, %threads, {16 * BLOCK};",
            "\tmul.wide.u32 %own, %thread, 16;",
            "\tadd.u64 %a0, %source, %own;",
            "\tadd.u64 %result, %result, %own;",
            *(f"\tmov.b32 %x{word}, 0;" for word in range(WORDS)),
            "\tmov.b32 %step, 0;",
            "again:",
            *(f"\tadd.u64 %a{j}, %a{j - 1}, %stride;" for j in range(1, LOADS)),
            *loads,
            *mixes,
            f"\tadd.u64 %a0, %a{LOADS - 1}, %stride;",
            "\tadd.u32 %step, %step, 1;",
            "\tsetp.lt.u32 %more, %step, %steps;",
            "\t@%more bra again;",
            "\tst.global.v4.b32 [%result], {%x0, %x1, %x2, %x3};",
            "\tret;",
            "}",
            "",
        ]
    )


def _words(load: int) -> str:
    return ", ".join(f"%v{load}_{word}" for word in range(WORDS))


def _launch(call: Call) -> Launch:
    blocks = int(call.attributes["blocks"])
    (words,) = call.shapes["source"]
    steps = words // (blocks * BLOCK * LOADS * WORDS)
    return Launch(grid=(blocks, 1, 1), scalars={"steps": steps}, constants={})


READ = PluginNode(
    op="",  # it is no part of the model
    op_type="Read",
    kernel="read_all",
    inputs=(Operand(name="source", shape="words", dtype="float32"),),
    outputs=(Operand(name="result", shape="blocks*threads 4", dtype="float32"),),
    attributes={"blocks": int},
    output_shapes=lambda call: ((int(call.attributes["blocks"]) * BLOCK, WORDS),),
    launch=_launch,
)


def reader(nbytes: int, multiprocessors: int) -> Compiled:
    """Return the kernel for about so many bytes, a few less, on a GPU."""
    blocks = BLOCKS_OF_MULTIPROCESSOR * multiprocessors
    words_of_step = blocks * BLOCK * LOADS * WORDS
    words = max(1, nbytes // (4 * words_of_step)) * words_of_step
    call = Call(shapes={"source": (words,)}, attributes={"blocks": blocks}, dtype="float32")
    kernel = CompiledKernel(
        name=READ.kernel,
        ptx=_ptx(),
        target="sm_80",
        parameters=3,
        scalars=("steps",),
        num_warps=BLOCK // 32,
        shared_bytes=0,
        static_shared_bytes=0,
        registers=0,  # nobody has asked
        spills=0,
        stack=0,
        hash=READ.kernel,
    )
    return Compiled(node=READ, call=call, launch=_launch(call), kernel=kernel)
