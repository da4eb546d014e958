"""What a user may choose is checked before any work, and all that is wrong is told."""

import pytest

from export_grok.errors import ConfigError
from export_grok.runtime.verify.options import VerifyOptions


def test_the_usual_choice_and_the_smallest_one_can_be() -> None:
    assert VerifyOptions().against == "torch"
    assert VerifyOptions(tokens=0, prompt=3, layers=(0,)).layers == (0,)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"tokens": -1}, r"tokens is -1; it must be 0 \(prompts only\) or more"),
        ({"prompt": 2}, "prompt is 2; rows of different length need 3 or more"),
        ({"layers": ()}, r"layers is \(\); name some, from 0 on"),
        ({"layers": (0, -1)}, r"layers is \(0, -1\); name some"),
    ],
)
def test_a_number_out_of_its_range_is_told(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        VerifyOptions(**wrong)  # type: ignore[arg-type]


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        VerifyOptions(tokens=-2, prompt=0, layers=(-5,))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "tokens",
        "prompt",
        "layers",
    ]


def test_two_choices_share_no_tolerances() -> None:
    assert VerifyOptions().tolerances is not VerifyOptions().tolerances
