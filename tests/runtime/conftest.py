"""What the tests of the runtime share."""

from tests.bundles import bundle_of as bundle_of
from tests.bundles import traced_once as traced_once
