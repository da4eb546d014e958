"""What every backend offers, and how one is found by name: each is a folder beside this file."""

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from export_grok import engines
from export_grok.artifacts import Bundle
from export_grok.config import Dtype, EngineOptions, GrokConfig, HeadDtype
from export_grok.engines.demand import Demand, Graphs
from export_grok.engines.probe import Probe
from export_grok.errors import ConfigError
from export_grok.needs import Needs

__all__ = [
    "Builder",
    "RowSession",
    "Session",
    "backend_dtype",
    "backend_names",
    "build_needs",
    "builder",
    "check_options",
    "engine_summary",
    "functions_needs",
    "interpreter_needs",
    "open_functions",
    "open_interpreter",
    "open_probe",
    "open_session",
    "probe_needs",
    "session_needs",
]


class Session(Protocol):
    """A loaded engine with a cache for a fixed number of rows.

    Attributes:
        config: of the model.
        batch: rows, B.
        max_length: slots of the cache for each row, T.
    """

    config: GrokConfig
    batch: int
    max_length: int

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens into the cache; return the logits of one token of each row, [B, V].

        Args:
            tokens: new tokens [B, S]. A shorter row is padded on the right with any token.
            start: tokens of each row that the cache holds already [B].
            last: which of the S tokens to give logits for [B]; None for none: saves the head.

        Raises:
            RequestError: the tokens do not fit the cache, or are not of the vocabulary.
        """

    def forward_all(
        self, tokens: NDArray[np.int64], start: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Write the tokens into the cache; return the logits of every token, [B, S, V].

        Raises:
            RequestError: the tokens do not fit the cache, or are not of the vocabulary.
        """


class RowSession(Session, Protocol):
    """A session whose rows are independent: each call says which of them it is about.

    A row holds the tokens that were last written into it, up to the last of them. Calls that do
    not name a row leave what it holds as it is.

    Attributes:
        prefill_rows: how many rows it is best to bring tokens for at once: where a graph takes
            one row's chunk at a time, 1; else all.
    """

    prefill_rows: int

    def forward(
        self,
        tokens: NDArray[np.int64],
        start: NDArray[np.int64],
        last: NDArray[np.int64] | None,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32] | None:
        """Write the tokens of some rows into the cache; return the logits of one of each, [R, V].

        Args:
            tokens: new tokens [R, S]. A shorter row is padded on the right with any token.
            start: tokens of each of these rows that the cache holds already [R].
            last: which of the S tokens to give logits for [R]; None for none: saves the head.
            rows: which rows of the cache these are [R], each at most once, in any order; None
                for all B in their order.

        Raises:
            RequestError: the tokens do not fit the cache, or are not of the vocabulary; a row is
                none of the session's, or is named twice.
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens that a row holds those of another, as if computed for it.

        Args:
            source: row that holds `length` tokens or more.
            target: another row; what it held is gone.
            length: how many, 1 or more.

        Raises:
            RequestError: a row is none of the session's, both are one, or the cache is shorter.
        """


class Builder(Protocol):
    """Builds the engine of a folder of graphs, in that folder."""

    def __call__(self, graphs: Bundle, options: EngineOptions) -> Bundle:
        """Return the bundle.

        Raises:
            BuildError: the backend cannot run these graphs.
            ConfigError: an option does not go with the backend, the model or the machine.
            OutputError: the folder cannot be written.
        """


class _Opener(Protocol):
    def __call__(
        self, bundle: Bundle, *, batch: int, max_length: int, threads: int | None
    ) -> RowSession: ...


def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, sorted."""
    folders = (info.name for info in pkgutil.iter_modules(engines.__path__) if info.ispkg)
    return tuple(sorted(name.replace("_", "-") for name in folders))


def builder(name: str) -> Builder:
    """Return what builds engines for the backend `name`.

    Raises:
        ConfigError: there is no such backend.
    """
    return cast(Builder, _part(name, "build").build_engine)


def engine_summary(bundle: Bundle) -> str:
    """Return in a few words what the engine of a bundle consists of."""
    summary: str = _part(str(bundle.manifest.backend), "build").summary(bundle.manifest)
    return summary


def check_options(
    name: str, config: GrokConfig, dtype: Dtype, head: HeadDtype, options: EngineOptions
) -> None:
    """Hold options to the backend `name`, the model and this machine, before any work is done.

    Raises:
        BuildError: the backend needs a machine that this is not.
        ConfigError: an option cannot be, or there is no such backend.
        MissingDependencyError: a package is not installed.
    """
    _part(name, "build").check_options(config, dtype, head, options)


def backend_dtype(name: str, dtype: Dtype | None) -> Dtype:
    """Return a dtype held to the `DTYPES` of the backend `name`; its first if there is none.

    Raises:
        ConfigError: there is no such backend, or it does not compute in `dtype`.
    """
    dtypes: tuple[Dtype, ...] = _part(name, "build").DTYPES
    if dtype is None:
        return dtypes[0]
    if dtype not in dtypes:
        raise ConfigError(
            f"the {name} engine does not compute in {dtype}; use --dtype {' or '.join(dtypes)}"
        )
    return dtype


def build_needs(name: str, graphs: Graphs, options: EngineOptions) -> Needs:
    """Return what building an engine takes; nothing if the folder has it already.

    Raises:
        ConfigError: there is no such backend.
    """
    needs: Needs = _part(name, "needs").build_needs(graphs, options)
    return needs


def session_needs(bundle: Bundle, demand: Demand) -> Needs:
    """Return what an engine takes with what it is asked, in all its ranks."""
    needs: Needs = _part(str(bundle.manifest.backend), "needs").session_needs(bundle, demand)
    return needs


def probe_needs(bundle: Bundle) -> Needs:
    """Return the memory that the engine's graphs take one at a time; see `open_probe`."""
    needs: Needs = _part(str(bundle.manifest.backend), "needs").probe_needs(bundle)
    return needs


def functions_needs(bundle: Bundle, layers: int) -> Needs:
    """Return the memory of so many of its layers by function bodies; see `open_functions`."""
    needs: Needs = _part("ort", "needs").functions_needs(bundle, layers)
    return needs


def interpreter_needs(bundle: Bundle, layers: int) -> Needs:
    """Return the memory of so many of its layers, interpreted; see `open_interpreter`."""
    name = str(bundle.manifest.backend)
    needs: Needs = _part(name, "needs").interpreter_needs(bundle, layers)
    return needs


def open_session(
    bundle: Bundle, *, batch: int, max_length: int, threads: int | None = None
) -> RowSession:
    """Return the loaded engine of a bundle.

    Args:
        bundle: with an engine.
        batch: rows of the cache.
        max_length: longest row, prompt and answer together, in tokens.
        threads: to compute with; as many as there are cores by default.

    Raises:
        ConfigError: there is no such backend, or a number is out of range.
        BundleError: the engine does not load.
    """
    if batch < 1 or max_length < 1:
        raise ConfigError(f"batch is {batch}, max_length {max_length}; both must be 1 or more")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be 1 or more")
    opener = cast(_Opener, _part(str(bundle.manifest.backend), "session").open_engine)
    return opener(bundle, batch=batch, max_length=max_length, threads=threads)


def open_probe(bundle: Bundle, *, threads: int | None = None) -> Probe:
    """Return what runs the graphs of a bundle's engine one at a time.

    Args:
        bundle: with an engine.
        threads: to compute with; as many as there are cores by default.

    Raises:
        BundleError: the manifest does not say what the engine is.
        ConfigError: there is no such backend.
        MissingDependencyError: a package, or a GPU, is missing.
    """
    probe: Probe = _part(str(bundle.manifest.backend), "probe").open_probe(bundle, threads=threads)
    return probe


def open_functions(bundle: Bundle, *, threads: int | None = None) -> Probe:
    """Return what runs the graphs of a bundle on a CPU by the function bodies of their ops.

    Raises:
        ConfigError: the graphs are of a dtype that a CPU has no kernels for.
    """
    probe: Probe = _part("ort", "probe").open_functions(bundle, threads=threads)
    return probe


def open_interpreter(bundle: Bundle, *, threads: int | None = None) -> Probe:
    """Return what runs on a CPU the graphs that the plans of a bundle are built from, in float32.

    Raises:
        BundleError: the graphs were made by another version of the program.
        ConfigError: the engine has no plans, and runs on a CPU itself.
        MissingDependencyError: torch is not installed.
    """
    name = str(bundle.manifest.backend)
    if name == "ort":
        raise ConfigError(
            f"the {name} engine in {bundle.folder} runs here: leave --interpret away"
        )
    probe: Probe = _part(name, "interpreter").open_interpreter(bundle, threads=threads)
    return probe


def _part(name: str, file: str) -> ModuleType:
    if name not in backend_names():
        raise ConfigError(f"there is no backend {name!r}; use {', '.join(backend_names())}")
    return importlib.import_module(f"{engines.__name__}.{name.replace('-', '_')}.{file}")
