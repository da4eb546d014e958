"""What this installation can do: packages against what pyproject.toml asks for, and kernels.

Versions are those that pip wrote down; no package is imported for them.
"""

import itertools
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import export_grok
from export_grok.errors import ConfigError, MissingDependencyError
from export_grok.machine import Machine, this_machine
from export_grok.plugins.kernels import Kernels, native_kernels

__all__ = ["EXTRAS", "Extra", "Installation", "Package", "sentence", "this_installation"]

DISTRIBUTION = "export-grok"
# What each extra is for; `dev` is for who works on export-grok.
EXTRAS = {
    "export": "graphs of a checkpoint",
    "onnxruntime": "engines on a CPU",
    "tensorrt-rtx": "TensorRT plans for RTX GPUs, built on a CPU",
    "triton": "kernels of TensorRT engines, compiled on a CPU",
    "gpu": "engines on NVIDIA GPUs",
    "plot": "figures of bench and quantise-report",
    "verify": "holding engines to the model",
    "metrics": "what Prometheus reads of a model",
    "c-library": "the library for C and C++",
}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that is asked for.

    Attributes:
        name: that pip knows it by.
        wanted: the oldest version that will do.
        version: installed; None if it is not.
    """

    name: str
    wanted: str
    version: str | None

    @property
    def suits(self) -> bool:
        """Whether it is installed, in a version that will do."""
        return self.version is not None and _numbers(self.version) >= _numbers(self.wanted)


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Packages that some stages need, installed by one name.

    Attributes:
        name: that pip knows them by.
        purpose: what they are for.
        packages: that belong to it.
        in_the_way: installed packages that those which are lacking would overwrite.
    """

    name: str
    purpose: str
    packages: tuple[Package, ...]
    in_the_way: tuple[str, ...]

    @property
    def command(self) -> str | None:
        """What installs what is lacking; None if nothing is."""
        if all(package.suits for package in self.packages):
            return None
        install = f'pip install "{DISTRIBUTION}[{self.name}]"'
        return " && ".join([f"pip uninstall {name}" for name in self.in_the_way] + [install])


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What there is, and what keeps engines from running.

    Attributes:
        version: of export-grok.
        folder: its modules.
        python: version of the interpreter.
        executable: path of the interpreter.
        machine: that it runs on.
        kernels: the CPU kernels; None where an environment variable asks for what is not there.
        newer: a source of the compiled kernels that was changed since; None if none was.
        runtime: what ONNX Runtime is installed as; more than one overwrite each other.
        extras: by the order of `EXTRAS`.
        faults: why engines do not run, each with what to do; none if they do.
    """

    version: str
    folder: Path
    python: str
    executable: str
    machine: Machine
    kernels: Kernels | None
    newer: Path | None
    runtime: tuple[Package, ...]
    extras: tuple[Extra, ...]
    faults: tuple[str, ...]


def this_installation() -> Installation:
    """Return what there is here.

    Raises:
        MissingDependencyError: export-grok was not installed, so nothing says what it needs.
    """
    wanted = _wanted()
    runtime = _runtime(wanted["onnxruntime"][0])
    extras = tuple(
        _extra(name, purpose, wanted.get(name, ()), runtime) for name, purpose in EXTRAS.items()
    )
    kernels, kernels_faults = _kernels()
    return Installation(
        version=export_grok.__version__,
        folder=Path(export_grok.__file__).parent,
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        machine=this_machine(),
        kernels=kernels,
        newer=_newer_source(kernels.library) if kernels and kernels.library else None,
        runtime=runtime,
        extras=extras,
        faults=(*_lacking(wanted[""]), *_runtime_faults(runtime), *kernels_faults),
    )


def sentence(kernels: Kernels) -> str:
    """Return which kernels run and why."""
    which = f"native, {kernels.isa}" if kernels.library else "built into ONNX Runtime"
    return f"{which}: {kernels.reason}"


def _wanted() -> dict[str, tuple[Package, ...]]:
    """Return the packages asked for by extra; those that all stages need are in ""."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"{DISTRIBUTION} is not installed, it only lies in "
            f"{Path(export_grok.__file__).parent}; install it with pip: see README.md"
        ) from error
    found: dict[str, tuple[Package, ...]] = {}
    brought: dict[str, list[str]] = {}
    for line in lines:
        # As pip writes them: `torch>=2.13; extra == "export"`, and of an extra that brings
        # others: `export-grok[export,plot]; extra == "verify"`.
        match = re.match(
            r"""([\w.-]+)(\[[\w,-]+\]|>=[\w.]+)(?:.*extra == ["']([\w-]+)["'])?""", line
        )
        if not match:
            continue
        name, what, extra = match.groups(default="")
        if what.startswith("["):
            brought[extra] = what.strip("[]").split(",") if name == DISTRIBUTION else []
            continue
        package = Package(name=name, wanted=what.removeprefix(">="), version=_version(name))
        found[extra] = (*found.get(extra, ()), package)
    for extra, others in brought.items():
        parts = (found.get(other, ()) for other in others)
        found[extra] = (*itertools.chain(*parts), *found.get(extra, ()))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, without zeros at the end: 2.13.0+cpu is 2.13."""
    release = re.match(r"\d+(\.\d+)*", version)
    text = re.sub(r"(\.0+)+$", "", release[0]) if release else "0"
    return tuple(map(int, text.split(".")))


def _runtime(wanted: Package) -> tuple[Package, ...]:
    """Return the distributions that bring the module, of which there are several."""
    names = metadata.packages_distributions().get(wanted.name, [])
    return tuple(
        Package(name=name, wanted=wanted.wanted, version=_version(name))
        for name in sorted(set(names))
    )


def _extra(
    name: str, purpose: str, packages: tuple[Package, ...], runtime: tuple[Package, ...]
) -> Extra:
    names = {package.name for package in packages}
    # Two distributions of ONNX Runtime would write into one folder.
    brings = any(found.name.startswith("onnxruntime") for found in packages if not found.version)
    others = tuple(found.name for found in runtime if brings and found.name not in names)
    return Extra(name=name, purpose=purpose, packages=packages, in_the_way=others)


def _runtime_faults(runtime: tuple[Package, ...]) -> list[str]:
    if not runtime:
        return [
            "ONNX Runtime, which runs the engines, is not installed: "
            f'pip install "{DISTRIBUTION}[onnxruntime]"'
        ]
    names = " ".join(package.name for package in runtime)
    if len(runtime) > 1:
        return [
            f"ONNX Runtime is installed {len(runtime)} times ({names}), and one overwrites the "
            f'other: pip uninstall {names}; then pip install "{DISTRIBUTION}[onnxruntime]"'
        ]
    return [
        f"ONNX Runtime is {package.version}; graphs and kernels are made for {package.wanted} or "
        f'newer, and in an older one may not load or not be exact: pip install -U "{package.name}'
        f'>={package.wanted}"'
        for package in runtime
        if not package.suits
    ]


def _lacking(packages: tuple[Package, ...]) -> list[str]:
    return [
        f"{package.name} is {package.version or 'not installed'}; {package.wanted} or newer is "
        f'needed: pip install -U "{package.name}>={package.wanted}"'
        for package in packages
        if not package.suits
    ]


def _kernels() -> tuple[Kernels | None, list[str]]:
    try:
        return native_kernels(), []
    except ConfigError as error:
        return None, [str(error)]


def _newer_source(library: Path) -> Path | None:
    """Return a source in the checkout that is newer than the library made of it."""
    plugins = library.parent
    sources = [*plugins.glob("native/*"), *plugins.glob("*/ort_kernel.cpp")]
    made = library.stat().st_mtime
    return next((path for path in sorted(sources) if path.stat().st_mtime > made), None)
