"""Of a session with more rows, the first ones are those of a session that has no others."""

import numpy as np
import pytest

from export_grok.engines.ort.session import open_engine
from export_grok.runtime.verify.few_rows import FewRows
from tests.bundles import BundleOf
from tests.engines.ort.logits import TOLERANCE


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_the_first_rows_are_as_they_would_be_alone(rows: int, bundle_of: BundleOf) -> None:
    bundle = bundle_of("tiny8")
    alone = open_engine(bundle, batch=2, max_length=8, threads=1)
    few = FewRows(open_engine(bundle, batch=rows, max_length=8, threads=1), 2)
    tokens = np.array([[5, 6, 7], [8, 9, 10]])
    start, last = np.array([0, 1]), np.array([2, 0])
    for session in (alone, few):
        session.forward(np.array([[4], [4]]), np.array([0, 0]), None)
    np.testing.assert_allclose(
        few.forward_all(tokens, start), alone.forward_all(tokens, start), atol=TOLERANCE
    )
    found, wanted = (session.forward(tokens, start, last) for session in (few, alone))
    assert found is not None
    assert wanted is not None
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert few.forward(tokens, start, None) is None
    assert (few.batch, few.max_length) == (2, 8)
