"""What the tests of the runtime share."""

from tests.bundles import bundle_of as bundle_of
from tests.bundles import traced_once as traced_once
from tests.runtime.tokenizers import published as published
from tests.runtime.tokenizers import small as small
from tests.runtime.tokenizers import small_file as small_file
from tests.runtime.tokenizers import tokenizer as tokenizer
