"""What is installed is held against what is asked for, and each fault says what to do."""

import os
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from export_grok.engines import installation
from export_grok.engines.installation import EXTRAS, Package, sentence, this_installation
from export_grok.errors import MissingDependencyError
from export_grok.plugins.kernels import Kernels

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [
    "click>=8.5",
    'torch>=2.13; extra == "export"',
    "onnxruntime>=1.32; extra == 'onnxruntime'",
    'onnxruntime-gpu>=1.31; extra == "gpu"',
    'tensorrt>=11.1; python_version > "3" and extra == "gpu"',
    'export-grok[export,onnxruntime]; extra == "verify"',
    'polygraphy>=0.53.6; extra == "verify"',
]


class Installed(dict[str, str]):
    """Distributions by name, with their versions, in the place of those that are here."""

    def version(self, name: str) -> str:
        """Return it as importlib.metadata does."""
        if name not in self:
            raise metadata.PackageNotFoundError(name)
        return self[name]

    def modules(self) -> dict[str, list[str]]:
        """Return which distributions bring a module; one is listed for each of its files."""
        runtimes = [name for name in self if name.startswith("onnxruntime")]
        return {"onnxruntime": runtimes * 2} if runtimes else {}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Return what is installed, for the test to change."""
    found = Installed({"click": "8.5.1", "torch": "2.13.0+cpu", "onnxruntime": "1.32.0"})
    monkeypatch.setattr(metadata, "requires", lambda _name: LINES)
    monkeypatch.setattr(metadata, "version", found.version)
    monkeypatch.setattr(metadata, "packages_distributions", found.modules)
    monkeypatch.delenv("EXPORT_GROK_KERNELS", raising=False)
    return found


def asked(extra: str) -> list[str]:
    """Return the packages of an extra of the project, those of extras that it brings first."""
    lines: list[str] = PROJECT["optional-dependencies"][extra]
    brought = [line for line in lines if line.startswith("export-grok[")]
    names = [name for line in brought for name in line[len("export-grok[") : -1].split(",")]
    return [
        *(line for name in names for line in asked(name)),
        *(line for line in lines if line not in brought),
    ]


def command_of(extra: str) -> str | None:
    return {found.name: found.command for found in this_installation().extras}[extra]


def test_the_extras_are_those_of_the_project() -> None:
    assert {*EXTRAS, "dev"} == PROJECT["optional-dependencies"].keys()


def test_every_package_that_the_project_asks_for_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        f'{line}; extra == "{extra}"'
        for extra, packages in PROJECT["optional-dependencies"].items()
        for line in packages
    ]
    monkeypatch.setattr(metadata, "requires", lambda _name: [*PROJECT["dependencies"], *lines])
    for extra in this_installation().extras:
        assert [f"{package.name}>={package.wanted}" for package in extra.packages] == asked(
            extra.name
        )


def test_an_extra_that_brings_others_lacks_what_they_lack(installed: Installed) -> None:
    installed["polygraphy"] = "0.53.6"
    assert command_of("verify") is None
    del installed["torch"]
    assert command_of("verify") == 'pip install "export-grok[verify]"'


@given(*[st.lists(st.integers(0, 20), min_size=1, max_size=4)] * 2, st.sampled_from(["", "+cpu"]))
def test_versions_are_compared_as_pip_does(one: list[int], other: list[int], tail: str) -> None:
    wanted, version = (".".join(map(str, numbers)) for numbers in (one, other))
    package = Package(name="p", wanted=wanted, version=version + tail)
    assert package.suits == (Version(version) >= Version(wanted))


def test_a_package_that_is_not_there_does_not_suit() -> None:
    assert not Package(name="p", wanted="0", version=None).suits


def test_what_is_all_there_has_no_faults_and_needs_no_command(installed: Installed) -> None:
    assert this_installation().faults == ()
    assert command_of("export") is None
    assert command_of("onnxruntime") is None


def test_an_extra_that_lacks_one_is_installed_by_its_name(installed: Installed) -> None:
    del installed["torch"]
    assert this_installation().faults == ()
    assert command_of("export") == 'pip install "export-grok[export]"'


def test_without_onnx_runtime_nothing_runs(installed: Installed) -> None:
    del installed["onnxruntime"]
    (fault,) = this_installation().faults
    assert "not installed" in fault
    assert fault.endswith('pip install "export-grok[onnxruntime]"')


def test_any_distribution_of_onnx_runtime_will_do(installed: Installed) -> None:
    installed["onnxruntime-gpu"] = installed.pop("onnxruntime")
    assert this_installation().faults == ()


def test_an_older_onnx_runtime_is_told_with_what_it_means(installed: Installed) -> None:
    installed["onnxruntime"] = "1.31.2"
    (fault,) = this_installation().faults
    assert "is 1.31.2; " in fault
    assert "1.32 or newer" in fault
    assert fault.endswith('pip install -U "onnxruntime>=1.32"')


def test_two_distributions_of_onnx_runtime_are_one_too_many(installed: Installed) -> None:
    installed["onnxruntime-gpu"] = "1.32.0"
    (fault,) = this_installation().faults
    assert "pip uninstall onnxruntime onnxruntime-gpu" in fault


def test_no_command_leads_to_two_distributions_of_onnx_runtime(installed: Installed) -> None:
    assert command_of("gpu") == 'pip uninstall onnxruntime && pip install "export-grok[gpu]"'
    installed["onnxruntime-gpu"] = installed.pop("onnxruntime")
    assert command_of("gpu") == 'pip install "export-grok[gpu]"'  # tensorrt is still lacking
    assert command_of("onnxruntime") == (
        'pip uninstall onnxruntime-gpu && pip install "export-grok[onnxruntime]"'
    )


def test_what_every_stage_needs_is_looked_at_too(installed: Installed) -> None:
    installed["click"] = "8.4.9"
    (fault,) = this_installation().faults
    assert fault.startswith("click is 8.4.9; 8.5 or newer is needed")


def test_a_variable_that_asks_for_what_is_not_there_is_a_fault(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPORT_GROK_KERNELS", "fast")
    found = this_installation()
    assert found.kernels is None
    assert found.faults == ("EXPORT_GROK_KERNELS is 'fast'; it must be native, builtin or unset",)


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    with pytest.raises(MissingDependencyError, match="export-grok is not installed, it only lies"):
        this_installation()


@pytest.mark.parametrize("source", ["native/kernels.h", "native/library.cpp", "op/ort_kernel.cpp"])
def test_a_source_changed_since_the_library_was_made_is_named(
    source: str, installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "ort_kernels.native.so"
    for path in (library, tmp_path / source):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    kernels = Kernels(library=library, isa="avx2", supported=("avx2",), reason="r")
    monkeypatch.setattr(installation, "native_kernels", lambda: kernels)
    os.utime(tmp_path / source, (1, 1))
    assert this_installation().newer is None
    os.utime(library, (0, 0))
    assert this_installation().newer == tmp_path / source


def test_a_sentence_says_which_kernels_run_and_why() -> None:
    assert sentence(Kernels(reason="no compiler")) == "built into ONNX Runtime: no compiler"
    native = Kernels(library=Path("l.so"), isa="avx2", supported=("avx2",), reason="the best")
    assert sentence(native) == "native, avx2: the best"
