"""A torch file is read and not run: where its tensors lie, or one error that says why not."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from export_grok.errors import CheckpointError, UnsafePickleError
from export_grok.export.layouts.source_tensor import RowReader, SourceTensor
from export_grok.export.layouts.torch_file import torch_tensors


def saved(folder: Path, table: Any, **how: Any) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(table, path, **how)
    return path


def read(path: Path, tensor: SourceTensor) -> Tensor:
    """Return the tensor as torch has it."""
    rows = RowReader(path.parent).rows(tensor, 0, tensor.shape[0])
    bits = {1: np.uint8, 2: np.int16, 4: np.int32}[rows.dtype.itemsize]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return torch.from_numpy(np.array(rows.view(bits))).view(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())


def test_tensors_lie_where_it_says_whatever_their_strides(tmp_path: Path) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    table = OrderedDict(
        plain=base,
        transposed=base.T,
        view=base[3:17, 4:25],
        every_other=base[::2, ::3],
        row=base[5],
        column=base[:, 5],
        same_in_all=torch.tensor([1.5]).expand(4, 6),
        parameter=torch.nn.Parameter(torch.randn(3, 4)),
        half=base.half()[1:],
        bfloat=base.bfloat16().T,
        e4m3=base.to(torch.float8_e4m3fn),
        e5m2=base.to(torch.float8_e5m2).T,
        int8=torch.arange(12, dtype=torch.int8).reshape(3, 4),
    )
    path = saved(tmp_path, table)
    found = torch_tensors(path)
    assert list(found) == list(table)
    for name, tensor in table.items():
        assert found[name].weight.file == path.name
        assert same(read(path, found[name]), tensor.detach()), name


def test_no_tensor_is_read_to_find_them(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1000, 1000)})
    before = torch_tensors(path)
    weight = before["w"].weight
    with path.open("r+b") as file:
        file.seek(weight.offset)
        file.write(b"\x01" * weight.nbytes)  # whoever read it would find a wrong checksum
    assert torch_tensors(path) == before


class Runs:
    """Something that a pickle can be made to do."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = function, arguments

    def __reduce__(self) -> Any:
        return self._made


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("place", ["table", "value", "key", "attribute"])
def test_a_file_that_would_run_something_is_refused_and_nothing_runs(
    place: str, protocol: int, tmp_path: Path
) -> None:
    trace = tmp_path / "ran"
    runs = Runs(os.system, f"touch {trace}")
    table: Any = OrderedDict(w=torch.zeros(2))
    if place == "table":
        table = runs
    elif place == "value":
        table["x"] = runs
    elif place == "key":
        table = {runs: 1}
    else:
        table._metadata = runs
    path = saved(tmp_path, table, pickle_protocol=protocol)
    with pytest.raises(UnsafePickleError, match=r"pytorch_model\.bin asks for .*nothing was run"):
        torch_tensors(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "runs", [Runs(bytearray, 1 << 40), Runs(torch.Tensor, 1 << 34), Runs(torch.Size, (1,))]
)
def test_what_torch_would_let_through_but_no_weights_need_is_refused(
    runs: Runs, tmp_path: Path
) -> None:
    with pytest.raises(UnsafePickleError, match="asks for"):
        torch_tensors(saved(tmp_path, {"w": runs}))


def test_the_format_before_torch_1_6_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no zip file.*torch\.save\(torch\.load"):
        torch_tensors(path)


def test_a_plain_pickle_is_not_loaded_either(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {trace}")))
    with pytest.raises(CheckpointError, match="no zip file"):
        torch_tensors(path)
    assert not trace.exists()


@pytest.mark.parametrize("kept", [0, 3, 4, 100, 0.5, 0.99])
def test_a_cut_file_is_refused(kept: float, tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(64, 64)})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 1 or not kept else kept * len(content))])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        torch_tensors(path)


def rezipped(path: Path, edit: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """Write the zip again, its members edited by name."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(64, 64)})
    rezipped(path, lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        torch_tensors(path)


@pytest.mark.parametrize(
    ("member", "content", "said"),
    [
        ("data/0", b"\0" * 8, "does not hold the bytes of w"),
        ("data/0", None, "damaged table"),
        ("data.pkl", b"\x80\x02}q", "damaged table"),
        ("data.pkl", b"\x80\x02]q\x00.", "holds a list, not tensors by name"),
        ("data.pkl", b"\x80\x02}q\x00X\x01\x00\x00\x00wK\x01s.", "holds a int as 'w'"),
        ("data.pkl", None, "is no file of weights by torch.save"),
        ("byteorder", b"big", "is not little endian"),
        ("constants.pkl", b"", "is no file of weights by torch.save"),
    ],
)
def test_members_that_are_wrong_are_refused(
    member: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {"w": torch.ones(16)})

    def edit(members: dict[str, bytes]) -> None:
        name = f"pytorch_model/{member}"
        if content is None:
            del members[name]
        else:
            members[name] = content
        members.pop("pytorch_model/.format_version", None)

    rezipped(path, edit)
    with pytest.raises(CheckpointError, match=said):
        torch_tensors(path)


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="w has dtype float64; known are int8, bfloat16"):
        torch_tensors(saved(tmp_path, {"w": torch.ones(2, dtype=torch.float64)}))


def test_a_checkpoint_within_a_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": {"w": torch.ones(2)}, "step": 3})
    with pytest.raises(CheckpointError, match=r"holds a dict as .model.*save the state_dict"):
        torch_tensors(path)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 400),
)
def test_a_changed_file_is_refused_or_names_bytes_within_it(
    changes: list[tuple[int, int]], cut: int, tmp_path: Path
) -> None:
    table = OrderedDict(a=torch.ones(6, 4), b=torch.ones(4, 3).T, c=torch.ones(2).half())
    content = bytearray(saved(tmp_path, table).read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    path = tmp_path / "changed.bin"
    path.write_bytes(content[: len(content) - cut] if cut % 3 == 0 else content)
    try:
        found = torch_tensors(path)
    except CheckpointError:
        return
    for tensor in found.values():
        RowReader(tmp_path).rows(tensor, 0, tensor.shape[0] if tensor.shape else 1)
