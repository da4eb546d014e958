"""A kernel is compiled without a GPU to PTX that takes what TensorRT's launcher passes."""

import importlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from export_grok import plugins
from export_grok.errors import BuildError, ConfigError, MissingDependencyError
from export_grok.plugins.op import Operand
from export_grok.plugins.plugin_node import Call, Launch, PluginNode
from export_grok.plugins.ptx import compiler as ptx
from export_grok.plugins.ptx import ptxas
from export_grok.plugins.ptx import source as kernel_source_module
from export_grok.plugins.ptx.compiled_kernel import file_of
from export_grok.plugins.ptx.compiler import SHARED_LIMIT, compile_all, compiled, kernel_hash
from export_grok.plugins.ptx.entry_point import declared_only
from export_grok.plugins.ptx.ptxas import assembled, find_ptxas, read_report
from export_grok.plugins.ptx.source import TARGETS, Target, kernel_source

# One compiles in a second or two. All kernels of the ops, at full size: benchmarks/kernels.py.
if importlib.util.find_spec("triton") is None:
    pytest.skip("extra triton is not installed", allow_module_level=True)
try:
    find_ptxas()
except MissingDependencyError as error:
    pytest.skip(str(error), allow_module_level=True)

# It has what the kernels of the ops have: pointers of several types, scalars, a loop, masks.
KERNEL = """
import triton
import triton.language as tl

from export_grok.plugins.toy_helper.triton_kernel import twice

@triton.jit
def toy(X, CODES, FIRST, ROWS, COLUMNS, Y, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.load(FIRST)
    for row in range(0, ROWS):
        code = tl.load(CODES + (first + row) * COLUMNS + column, mask=inside, other=0)
        total += tl.load(X + row).to(tl.float32) * code.to(tl.float32)
    tl.store(Y + column, twice(total) * FACTOR, mask=inside)
"""
HELPER = """
import triton

@triton.jit
def twice(x):
    return x * 2.0
"""
TYPES = ("*bf16", "*i8", "*i64", "i32", "i32", "*fp32")


def _launch(call: Call) -> Launch:
    rows, columns = call.shapes["codes"]
    return Launch(
        grid=(-(-columns // 512), 1, 1),
        scalars={"rows": rows, "columns": columns},
        constants={"BLOCK": 512, "FACTOR": 0.5},
    )


TOY = PluginNode(
    op="toy",
    op_type="GrokToy",
    kernel="toy",
    inputs=(
        Operand(name="x", shape="K"),
        Operand(name="codes", shape="K N", dtype="int8"),
        Operand(name="first", shape="1", dtype="int64"),
    ),
    outputs=(Operand(name="y", shape="N", dtype="float32"),),
    output_shapes=lambda call: ((call.shapes["codes"][1],),),
    launch=_launch,
)


def call_of(rows: int = 32, columns: int = 256, dtype: Any = "bfloat16") -> Call:
    return Call(shapes={"x": (rows,), "codes": (rows, columns), "first": (1,)}, dtype=dtype)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the kernel of op toy; what is compiled is kept for the whole module."""
    for op, text in (("toy", KERNEL), ("toy_helper", HELPER)):
        (tmp_path / op).mkdir()
        (tmp_path / op / "__init__.py").touch()
        (tmp_path / op / "triton_kernel.py").write_text(text)
    monkeypatch.setattr(plugins, "__path__", [*plugins.__path__, str(tmp_path)])
    # for the process that compiles
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text(
        f"from export_grok import plugins\nplugins.__path__.append({str(tmp_path)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    return tmp_path / "toy" / "triton_kernel.py"


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch, from_triton: dict[str, Any]) -> dict[str, Any]:
    """Return what the compiling process is made to answer; `calls` counts."""
    answer = from_triton | {"calls": 0}

    def give(source: object) -> dict[str, Any]:
        answer["calls"] += 1
        return answer

    monkeypatch.setattr(ptx, "_by_triton", give)
    return answer


@pytest.fixture(scope="module")
def compiled_once() -> dict[str, Any]:
    return {}


@pytest.fixture
def from_triton(toy: Path, compiled_once: dict[str, Any]) -> dict[str, Any]:
    """Return what Triton makes of the toy for sm_80."""
    if not compiled_once:
        compiled_once |= ptx._by_triton(kernel_source(TOY, call_of(), 80))
    return dict(compiled_once)


def parameters_of(text: str) -> list[str]:
    head = re.search(r"\.entry \w+\(([^)]*)\)", text)
    assert head is not None
    return [line.strip() for line in head[1].split(",")]


# --- what comes out


@pytest.mark.parametrize("sm", TARGETS)
def test_a_kernel_takes_what_is_declared_and_assembles_for_every_target(sm: int) -> None:
    kernel = compiled(TOY, call_of(), sm)
    version = TARGETS[sm].ptx_version
    assert f".version {version // 10}.{version % 10}\n.target {kernel.target}\n" in kernel.ptx
    kinds = [".ptr" if ".ptr" in text else "int" for text in parameters_of(kernel.ptx)]
    assert kinds == [".ptr", ".ptr", ".ptr", "int", "int", ".ptr"]
    assert (kernel.name, kernel.scalars, kernel.parameters) == ("toy", ("rows", "columns"), 6)
    assert f".reqntid {kernel.threads}\n" in kernel.ptx
    again = assembled(kernel.ptx, kernel.name, kernel.target)
    assert (again.registers, again.spills) == (kernel.registers, kernel.spills)
    assert kernel.registers > 0


def test_it_is_compiled_although_kernels_are_interpreted_in_this_process() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert ".entry toy(" in compiled(TOY, call_of(), 80).ptx


def test_hidden_parameters_were_there(from_triton: dict[str, Any]) -> None:
    assert len(parameters_of(from_triton["ptx"])) == len(TYPES) + 2


def test_a_scalar_that_is_1_stays_a_parameter() -> None:
    kernel = compiled(TOY, call_of(rows=1), 80)
    assert len(parameters_of(kernel.ptx)) == len(TYPES)
    assert "[toy_param_3]" in kernel.ptx


def test_loads_are_wide_only_where_pointers_and_rows_are_aligned() -> None:
    loads = [
        len(re.findall(r"ld\.global", compiled(TOY, call_of(columns=columns), 80).ptx))
        for columns in (1024, 1025)
    ]
    assert loads[0] < loads[1]


def test_ptx_holds_no_path_of_this_machine(toy: Path) -> None:
    assert str(toy.parent) not in compiled(TOY, call_of(), 80).ptx


def test_kernels_come_in_the_order_of_the_calls_and_equal_ones_once(
    by_triton: dict[str, Any], new_cache: Path
) -> None:
    sizes = (32, 48, 32, 33, 35)
    kernels = compile_all([(TOY, call_of(rows=rows), 80) for rows in sizes])
    assert [kernel.hash for kernel in kernels] == [
        kernel_hash(TOY, call_of(rows=rows), 80) for rows in sizes
    ]
    assert by_triton["calls"] == 2  # multiples of 16, and others


# --- hidden parameters: faults planted in what Triton wrote


def planted(text: str, wrong: str, right: str) -> str:
    assert text.count(wrong) >= 1
    return text.replace(wrong, right, 1)


@pytest.mark.parametrize("hidden", [("toy_param_6", "global"), ("toy_param_7", "profile")])
def test_a_kernel_that_reads_a_hidden_parameter_is_refused(
    from_triton: dict[str, Any], hidden: tuple[str, str]
) -> None:
    name, meaning = hidden
    read = f"ret;\n\tld.param.b64 \t%rd1, [{name}];"
    text = planted(from_triton["ptx"], "ret;", read)
    with pytest.raises(BuildError, match=rf"kernel toy reads its parameter {name} \({meaning}_"):
        declared_only(text, "toy", TYPES, threads=128)


@pytest.mark.parametrize(
    "body",
    [
        "mov.b64 \t%rd1, toy_param_5;",
        "ld.param.b64 \t%rd1, [toy_param_5+8];",
        "ld.param.v2.b64 \t{%rd1, %rd2}, [toy_param_5];",
        "ld.param.b64 \t%rd1, [toy_param_4];",
    ],
    ids=["its address", "an offset", "a vector", "more bits"],
)
def test_a_kernel_that_may_reach_behind_a_parameter_is_refused(
    from_triton: dict[str, Any], body: str
) -> None:
    text = planted(from_triton["ptx"], "ret;", f"ret;\n\t{body}")
    with pytest.raises(BuildError, match=r"parameter toy_param_[45] than read its (64|32) bits"):
        declared_only(text, "toy", TYPES, threads=128)


@pytest.mark.parametrize("types", [TYPES[:-1], (*TYPES, "*fp32"), ()])
def test_another_number_of_parameters_is_refused(
    from_triton: dict[str, Any], types: tuple[str, ...]
) -> None:
    with pytest.raises(BuildError, match=f"toy has 8 parameters; {len(types)} are declared"):
        declared_only(from_triton["ptx"], "toy", types, threads=128)


def test_parameters_of_another_triton_without_hidden_ones_are_refused(
    from_triton: dict[str, Any],
) -> None:
    once = declared_only(from_triton["ptx"], "toy", TYPES, threads=128)
    with pytest.raises(BuildError, match="has 6 parameters; 6 are declared, and Triton adds 2"):
        declared_only(once, "toy", TYPES, threads=128)


def test_parameters_in_another_order_are_refused(from_triton: dict[str, Any]) -> None:
    types = ("*bf16", "*i8", "i32", "*i64", "i32", "*fp32")
    with pytest.raises(BuildError, match=r"toy_param_2 .* declared is i32 of 32 bits"):
        declared_only(from_triton["ptx"], "toy", types, threads=128)


@pytest.mark.parametrize("kind", [".param .f32", ".param .align 16 .b8", ".param .u64"])
def test_parameters_of_other_types_are_refused(from_triton: dict[str, Any], kind: str) -> None:
    text = planted(from_triton["ptx"], ".param .u32 toy_param_3", f"{kind} toy_param_3")
    with pytest.raises(BuildError, match=r"kernel toy .*toy_param_3|toy_param_3 of kernel toy"):
        declared_only(text, "toy", TYPES, threads=128)


@pytest.mark.parametrize("kind", ["", " .ptr .shared .align 1", " .ptr .const .align 8"])
def test_what_is_no_pointer_to_global_memory_is_refused(
    from_triton: dict[str, Any], kind: str
) -> None:
    pointer = ".param .u64 .ptr .global .align 1 toy_param_2"
    text = planted(from_triton["ptx"], pointer, f".param .u64{kind} toy_param_2")
    with pytest.raises(BuildError, match=r"kernel toy .*toy_param_2|toy_param_2 of kernel toy"):
        declared_only(text, "toy", TYPES, threads=128)


def test_a_block_of_another_size_is_refused(from_triton: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"a block of\s+\.reqntid 128; it is .* 256 threads"):
        declared_only(from_triton["ptx"], "toy", TYPES, threads=256)


def test_other_entry_points_are_refused(from_triton: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match="has the entry points toy; it must have other alone"):
        declared_only(from_triton["ptx"], "other", TYPES, threads=128)
    two = from_triton["ptx"] + "\n.visible .entry second() {}"
    with pytest.raises(BuildError, match="has the entry points toy, second"):
        declared_only(two, "toy", TYPES, threads=128)


@pytest.mark.parametrize("name", ["global_scratch", "profile_scratch"])
def test_a_kernel_that_needs_scratch_memory_is_refused(
    by_triton: dict[str, Any], new_cache: Path, name: str
) -> None:
    by_triton["scratch"] = by_triton["scratch"] | {name: 128}
    with pytest.raises(BuildError, match=f"kernel toy needs 128 bytes of {name} for sm_80"):
        compiled(TOY, call_of(), 80)


def test_a_kernel_that_triton_gives_scratch_memory_is_refused(toy: Path) -> None:
    # A descriptor that the kernel makes lies in global memory.
    first = "    y = tl.make_tensor_descriptor(Y, [COLUMNS], [1], [BLOCK])\n    column ="
    toy.write_text(
        KERNEL.replace("    column =", first).replace(
            "tl.store(Y + column, twice(total) * FACTOR, mask=inside)",
            "y.store([tl.program_id(0) * BLOCK], twice(total) * FACTOR)",
        )
    )
    with pytest.raises(BuildError, match=r"kernel toy needs \d+ bytes of global_scratch"):
        compiled(TOY, call_of(), 100)


# --- ptxas

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'toy' for 'sm_80'
ptxas info    : Function properties for toy
    32 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem, 392 bytes cmem[0]
"""


def test_registers_spills_and_memory_are_read_from_the_report() -> None:
    report = read_report(REPORT, "toy")
    assert (report.registers, report.spills, report.stack, report.shared_bytes) == (
        255,
        64,
        32,
        2048,
    )


@pytest.mark.parametrize("missing", ["Used 255 registers", "24 bytes spill stores"])
def test_a_report_without_a_figure_is_refused(missing: str) -> None:
    with pytest.raises(BuildError, match="ptxas does not say what registers kernel toy uses"):
        read_report(REPORT.replace(missing, ""), "toy")


def test_what_ptxas_refuses_is_told_in_its_words(
    by_triton: dict[str, Any], new_cache: Path
) -> None:
    by_triton["ptx"] = planted(by_triton["ptx"], "ret;", "return;")
    with pytest.raises(BuildError, match=r"(?s)ptxas .* refuses kernel toy for sm_80:.*'return'"):
        compiled(TOY, call_of(), 80)
    assert not file_of(kernel_hash(TOY, call_of(), 80)).exists()


def test_ptx_for_another_target_is_refused(from_triton: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=r"(?s)refuses kernel toy for sm_80.*sm_120a"):
        assembled(from_triton["ptx"].replace("sm_80", "sm_120a"), "toy", "sm_80")


def test_without_any_ptxas_it_is_said_what_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="there is no ptxas"):
        ptxas.find_ptxas()


def test_too_much_shared_memory_is_refused(by_triton: dict[str, Any], new_cache: Path) -> None:
    by_triton["shared"] = SHARED_LIMIT
    assert compiled(TOY, call_of(), 80).shared_bytes == SHARED_LIMIT
    by_triton["shared"] = SHARED_LIMIT + 16
    with pytest.raises(BuildError, match=r"toy needs 49168 bytes .* it must be 49152 at the most"):
        compiled(TOY, call_of(), 90)


def test_shared_memory_that_the_ptx_fixes_counts_too(
    by_triton: dict[str, Any], new_cache: Path
) -> None:
    by_triton["shared"] = SHARED_LIMIT - 512
    body = "{\n\t.shared .align 16 .b8 own[1024];\n\t.reg .b32 %own;\n\tmov.b32 %own, own;"
    by_triton["ptx"] = re.sub(
        r"(?m)^\{", body + "\n\tst.shared.b32 [%own], %own;", by_triton["ptx"], count=1
    )
    with pytest.raises(BuildError, match="toy needs 49664 bytes of shared memory"):
        compiled(TOY, call_of(), 80)


# --- the process that compiles


def test_a_kernel_that_does_not_compile_is_told_with_the_reason(toy: Path) -> None:
    toy.write_text(KERNEL.replace("tl.load(FIRST)", "tl.load(NOWHERE)"))
    with pytest.raises(BuildError, match=r"(?s)kernel toy does not compile for sm_80:.*NOWHERE"):
        compiled(TOY, call_of(), 80)


def test_a_process_that_dies_is_an_error_that_names_the_kernel(toy: Path) -> None:
    toy.write_text(f"import os\nos.abort()\n{KERNEL}")
    with pytest.raises(BuildError, match=r"kernel toy does not compile for sm_80 \(SIGABRT\)"):
        compiled(TOY, call_of(), 80)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("X, FIRST, CODES", "its first arguments are x, first, codes, rows, columns, y"),
        ("X, CODES, FIRST, EXTRA", "its first arguments are x, codes, first, extra"),
    ],
)
def test_arguments_that_are_not_the_nodes_are_refused(toy: Path, wrong: str, message: str) -> None:
    toy.write_text(KERNEL.replace("X, CODES, FIRST", wrong))
    with pytest.raises(BuildError, match=message):
        compiled(TOY, call_of(), 80)


def test_constants_that_are_not_the_nodes_are_refused(toy: Path) -> None:
    toy.write_text(KERNEL.replace("FACTOR", "SCALE"))
    with pytest.raises(BuildError, match="constants are BLOCK, SCALE; its node's are BLOCK, FACT"):
        compiled(TOY, call_of(), 80)


def test_what_is_said_to_compilers_in_the_environment_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRITON_OVERRIDE_ARCH", "PTXAS_OPTIONS", "MLIR_ENABLE_DUMP", "KEPT"):
        monkeypatch.setenv(name, "1")
    passed = ptx._environment("/folder")
    assert passed["KEPT"] == "1"
    assert {name for name in passed if name.startswith(ptx.COMPILERS_VARIABLES)} == {
        "TRITON_CACHE_DIR",
        "TRITON_DISABLE_LINE_INFO",
    }


def test_a_source_that_changes_meanwhile_is_noticed(
    toy: Path, new_cache: Path, by_triton: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(source: object) -> dict[str, Any]:
        toy.write_text(KERNEL + "# more")
        return by_triton

    monkeypatch.setattr(ptx, "_by_triton", edit)
    with pytest.raises(BuildError, match=r"triton_kernel\.py changed while kernel toy was"):
        compiled(TOY, call_of(), 80)


# --- the hash, and what is kept under it


def test_the_hash_is_told_without_importing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    assert kernel_hash(TOY, call_of(), 80)


@pytest.mark.parametrize("op", ["toy", "toy_helper"])
def test_a_changed_source_has_another_hash(toy: Path, op: str) -> None:
    before = kernel_hash(TOY, call_of(), 80)
    file = toy.parent.parent / op / "triton_kernel.py"
    text = file.read_text()
    file.write_text(text.replace("2.0", "3.0").replace("total +=", "total -="))
    assert kernel_hash(TOY, call_of(), 80) != before
    file.write_text(text)
    assert kernel_hash(TOY, call_of(), 80) == before


def changed(**values: Any) -> PluginNode:
    def launch(call: Call) -> Launch:
        return replace(_launch(call), **values)

    return replace(TOY, launch=launch)


@pytest.mark.parametrize(
    ("node", "call", "sm"),
    [
        (TOY, call_of(), 86),
        (TOY, call_of(dtype="float16"), 80),
        (TOY, call_of(rows=33), 80),
        (changed(constants={"BLOCK": 512, "FACTOR": 0.25}), call_of(), 80),
        (changed(constants={"BLOCK": 64, "FACTOR": 0.5}), call_of(), 80),
        (changed(num_warps=8), call_of(), 80),
        (changed(num_stages=3), call_of(), 80),
    ],
    ids=["sm", "dtype", "alignment", "float", "block", "warps", "stages"],
)
def test_whatever_changes_the_ptx_changes_the_hash(node: PluginNode, call: Call, sm: int) -> None:
    assert kernel_hash(node, call, sm) != kernel_hash(TOY, call_of(), 80)


def test_sizes_that_are_aligned_alike_share_a_kernel() -> None:
    assert kernel_hash(TOY, call_of(rows=48), 80) == kernel_hash(TOY, call_of(rows=160), 80)
    assert kernel_hash(TOY, call_of(rows=1), 80) == kernel_hash(TOY, call_of(rows=33), 80)


def test_another_triton_or_ptx_version_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel_source(TOY, call_of(), 80)
    before = source.hash
    assert replace(source, triton="0").hash != before
    newer = {80: Target(name="sm_80", ptx_version=88)}
    monkeypatch.setattr("export_grok.plugins.ptx.source.TARGETS", newer)
    assert source.hash != before


def test_a_second_call_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(TOY, call_of(), 80)

    def fail(source: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(ptx, "_by_triton", fail)
    assert compiled(TOY, call_of(), 80) == first


def cut(text: str) -> str:
    return text[: len(text) // 2]


def other_code(text: str) -> str:
    return (
        text.replace("add.s32", "sub.s32") if "add.s32" in text else text.replace("ret;", "exit;")
    )


def other_figure(text: str) -> str:
    return re.sub(r'"shared_bytes": \d+', '"shared_bytes": 7', text)


def no_object(text: str) -> str:
    return "[1]"


def unknown_field(text: str) -> str:
    entry = json.loads(text)
    entry["kernel"]["more"] = 1
    return json.dumps(entry)


@pytest.mark.parametrize("damage", [cut, other_code, other_figure, no_object, unknown_field])
def test_a_damaged_file_is_not_trusted(
    by_triton: dict[str, Any],
    new_cache: Path,
    damage: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = compiled(TOY, call_of(), 80)
    file = file_of(whole.hash)
    text = file.read_text()
    file.write_text(damage(text))
    assert file.read_text() != text
    with caplog.at_level(logging.WARNING):
        assert compiled(TOY, call_of(), 80) == whole
    assert by_triton["calls"] == 2
    assert file.read_text() == text
    assert f"{file} is damaged" in caplog.text


def test_a_file_under_the_name_of_another_is_not_trusted(
    by_triton: dict[str, Any], new_cache: Path
) -> None:
    even, odd = compiled(TOY, call_of(), 80), compiled(TOY, call_of(rows=33), 80)
    shutil.copy(file_of(even.hash), file_of(odd.hash))
    assert compiled(TOY, call_of(rows=33), 80).hash == odd.hash
    assert by_triton["calls"] == 3


def test_a_cache_that_cannot_be_written_is_no_error(
    by_triton: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled(TOY, call_of(), 80).name == "toy"
    assert "kernel toy is not kept" in caplog.text


# --- what cannot be asked for


@pytest.mark.parametrize("sm", [75, 90100, -1])
def test_an_unknown_architecture_is_refused_and_the_known_ones_named(sm: int) -> None:
    with pytest.raises(ConfigError, match=f"sm is {sm}; .* for 80, 86, 89, 90, 100, 120"):
        compiled(TOY, call_of(), sm)


def test_without_triton_it_is_said_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kernel_source_module, "version", missing)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernel_source_module.triton_version.cache_clear()
    with pytest.raises(MissingDependencyError, match=r'pip install "export-grok\[triton\]"'):
        compiled(TOY, call_of(), 80)


def test_a_scalar_that_is_no_int32_is_refused() -> None:
    with pytest.raises(BuildError, match="rows of GrokToy is 2147483648; its kernel takes an int"):
        kernel_hash(changed(scalars={"rows": 2**31, "columns": 1}), call_of(), 80)


def test_a_node_without_a_kernel_is_refused() -> None:
    node = replace(TOY, op="nowhere")
    with pytest.raises(BuildError, match=r"GrokToy has no kernel: .*nowhere\.triton_kernel"):
        kernel_hash(node, call_of(), 80)
