"""What the tests of the runtime share."""

from collections.abc import Iterator

import pytest

from export_grok.artifacts import Bundle
from tests.bundles import BundleOf
from tests.bundles import bundle_of as bundle_of
from tests.bundles import traced_once as traced_once
from tests.runtime.fake_model import StoppedSession


@pytest.fixture
def demo(bundle_of: BundleOf) -> Bundle:
    """Return the demo model's bundle."""
    return bundle_of("demo")


@pytest.fixture
def stopped(demo: Bundle) -> Iterator[StoppedSession]:
    """Yield a session of two rows that computes when it is let; at the end, all."""
    session = StoppedSession(demo.config, batch=2, max_length=64)
    yield session
    session.let_all()
