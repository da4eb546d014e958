"""Which kernels a session runs by: the library's where there is one, else the built-in ones."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from export_grok.artifacts import Bundle, graph_file
from export_grok.engines.backend import open_session
from export_grok.engines.ort.session import OrtSession, open_engine
from export_grok.errors import ConfigError
from export_grok.plugins.kernels import CHOICE, ISA
from tests.bundles import BundleOf, graphs_changed
from tests.conftest import Golden, load_golden
from tests.engines.ort.conftest import VARIANTS
from tests.engines.ort.logits import Floats, at, distance, prefilled, tokens_of


def opened(bundle: Bundle) -> OrtSession:
    return open_engine(bundle, batch=2, max_length=64)


def logits(session: OrtSession, golden: Golden) -> Floats:
    """Return those of the prompt as a whole and of its last tokens one by one."""
    tokens = tokens_of(golden)
    parts = [prefilled(session, tokens, chunk=100), prefilled(session, tokens[:, -3:], chunk=1)]
    return np.concatenate(parts, axis=1)


@pytest.mark.usefixtures("native")
def test_native_kernels_run_where_there_are_some_and_the_session_says_so(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for choice in ("native", ""):
        monkeypatch.setenv(CHOICE, choice)
        kernels = opened(bundle_of("tiny")).kernels
        assert kernels.library is not None
        assert kernels.library.exists()
        assert kernels.isa in kernels.supported


@pytest.mark.usefixtures("no_library")
def test_without_a_library_the_built_in_kernels_run_as_when_they_are_asked_for(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = load_golden("tiny")
    absent = opened(bundle_of("tiny"))
    assert absent.kernels.library is None
    assert "not compiled: install a C++ compiler" in absent.kernels.reason
    monkeypatch.setenv(CHOICE, "builtin")
    asked = opened(bundle_of("tiny"))
    assert asked.kernels.library is None
    assert asked.kernels.reason == "EXPORT_GROK_KERNELS is builtin"
    assert (logits(absent, golden) == logits(asked, golden)).all()


@pytest.mark.usefixtures("no_library")
def test_native_kernels_that_are_not_there_are_refused_in_one_line(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of("tiny")
    monkeypatch.setenv(CHOICE, "native")
    with pytest.raises(ConfigError, match=r"^EXPORT_GROK_KERNELS is native, but .*compiler") as e:
        open_session(bundle, batch=1, max_length=4)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (CHOICE, "EXPORT_GROK_KERNELS is 'fast'; it must be native, builtin or unset"),
        (ISA, "EXPORT_GROK_ISA is 'fast'; this CPU and library have "),
    ],
)
@pytest.mark.usefixtures("native")
def test_a_variable_of_another_value_is_refused_with_those_that_it_may_have(
    bundle_of: BundleOf, monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    bundle = bundle_of("tiny")
    monkeypatch.setenv(variable, "fast")
    with pytest.raises(ConfigError) as error:
        open_session(bundle, batch=1, max_length=4)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_session_needs_the_graphs_of_its_kernels_and_no_others(
    kernels: str, bundle_of: BundleOf, tmp_path: Path
) -> None:
    golden, whole = load_golden("tiny"), bundle_of("tiny")
    bundle = graphs_changed(whole, tmp_path / "own", lambda model: None)
    own = {graph_file(kind, variant=VARIANTS[kernels]) for kind in ("embedding", "head_all")}
    own |= {graph_file("layer", layer, variant=VARIANTS[kernels]) for layer in range(2)}
    for path in bundle.folder.iterdir():
        if path.name not in own:
            path.unlink()
    assert {path.name for path in bundle.folder.iterdir()} == own
    assert (logits(opened(bundle), golden) == logits(opened(whole), golden)).all()


def test_a_session_keeps_the_kernels_that_it_was_opened_with(
    kernels: str, bundle_of: BundleOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"native": "builtin", "builtin": "native"}[kernels]
    bundle = graphs_changed(bundle_of("tiny"), tmp_path / "own", lambda model: None)
    for kind in ("head", "head_all"):
        (bundle.folder / graph_file(kind, variant=VARIANTS[other])).unlink()
    session = opened(bundle)
    monkeypatch.setenv(CHOICE, other)
    session.forward(np.ones((2, 1), np.int64), at(2, 0), at(2, 0))  # now the head is loaded
    assert (session.kernels.library is not None) == (kernels == "native")


@pytest.mark.usefixtures("native")
def test_native_kernels_stand_for_the_ops_and_no_function_body_is_needed(
    golden: Golden, bundle_of: BundleOf, tmp_path: Path
) -> None:
    def without_functions(model: ir.Model) -> None:
        assert len(model.functions) == 4
        model.functions.clear()

    whole = bundle_of(golden.name)
    bundle = graphs_changed(whole, tmp_path / "bodiless", without_functions, variant="")
    assert (logits(opened(bundle), golden) == logits(opened(whole), golden)).all()
    assert distance(opened(bundle), golden) < 3e-4
