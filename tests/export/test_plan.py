"""What a run that was broken off has left is kept by the same run only, and never by another."""

from pathlib import Path

import pytest

from export_grok.config import ExportOptions
from export_grok.errors import BundleError
from export_grok.export import graph_folder
from export_grok.export.graph_folder import export_graphs
from tests.bundles import checkpoint_copy, hashes, traced_once
from tests.conftest import load_golden

__all__ = ["traced_once"]

pytestmark = pytest.mark.usefixtures("traced_once")

# Options, and the first function that writes what a later run keeps.
KEPT = [
    (ExportOptions(copy_weights=True), "_copy_weights"),
    (ExportOptions(head="int8"), "write_head"),
    (ExportOptions(copy_weights=True, head="int8"), "_copy_weights"),
]


class Killed(BaseException):
    """What no stage catches: the process is gone."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a copy of the tiny fixture's checkpoint, to be changed at will."""
    return checkpoint_copy("tiny", tmp_path / "checkpoint")


def killed_before(step: str, checkpoint: Path, out: Path, options: ExportOptions) -> None:
    """Export, and be gone when it comes to this function of `graph_folder`."""

    def gone(*_arguments: object, **_options: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(graph_folder, step, gone)
        export_graphs(checkpoint, out, options)


def change_weights(checkpoint: Path) -> None:
    """Change a byte of the table and one of the last layer: lengths and headers stay."""
    for name in ("embedding.weight", "layers.1.experts.up.weight"):
        weight = load_golden("tiny").index[name]
        data = bytearray((checkpoint / weight.file).read_bytes())
        data[weight.offset + 2] ^= 64
        (checkpoint / weight.file).write_bytes(data)


def weights_in(out: Path) -> dict[Path, int]:
    """Return when each file of weights was written."""
    files = [*out.glob("weights/*.safetensors"), *out.glob("head.weights")]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(("options", "first"), KEPT)
def test_what_a_run_of_other_weights_left_is_written_anew(
    options: ExportOptions, first: str, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed_before("_write_graphs", checkpoint, out, options)  # all weights are written
    change_weights(checkpoint)
    killed_before(first, checkpoint, out, options)
    export_graphs(checkpoint, out, options)
    export_graphs(checkpoint, tmp_path / "fresh", options)
    assert hashes(out) == hashes(tmp_path / "fresh")


@pytest.mark.parametrize("options", [options for options, _ in KEPT])
def test_what_the_same_run_left_is_kept(
    options: ExportOptions, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed_before("_write_graphs", checkpoint, out, options)
    before = weights_in(out)
    assert before
    export_graphs(checkpoint, out, options)
    assert weights_in(out) == before
    export_graphs(checkpoint, tmp_path / "fresh", options)
    assert hashes(out) == hashes(tmp_path / "fresh")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("copy_weights", [False, True])
def test_a_bundle_is_not_written_over_the_weights_it_is_made_of(
    checkpoint: Path, tmp_path: Path, finished: bool, copy_weights: bool
) -> None:
    out, copied = tmp_path / "out", ExportOptions(copy_weights=True)
    if finished:
        export_graphs(checkpoint, out, copied)
    else:
        killed_before("_write_graphs", checkpoint, out, copied)
    before = hashes(out / "weights")
    again = ExportOptions(copy_weights=copy_weights, overwrite=True)
    if finished or copy_weights:
        with pytest.raises(BundleError, match=r"has its copy of the weights.*another --out"):
            export_graphs(out / "weights", out, again)
    else:  # nothing that is there is in the way
        export_graphs(out / "weights", out, again)
    assert hashes(out / "weights") == before
