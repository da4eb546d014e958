"""The C++ header: its laws, on a library without a model, and the compilers that take it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[2] / "runtime" / "c_library"
SOURCES = [HERE / "hpp_laws.cpp", HERE / "fake_export_grok.cpp"]
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]

LAWS = re.findall(r'^    \{"(\w+)",$', SOURCES[0].read_text(encoding="utf-8"), re.M)
ABORTS = "looking_away_from_an_error_ends_with_its_text"


def compile_with(compiler: str, *arguments: str | Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run(
        [compiler, *STRICT, "-pthread", f"-I{HEADERS}", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("hpp") / "hpp_laws"
    compile_with("g++", *SOURCES, "-o", program)
    return program


@pytest.mark.parametrize("law", [law for law in LAWS if law != ABORTS])
def test_the_law_holds(laws: Path, law: str) -> None:
    done = subprocess.run([laws, law], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_value_of_an_error_ends_the_process_with_its_text(laws: Path) -> None:
    done = subprocess.run([laws, ABORTS], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "nowhere is no bundle" in done.stderr


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("flag", ["-fno-exceptions", "-fno-rtti", "-std=c++20"])
def test_it_compiles_alone(compiler: str, flag: str, tmp_path: Path) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(
        "#include <export_grok.hpp>\n"
        "int main() {\n"
        '    auto model = export_grok::Model::open("engine");\n'
        "    if (!model) return 1;\n"
        '    auto request = model->submit("In the beginning");\n'
        "    if (!request) return 1;\n"
        "    for (const auto &piece : request->pieces()) {\n"
        "        if (!piece) return 1;\n"
        "    }\n"
        "    return request->answer() && model->metrics() ? 0 : 1;\n"
        "}\n"
    )
    compile_with(compiler, flag, "-fsyntax-only", source)


def test_a_result_that_nobody_looks_at_is_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "ignored.cpp"
    source.write_text(
        "#include <export_grok.hpp>\n"
        "void cancel(const export_grok::Request &request) { request.cancel(); }\n"
    )
    with pytest.raises(AssertionError, match="nodiscard"):
        compile_with("g++", "-fsyntax-only", source)
