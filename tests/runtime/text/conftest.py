"""What the tests of text share: a small tokenizer, and the published one where it is."""

from tests.runtime.text.tokenizers import published as published
from tests.runtime.text.tokenizers import small as small
from tests.runtime.text.tokenizers import small_file as small_file
from tests.runtime.text.tokenizers import tokenizer as tokenizer
