"""docs/embedding.md names files, tensors and fields that bundles have; what it shows compiles."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from export_grok.artifacts import HEAD_WEIGHTS, MANIFEST, TOKENIZER, WEIGHT_INDEX, Bundle
from export_grok.commands.package import package
from export_grok.config import SUMS
from export_grok.engines.cut import PARTIAL, SUM
from export_grok.engines.trt.graphs import static_graphs
from export_grok.engines.trt.record import (
    PHASES,
    Binding,
    GraphRecord,
    PlanRecord,
    Sizes,
    TrtRecord,
)
from export_grok.export.contract import GRAPH_KINDS, ports
from export_grok.export.head import head_index
from export_grok.manifest import Manifest, WeightsPlace
from export_grok.plugins.kernels import native_kernels
from export_grok.runtime.model import load
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.triton_server.api import Errors
from export_grok.runtime.triton_server.repository import FILES
from export_grok.runtime.triton_server.tensors import INPUTS, OUTPUTS, Port
from export_grok.weights import Weight
from tests.bundles import BundleOf, bundle_of
from tests.citations import faults
from tests.documents import ROOT, blocks, links

__all__ = ["bundle_of"]

TEXT = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## (\w)\. [^\n]*\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
)
HEADERS = ROOT / "runtime" / "c_library"

# Of other programs.
THEIRS = {
    *("AddConfigEntry", "BindInput", "BindOutput", "RegisterCustomOpsLibrary", "Run"),
    *("kUSER_MANAGED", "setTensorAddress", "enqueueV3", "EXECUTION_ENV_PATH", "FROM", "execute"),
    *("generate_stream", "sys.executable", "ort_kernels.native.so", "plugins"),
}


def names(text: str) -> set[str]:
    """Return what a text has between backticks, its blocks of code left out."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def fields(*classes: Any) -> set[str]:
    return {field.name for each in classes for field in dataclasses.fields(each)}


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo")


def test_every_name_in_the_part_about_loops_is_one_of_a_bundle(demo: Bundle) -> None:
    manifest = demo.manifest
    static = [each.record for each in static_graphs(demo, Sizes(batch=2, chunk=8, max_length=64))]
    tensors = {row["name"] for rows in manifest.ports.values() for row in rows}
    tensors |= {binding.name for graph in static for binding in graph.bindings}
    of_ranks = {row.name for kind in GRAPH_KINDS for row in ports(kind, demo.config, "float32", 2)}
    index = {*demo.index().weights, *head_index(demo.config, demo.folder).weights}
    known = {
        *tensors,
        *(of_ranks | {PARTIAL, SUM}),
        *index,
        *{"embedding.", "layers.N.", "start + S"},
        *(set(manifest.files) | {MANIFEST, WEIGHT_INDEX, TOKENIZER, HEAD_WEIGHTS, "ranks/"}),
        *fields(Manifest, WeightsPlace, TrtRecord, Sizes, GraphRecord, PlanRecord, Binding),
        *fields(Weight, type(demo.config)),
        *(*GRAPH_KINDS, *PHASES, *SUMS, "engine", "format_version", "ort", "trt", "trt-rtx"),
        *(f"{graph.file.removesuffix('.onnx')}.sm90.HASH.plan" for graph in static),
        *THEIRS,
    }
    assert names(SECTIONS["B"]) - known == set()
    assert (
        tensors
        - index
        - names(SECTIONS["B"])
        - {binding.name for graph in static for binding in graph.bindings if binding.weight}
        == set()
    )


def test_weights_are_found_by_the_prefixes_that_are_told(demo: Bundle) -> None:
    stored = set(demo.index().weights)
    for graph in static_graphs(demo, Sizes(batch=2, chunk=8, max_length=64)):
        prefix = {"embedding": "embedding.", "layer": "layers.0."}.get(graph.record.kind, "")
        for binding in graph.record.bindings:
            assert binding.weight is None or f"{prefix}{binding.weight}" in stored
    assert list(head_index(demo.config, demo.folder).weights) == re.findall(
        r"`((?:unembedding|final_norm)\.\w+)`", SECTIONS["B"]
    )


def test_the_loop_gives_the_tokens_of_the_engine(
    demo: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native_kernels().library
    if library is None:
        pytest.skip("there are no native kernels")
    (block,) = (each.text for each in blocks(SECTIONS["B"]) if each.language == "python")
    assert "export_grok" not in block
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").symlink_to(demo.folder)
    (tmp_path / "ort_kernels.native.so").symlink_to(library)
    scope: dict[str, Any] = {}
    exec(compile(block, "embedding.md", "exec"), scope)
    params = GenerationParams(max_new_tokens=8, ignore_eos=True)
    with load(demo.folder, threads=1) as model:
        (wanted,) = model.generate([[5, 17, 42]], params)
    assert scope["tokens"] == [5, 17, 42, *wanted.tokens]


def test_python_in_process_runs_as_it_is_shown(
    demo: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = blocks(TEXT)[-1]
    assert block.text in SECTIONS["D"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").symlink_to(demo.folder)
    exec(compile(block.text, "embedding.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("language", "command"),
    [("c", ["cc", "-std=c11"]), ("cpp", ["c++", "-std=c++17"])],
)
def test_the_programs_compile_without_a_warning(language: str, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    (program,) = re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)
    flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADERS}"]
    kind = {"c": "c", "cpp": "c++"}[language]
    made = subprocess.run(
        [*command, *flags, "-x", kind, "-"], input=program, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def test_every_name_of_the_c_interface_is_in_its_header() -> None:
    header = (HEADERS / "export_grok.h").read_text(encoding="utf-8")
    told = {name for name in names(SECTIONS["A"]) if re.fullmatch(r"(eg|EG)_[A-Za-z_]+", name)}
    assert told
    assert all(re.search(rf"\b{name}\b", header) for name in told)


def test_the_tensors_of_triton_are_those_of_its_configuration() -> None:
    table = [
        line.strip("| ").split(" | ") for line in SECTIONS["C"].splitlines() if "TYPE_" in line
    ]
    told: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for cells in table:
        for place, where in enumerate((cells[0:2], cells[3:5])):
            if len(where) == 2:
                kind = where[1].replace("`", "")
                told[place].update(dict.fromkeys(re.findall(r"`(\w+)`", where[0]), kind))
    for found, declared in zip(told, (INPUTS, OUTPUTS), strict=True):
        assert found == {port.name: _kind(port) for port in declared}


def test_every_other_name_about_triton_is_known() -> None:
    known = {port.name for port in (*INPUTS, *OUTPUTS)}
    known |= {f"models/grok/{file}" for file in FILES} | {"config.pbtxt", "GenerationParams"}
    known |= {option for parameter in package.params for option in parameter.opts}
    known |= set(Errors.__annotations__) | {"KIND_CPU", "KIND_GPU", "KIND_MODEL", "ort", "[gpu]"}
    known |= {'pip install "export-grok[onnxruntime]"'} | THEIRS
    assert {name for name in names(SECTIONS["C"]) if "TYPE_" not in name} - known == set()


def test_links_lead_somewhere_and_cited_tests_exist() -> None:
    assert all((ROOT / "docs" / name).exists() for name in links(TEXT))
    assert list(faults(TEXT)) == []


def _kind(port: Port) -> str:
    return f"{port.data_type} [-1]" if port.many else port.data_type
