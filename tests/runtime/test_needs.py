"""What running an engine needs: of all ranks, what they share, and a reference beside it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from export_grok.artifacts import Bundle
from export_grok.config import GROK_1, GrokConfig
from export_grok.engines import backend
from export_grok.engines.demand import Demand
from export_grok.engines.trt.record import Sizes
from export_grok.errors import ConfigError
from export_grok.runtime.needs import session_needs
from export_grok.runtime.torch_needs import module_needs, torch_needs
from export_grok.runtime.verify.needs import verify_needs
from export_grok.runtime.verify.options import VerifyOptions
from export_grok.runtime.verify.work import Work
from tests.engines.trt.records import bundle_with, record_for

GB = 10**9
DEMAND = Demand(batch=2, max_length=64, prefill=8, decode=8, chunk=4)


def engine(config: GrokConfig, folder: Path, ranks: int = 1) -> Bundle:
    """Return what is known of an engine of ONNX Runtime that is on no disk."""
    found = bundle_with(record_for(config, Sizes()), "tiny", folder)
    own = {"tensor_parallel": ranks} if ranks > 1 else {}
    manifest = dataclasses.replace(found.manifest, config=config, backend="ort", engine=own)
    return dataclasses.replace(found, manifest=manifest)


def work(bundle: Bundle, **options: object) -> Work:
    """Return a verification of two rows, a prompt in one step and a token in another."""
    steps = [SimpleNamespace(tokens=np.zeros((2, width))) for width in (6, 1)]
    given = SimpleNamespace(
        bundle=bundle,
        options=VerifyOptions(**options),  # type: ignore[arg-type]
        threads=1,
        reference=SimpleNamespace(goldens=None, bundle=None),
        engine=SimpleNamespace(),
        rows=SimpleNamespace(rows=[(), ()]),
        decoded=1,
        run_steps=steps,
        graph_steps=[*steps, steps[0]],
        max_length=7,
    )
    return cast(Work, given)


def test_ranks_share_memory_of_the_tokens_that_they_ever_take_at_once(
    tiny_config: GrokConfig, tmp_path: Path
) -> None:
    bundle = engine(tiny_config, tmp_path, ranks=2)
    own = backend.session_needs(bundle, DEMAND).memory
    shared = session_needs(bundle, DEMAND, held=1000).memory - own - 1000
    rows, width, vocabulary = 2 * 4, tiny_config.emb_size, tiny_config.vocab_size
    assert shared == 8 * rows + 4 * rows * (3 * width + vocabulary)


def test_other_ranks_than_the_engine_s_are_refused(
    tiny_config: GrokConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="needs 1 rank, sees --tp 4"):
        session_needs(engine(tiny_config, tmp_path), DEMAND, tensor_parallel=4)


def test_the_reference_widens_one_matrix_at_a_time_whatever_the_number_of_layers() -> None:
    one = module_needs(dataclasses.replace(GROK_1, num_layers=1), [1])
    all_layers = module_needs(GROK_1, [1])
    assert all_layers.memory == one.memory
    assert 1.9 < one.memory / GB < 2.1  # measured: 2.03
    assert all_layers.seconds == pytest.approx(64 * one.seconds)
    cache = 64 * 2 * 8192 * 8 * 128 * 4
    session = torch_needs(GROK_1, Demand(batch=1, max_length=8192))
    assert session.memory >= one.memory + cache


def test_a_verification_of_a_full_size_layer_takes_about_what_was_measured(
    tmp_path: Path,
) -> None:
    layer = engine(dataclasses.replace(GROK_1, num_layers=1), tmp_path)
    needs = verify_needs(work(layer))
    assert 180 / 3 < needs.seconds < 3 * 180  # docs/scale.md
    assert verify_needs(work(layer, layers=(0,))).seconds < needs.seconds


def test_function_bodies_running_free_hold_all_layers(tmp_path: Path) -> None:
    model = engine(GROK_1, tmp_path)
    one = verify_needs(work(model, against="ort", layers=(0,)))
    free = verify_needs(work(model, against="ort"))
    assert free.memory > 50 * one.memory
    torch = verify_needs(work(model, layers=(0,)))
    assert torch.memory < one.memory
