"""`config.pbtxt` is what Triton's schema takes, and declares what the code reads and sends."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.artifacts import Bundle
from export_grok.errors import ConfigError, OutputError
from export_grok.runtime.params import GenerationParams
from export_grok.runtime.triton_server.repository import (
    CONFIG,
    FILES,
    MODEL,
    config_text,
    write_model,
)
from export_grok.runtime.triton_server.settings import Settings, instance_kind
from export_grok.runtime.triton_server.tensors import INPUTS, OUTPUTS
from tests.bundles import BundleOf, bundle_of, hashes
from tests.runtime.triton_server.fake_triton import TYPES
from tests.runtime.triton_server.pbtxt import read

__all__ = ["bundle_of"]

PATHS = st.text(st.characters(codec="utf-8"), min_size=1)
NUMBERS = st.none() | st.integers(1, 2**31)
SETTINGS = st.builds(
    Settings,
    bundle=PATHS,
    weights_root=st.none() | PATHS,
    batch=NUMBERS,
    max_length=NUMBERS,
    threads=NUMBERS,
    tensor_parallel=NUMBERS,
    max_waiting=NUMBERS,
)
SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None
)


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    """Return the demo's bundle; it is shared."""
    return bundle_of("demo")


def with_engine(bundle: Bundle, backend: str, sizes: dict[str, int]) -> Bundle:
    manifest = dataclasses.replace(bundle.manifest, backend=backend, engine={"sizes": sizes})
    return dataclasses.replace(bundle, manifest=manifest)


def parameters(message: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return what Triton's JSON of a configuration has for its parameters."""
    return {
        entry["key"][0]: {"string_value": entry["value"][0]["string_value"][0]}
        for entry in message["parameters"]
    }


def test_the_configuration_says_all_that_the_python_backend_needs(demo: Bundle) -> None:
    config = read(config_text("grok", demo, Settings(bundle="/models/b")))
    assert (config["name"], config["backend"], config["max_batch_size"]) == (
        ["grok"],
        ["python"],
        [0],
    )
    assert config["model_transaction_policy"] == [{"decoupled": ["true"]}]
    assert config["instance_group"] == [{"count": [1], "kind": ["KIND_CPU"]}]
    assert parameters(config) == {"bundle": {"string_value": "/models/b"}}


def test_every_tensor_is_declared_as_the_code_uses_it(demo: Bundle) -> None:
    config = read(config_text("grok", demo, Settings(bundle="b")))
    for key, ports in (("input", INPUTS), ("output", OUTPUTS)):
        for port, declared in zip(ports, config[key], strict=True):
            assert declared["name"] == [port.name]
            assert declared["data_type"] == [port.data_type]
            assert declared["dims"] == ([-1] if port.many else [1])
            assert declared.get("optional") == (["true"] if key == "input" else None)
            assert port.data_type in TYPES
        assert len({port.name for port in ports}) == len(ports)


def test_every_parameter_of_a_request_has_an_input_but_the_biases() -> None:
    names = {field.name for field in dataclasses.fields(GenerationParams)}
    assert {port.parameter for port in INPUTS} - {None} == names - {"logit_bias"}


@pytest.mark.parametrize("name", ["grok", "Grok-1.v2"])
def test_triton_s_own_schema_takes_the_configuration(name: str, demo: Bundle) -> None:
    found = importlib.util.find_spec("tritonclient")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tritonclient is not installed: pip install tritonclient")
    text_format = pytest.importorskip("google.protobuf.text_format")
    # By its file: the package around it asks for grpcio.
    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    gpu = with_engine(demo, "trt", {"batch": 2, "max_length": 64})
    for bundle in (demo, gpu):
        text = config_text(name, bundle, Settings(bundle='/ä"\n\\b'))
        message = text_format.Parse(text, module.ModelConfig())
        assert message.name == name
        assert message.model_transaction_policy.decoupled
        assert [port.name for port in message.input] == [port.name for port in INPUTS]
        assert all(port.optional for port in message.input)
        types = {number: known for known, number in module.DataType.items()}
        assert [types[port.data_type] for port in message.output] == [
            port.data_type for port in OUTPUTS
        ]
        assert message.parameters["bundle"].string_value == '/ä"\n\\b'
        assert message.instance_group[0].count == 1


@SHARED
@given(made=SETTINGS)
def test_settings_come_back_from_the_configuration(made: Settings, demo: Bundle) -> None:
    config = read(config_text("grok", demo, made))
    assert Settings.of_parameters(parameters(config)) == made


def test_a_path_that_is_no_utf_8_comes_back(demo: Bundle) -> None:
    made = Settings(bundle="/m\udcff")
    assert Settings.of_parameters(parameters(read(config_text("grok", demo, made)))) == made


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({}, "no parameter bundle"),
        ({"bundle": ""}, "bundle is empty"),
        ({"bundle": "b", "max_lenght": "3"}, "has a parameter max_lenght"),
        ({"bundle": "b", "batch": "many"}, "batch is 'many'"),
        ({"bundle": "b", "batch": "0"}, "batch is 0"),
        ({"bundle": "b", "max_waiting": "-1"}, "max_waiting is -1; it must be 0 or more"),
    ],
)
def test_parameters_that_cannot_be_are_refused(given_: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of_parameters({name: {"string_value": text} for name, text in given_.items()})


def test_parameters_of_triton_s_own_are_left_alone() -> None:
    entries = {"bundle": {"string_value": "b"}, "EXECUTION_ENV_PATH": {"string_value": "e.tgz"}}
    assert Settings.of_parameters(entries) == Settings(bundle="b")


def test_relative_paths_start_from_the_model_s_folder() -> None:
    made = Settings(bundle="../../b", weights_root="/w", batch=3)
    assert made.load_options(Path("/models/grok")) == {
        "folder": Path("/models/grok/../../b"),
        "weights_root": Path("/w"),
        "batch": 3,
    }
    assert Settings(bundle="/b").load_options(Path("/m")) == {"folder": Path("/b")}


@pytest.mark.parametrize(
    ("backend", "ranks", "kind"),
    [
        ("ort", 1, "KIND_CPU"),
        ("ort", 2, "KIND_CPU"),
        ("trt", 1, "KIND_GPU"),
        ("trt-rtx", 1, "KIND_GPU"),
        ("trt", 8, "KIND_MODEL"),
    ],
)
def test_the_device_is_that_of_the_bundle(
    backend: str, ranks: int, kind: str, demo: Bundle
) -> None:
    bundle = with_engine(demo, backend, {"batch": 2, "max_length": 64, "tensor_parallel": ranks})
    assert instance_kind(bundle) == kind
    config = read(config_text("grok", bundle, Settings(bundle="b")))
    (group,) = config["instance_group"]
    assert group == {"count": [1], "kind": [kind]} | ({"gpus": [0]} if "GPU" in kind else {})


def test_sizes_that_plans_are_not_for_are_refused(demo: Bundle, tmp_path: Path) -> None:
    plans = with_engine(demo, "trt", {"batch": 4, "max_length": 64})
    for made, said in (
        (Settings(bundle="b", batch=2), "are for 4"),
        (Settings(bundle="b", max_length=65), "takes 2 to 64 tokens"),
        (Settings(bundle="b", tensor_parallel=2), "needs 1 rank"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_model(tmp_path / "models", "grok", plans, made)
    assert not (tmp_path / "models").exists()


def test_what_was_broken_off_is_no_model_and_is_finished(
    demo: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "export_grok.runtime.triton_server.repository.FILES"
    with monkeypatch.context() as patch:
        patch.setattr(place, (MODEL,))
        folder = write_model(tmp_path, "grok", demo, Settings(bundle="b"))
    assert not (folder / CONFIG).exists()
    (folder / f".{CONFIG}.partial").write_bytes(b"half")
    write_model(tmp_path, "grok", demo, Settings(bundle="b"))
    assert hashes(folder).keys() == set(FILES)


def test_what_else_is_in_the_model_s_folder_stays(demo: Bundle, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "grok", demo, Settings(bundle="b"))
    (folder / "environment.tar.gz").write_bytes(b"mine")
    write_model(tmp_path, "grok", demo, Settings(bundle="c"), overwrite=True)
    assert hashes(folder).keys() == {*FILES, "environment.tar.gz"}


@pytest.mark.parametrize("file", FILES)
def test_a_model_of_somebody_else_is_never_touched(
    file: str, demo: Bundle, tmp_path: Path
) -> None:
    theirs = tmp_path / "grok" / file
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b'name: "theirs"')
    before = hashes(tmp_path)
    with pytest.raises(OutputError, match="is not of this command"):
        write_model(tmp_path, "grok", demo, Settings(bundle="b"), overwrite=True)
    assert hashes(tmp_path) == before
