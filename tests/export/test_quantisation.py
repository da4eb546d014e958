"""What int8 has done to a matrix, against plain arithmetic on the whole of it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from export_grok.cli import main
from export_grok.errors import CheckpointError
from export_grok.export import quantisation
from export_grok.export.quantisation import QuantisedTensor, quantisation_of
from export_grok.weights import WeightReader
from tests.conftest import Golden

Floats = dict[str, NDArray[np.float32]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every matrix read in many parts, as the large ones are."""
    monkeypatch.setattr(quantisation, "BLOCK", 1000)


def dequantised(golden: Golden) -> Floats:
    reader = WeightReader(golden.index.root)
    floats = {}
    for weight in golden.index:
        if weight.dtype == "int8":
            codes = reader.read(weight).astype(np.float32)
            scales = reader.read(golden.index[weight.name.replace(".weight", ".scales")])
            rows = weight.shape[-2] // scales.shape[-2]
            floats[weight.name] = codes * np.repeat(scales.astype(np.float32), rows, axis=-2)
    return floats


def by_name(tensors: list[QuantisedTensor]) -> dict[str, QuantisedTensor]:
    return {f"{tensor.name}.weight": tensor for tensor in tensors}


def test_scales_and_saturation_are_those_of_the_files(golden: Golden) -> None:
    reader = WeightReader(golden.index.root)
    found = by_name(quantisation_of(golden.folder))
    assert found.keys() == {weight.name for weight in golden.index if weight.dtype == "int8"}
    for name, tensor in found.items():
        codes = reader.read(golden.index[name])
        scales = reader.read(golden.index[name.replace(".weight", ".scales")]).astype(float)
        assert (tensor.scale_min, tensor.scale_max) == (scales.min(), scales.max())
        assert tensor.saturated == np.isin(codes, [-128, -127, 127]).mean()
        assert tensor.relative_error is None
        assert tensor.noise_db is None


def test_the_float_it_stands_for_is_without_error(golden: Golden, tmp_path: Path) -> None:
    save_file(dequantised(golden), tmp_path / "float.safetensors")
    for tensor in quantisation_of(golden.folder, tmp_path / "float.safetensors"):
        assert tensor.max_error == 0
        assert tensor.noise_db == math.inf
        assert tensor.to_dict()["noise_db"] is None


def test_error_is_that_of_the_whole_matrix_and_worst_comes_first(
    golden: Golden, tmp_path: Path
) -> None:
    exact = dequantised(golden)
    random = np.random.default_rng(0)
    noisy = {
        name: (array + random.normal(0, 0.02 * array.std() * (place + 1), array.shape)).astype(
            "f4"
        )
        for place, (name, array) in enumerate(exact.items())
    }
    save_file(noisy, tmp_path / "float.safetensors")
    tensors = quantisation_of(golden.folder, tmp_path)
    for name, tensor in by_name(tensors).items():
        error = noisy[name].astype(float) - exact[name]
        relative = np.linalg.norm(error) / np.linalg.norm(noisy[name].astype(float))
        assert tensor.relative_error == pytest.approx(relative, rel=1e-4)
        assert tensor.max_error == pytest.approx(np.abs(error).max(), rel=1e-4)
        assert tensor.noise_db == pytest.approx(-20 * math.log10(relative), rel=1e-4)
    errors = [tensor.relative_error or 0 for tensor in tensors]
    assert errors == sorted(errors, reverse=True)


def test_a_scale_of_the_wrong_group_is_seen(golden: Golden, tmp_path: Path) -> None:
    if golden.config.row_parallel_scale_groups == 1:
        pytest.skip("one group: there is no other scale to take")
    exact = dequantised(golden)
    save_file(exact, tmp_path / "float.safetensors")
    name = "layers.1.attention.out.weight"
    rows = exact[name].shape[0] // golden.config.row_parallel_scale_groups
    shifted = exact | {name: np.roll(exact[name], rows, axis=0)}
    save_file(shifted, tmp_path / "float.safetensors")
    worst, *rest = quantisation_of(golden.folder, tmp_path)
    assert f"{worst.name}.weight" == name
    assert all(tensor.relative_error == 0 for tensor in rest)


def test_a_reference_of_another_model_is_refused_with_all_faults(
    golden: Golden, tmp_path: Path
) -> None:
    floats = dequantised(golden)
    first, second, *_ = floats
    del floats[first]
    floats[second] = floats[second][..., :-1].copy()
    save_file(floats, tmp_path / "float.safetensors")
    with pytest.raises(CheckpointError) as caught:
        quantisation_of(golden.folder, tmp_path)
    assert f"{first} is missing" in str(caught.value)
    assert f"{second} is float32" in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors"):
        quantisation_of(golden.folder, tmp_path / "empty")


def test_the_command_prints_draws_and_refuses(
    golden: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(dequantised(golden), tmp_path / "float.safetensors")
    command = ["quantise-report", str(golden.folder), "--reference", str(tmp_path)]

    def run(*more: str) -> int:
        with pytest.raises(SystemExit) as left:
            main([*command, *more])
        return int(left.value.code or 0)

    assert run("--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 7 * golden.config.num_layers
    assert {"name", "scale_min", "saturated", "relative_error", "noise_db"} <= rows[0].keys()
    assert run() == 0
    assert "layers.0.experts.down" in capsys.readouterr().out
    assert run("--plot", str(tmp_path / "picture.doc")) == 2
    assert "end it in .png" in capsys.readouterr().err
    pytest.importorskip("matplotlib", reason="extra plot is not installed")
    assert run("--plot", str(tmp_path / "picture.png")) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
