"""Programs in C (gcc, C11): answers, misuse, cancelling, many threads, and every way to leave.

Each holds the laws that its first lines say by itself; what is checked here is what only the
outside sees.
"""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from export_grok.config import EngineOptions
from export_grok.engines.pipeline import engine_from_source
from export_grok.runtime import GenerationParams, load
from tests.conftest import DATA
from tests.runtime.c_library.conftest import Program

PROMPT = "On the second night the wind"
Run = Callable[..., str]


@pytest.fixture
def run(program: Program, tmp_path: Path) -> Run:
    """Return the way to run a program, which must end well and complain of nothing."""

    def ran(name: str, *words: object, **environment: str) -> str:
        done = subprocess.run(
            [program(name), *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return ran


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an engine for two ranks."""
    folder = tmp_path_factory.mktemp("ranked") / "bundle"
    options = EngineOptions(tensor_parallel=2)
    return engine_from_source(DATA / "tiny", folder, backend="ort", engine=options).folder


def test_a_program_gets_the_text_that_python_gets(run: Run, demo: Path) -> None:
    params = GenerationParams(max_new_tokens=30, ignore_eos=True)
    with load(demo) as model:
        (expected,) = model.generate(PROMPT, params)
    assert run("answer", demo, PROMPT, 30) == expected.text


def test_a_program_gets_whole_characters_of_a_model_that_says_bytes(run: Run, demo: Path) -> None:
    with load(demo) as model:
        by_byte = {model.tokenizer.byte(token): token for token in range(model.config.vocab_size)}
        tokens = [by_byte[byte] for byte in "é道".encode()]
        params = GenerationParams(
            logit_bias=dict.fromkeys(tokens, 100.0),
            temperature=4.0,
            top_k=len(tokens),
            seed=5,
            max_new_tokens=100,
        )
        (expected,) = model.generate("a", params)
    assert "é" in expected.text
    assert run("bytes", demo, *tokens) == expected.text


def test_each_misuse_from_c_gives_a_code_and_a_text_and_aborts_nothing(
    run: Run, demo: Path, tmp_path: Path
) -> None:
    """Report 77: bad paths, null pointers, handles used twice."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text('{"cut": ')
    run("misuse", demo, damaged)


def test_a_hundred_answers_cancelled_from_c_leave_rows_and_memory_as_they_were(
    run: Run, demo: Path
) -> None:
    """Report 76, from C: at random steps, and the next answer is right."""
    grown = int(run("cancel", demo, 100))
    assert grown < 2048, f"grew by {grown} kB"


def test_sixteen_threads_get_the_answers_of_one(run: Run, demo: Path) -> None:
    run("threads", demo)


def test_a_forked_child_is_told_so_and_ends(run: Run, demo: Path) -> None:
    run("forked", demo)


def test_a_plugin_gets_it_for_itself_and_signals_stay_the_hosts(
    run: Run, demo: Path, c_library: Path
) -> None:
    run("plugin", c_library / "lib" / "libexport_grok.so", demo)


@pytest.mark.parametrize("how", ["return", "exit", "_exit", "die", "kill"])
def test_no_rank_outlives_a_program_however_it_leaves(
    program: Program, ranked: Path, how: str
) -> None:
    done = subprocess.run(
        [program("leave"), ranked, how], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == (-9 if how == "die" else 0), done.stderr
    assert done.stderr == ""
    ranks = [Path("/proc", pid, "cmdline") for pid in done.stdout.split()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 20
    while any(is_rank(path) for path in ranks):
        assert time.monotonic() < deadline, f"{how}: a rank is left"
        time.sleep(0.02)


def is_rank(command: Path) -> bool:
    try:
        return b"ranks.process" in command.read_bytes()
    except OSError:
        return False


def test_it_finds_its_python_whatever_the_environment_says(run: Run, demo: Path) -> None:
    plain = run("answer", demo, "a", 4)
    nonsense = {
        "PATH": "",
        "PYTHONHOME": "/nowhere",
        "PYTHONPATH": "/nowhere",
        "PYTHONSTARTUP": "/nowhere",
        "PYTHONSAFEPATH": "",
        "PYTHONIOENCODING": "ascii",
        "VIRTUAL_ENV": "/nowhere",
        "LC_ALL": "C",
    }
    assert run("answer", demo, "a", 4, **nonsense) == plain


@pytest.mark.parametrize("how", ["early", "return", "exit"])
def test_an_engine_that_computes_ends_before_its_library(run: Run, demo: Path, how: str) -> None:
    for _ in range(4):  # without that, every other one crashed
        run("leave", demo, how)


def test_ranks_start_whatever_the_environment_says(run: Run, ranked: Path) -> None:
    assert len(run("leave", ranked, "return", PATH="", PYTHONHOME="/nowhere").split()) == 2


def test_a_module_in_the_current_folder_is_none_of_its(
    run: Run, demo: Path, tmp_path: Path
) -> None:
    for name in ("numpy", "json", "sitecustomize", "export_grok"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    run("answer", demo, "a", 4, PYTHONPATH=str(tmp_path))


def test_a_path_may_have_any_letters_in_any_locale(run: Run, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "Fußweg 道").symlink_to(demo)
    run("answer", tmp_path / "Fußweg 道", "é", 4, LC_ALL="C")
