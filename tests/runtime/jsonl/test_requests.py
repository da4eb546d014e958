"""A line is a request, or all that is wrong with it is told with its number."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export_grok.errors import RequestError
from export_grok.runtime.jsonl.keys import Keys
from export_grok.runtime.jsonl.requests import LineRequest, Requests
from export_grok.runtime.jsonl.source import open_source
from export_grok.runtime.model_to_load import ModelToLoad, Reach
from export_grok.runtime.params import GenerationParams
from tests.runtime.jsonl.conftest import Write

DEFAULTS = GenerationParams(temperature=0.5, seed=7, max_new_tokens=9)


def read(
    path: Path, model: ModelToLoad, defaults: GenerationParams = DEFAULTS
) -> tuple[list[LineRequest], Reach]:
    """Return the requests of a file once it was checked, and how far they go."""
    with open_source(path, path.parent) as source:
        keys, requests = Keys(b""), Requests(source, model, defaults)
        reach = requests.check(keys)
        found = list(requests.without(keys, lambda number: False))
    assert keys.requests == len(found)
    return found, reach


def refusal(path: Path, model: ModelToLoad) -> list[str]:
    """Return the lines of what is told of a file that is wrong."""
    with pytest.raises(RequestError) as error:
        read(path, model)
    return str(error.value).splitlines()


def test_a_line_has_its_own_parameters_and_the_defaults_for_the_others(
    model: ModelToLoad, write: Write
) -> None:
    path = write(
        [
            {"prompt": "The lamp"},
            {"tokens": [5, 6], "id": 3, "seed": 1, "stop": "x", "logit_bias": {"4": -1.5}},
            {"prompt": "a", "id": "b", "temperature": 0, "max_new_tokens": None, "stop": ["y"]},
        ]
    )
    (first, second, third), reach = read(path, model)
    assert first.tokens == tuple(model.tokenizer.encode("The lamp"))
    assert (first.id, first.params) == (None, DEFAULTS)
    assert second.tokens == (5, 6)
    assert second.id == 3
    assert second.params == GenerationParams(
        temperature=0.5, seed=1, max_new_tokens=9, stop=("x",), logit_bias={4: -1.5}
    )
    assert third.id == "b"
    assert third.params == GenerationParams(seed=9, stop=("y",))
    assert second.reach == Reach(prompt=2, whole=11)
    assert reach.whole == third.reach.whole == 64  # to the end of the cache
    assert reach.prompt == len(first.tokens)


def test_each_line_has_the_next_seed_and_lines_without_a_request_count(
    model: ModelToLoad, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \t\n{"prompt": "b"}')
    requests, _ = read(path, model)
    assert [(each.number, each.params.seed) for each in requests] == [(1, 7), (4, 10)]


def test_a_file_without_a_request_is_no_fault(model: ModelToLoad, write: Write) -> None:
    assert read(write([]), model)[0] == []


WRONG: Sequence[tuple[bytes, str]] = [
    (b'{"promt": "a"}', "unknown field 'promt', did you mean 'prompt'? ... neither prompt nor"),
    (b'{"prompt": "a", "max_tokens": 3}', "'max_tokens', did you mean 'max_new_tokens'?"),
    (b'{"prompt": "a", "zzz": 3}', "unknown field 'zzz', there are id, prompt, tokens, temp"),
    (b'{"prompt": "a", "tokens": [1]}', "both prompt and tokens; give one"),
    (b'{"prompt": 1}', "prompt is 1; it must be a text"),
    (b'{"prompt": ""}', "the prompt has no tokens"),
    (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
    (b'{"prompt": "a", "temperature": -1, "top_p": 2}', "temperature is -1 ... top_p is 2"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    (b'{"prompt": "a", "ignore_eos": 1}', "ignore_eos is 1; it must be True or False"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias has 'x': 1"),
    (b'{"prompt": "a", "logit_bias": {"5000": 1}}', "logit_bias has 5000; ... 0 to 1023"),
    (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias is [1]"),
    (b'{"prompt": "a", "id": [1]}', "id is [1]; it must be a text or a whole number"),
    (b'{"prompt": "a", "id": "\\udfff"}', "id has half of a surrogate pair"),
    (b'{"tokens": []}', "the prompt has no tokens"),
    (b'{"tokens": [1, true]}', "tokens must be a list of token ids"),
    (b'{"tokens": "12"}', "tokens must be a list of token ids"),
    (b'{"tokens": [1024]}', "has token id 1024; this model knows 0 to 1023"),
    (b'{"tokens": [-1]}', "has token id -1; this model knows 0 to 1023"),
    (json.dumps({"tokens": [5] * 64}).encode(), "has 64 tokens; a cache of 64 takes 63"),
    (b"[]", "it is a list; it must be an object"),
    (b'"a"', "it is a str; it must be an object"),
    (b'{"prompt": "a"', "it is no JSON"),
    (b'{"prompt": "a", "prompt": "b"}', "'prompt' stands there twice"),
    (b'{"prompt": "\xff"}', "it is no UTF-8 at byte 12"),
    (b"[" * 100_000, "it is no JSON"),
    (b'{"seed": ' + b"9" * 5000 + b', "prompt": "a"}', "it is no JSON"),
]


def test_all_that_is_wrong_is_told_at_once_each_with_its_line(
    model: ModelToLoad, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + b"\n".join(line for line, _ in WRONG))
    summary, *lines = refusal(path, model)
    assert summary == f"{len(WRONG)} lines are wrong in {path}; nothing was run:"
    assert len(lines) == len(WRONG)
    for number, (line, (_, said)) in enumerate(zip(lines, WRONG, strict=True), start=2):
        assert line.startswith(f"  line {number}: ")
        assert all(part in line for part in said.split(" ... ")), line
        assert len(line) < 600


def test_a_line_of_very_much_that_is_wrong_is_told_in_few_words(
    model: ModelToLoad, tmp_path: Path
) -> None:
    path, many = tmp_path / "in.jsonl", {str(number): 1 for number in range(50_000)}
    late = json.dumps(many).replace('"49998"', '"49999"')
    lines = (json.dumps({"prompt": "a", "seed": [1] * 50_000}), json.dumps(many), late)
    path.write_text("\n".join(lines))
    _, long, unknown, twice = refusal(path, model)
    assert long.startswith("  line 1: seed is [1, 1,")
    assert long.endswith("1]; it must be a whole number from 0 to 2**64 - 1")
    assert "unknown field '9'" in unknown
    assert "; 49990 more unknown fields; it has neither" in unknown
    assert twice == "  line 3: it is no JSON: '49999' stands there twice"
    assert max(map(len, (long, unknown))) < 2000


def test_of_very_many_wrong_lines_the_first_are_told_and_the_number_of_the_others(
    model: ModelToLoad, write: Write
) -> None:
    lines = refusal(write([{}] * 150), model)
    assert lines[0].startswith("150 lines are wrong in ")
    assert (len(lines), lines[-1]) == (102, "  and 50 more")


def test_the_last_seed_there_is_is_not_passed(model: ModelToLoad, write: Write) -> None:
    path = write([{"prompt": "a"}] * 3)
    with pytest.raises(RequestError, match=rf"\n  line 3: seed is {2**64}"):
        read(path, model, GenerationParams(seed=2**64 - 2))


def test_a_file_that_changes_between_check_and_run_is_noticed(
    model: ModelToLoad, write: Write
) -> None:
    path = write([{"prompt": "a"}, {"prompt": "b"}])
    with open_source(path, path.parent) as source:
        keys, requests = Keys(b""), Requests(source, model, DEFAULTS)
        requests.check(keys)
        path.write_bytes(path.read_bytes().replace(b'"b"', b'"c"'))
        with pytest.raises(RequestError, match="changed at line 2 since it was checked"):
            list(requests.without(keys, lambda number: False))
        path.write_bytes(path.read_bytes().replace(b'"c"', b'"b"') + b'{"prompt": "d"}\n')
        with pytest.raises(RequestError, match="changed at line 3 since it was checked"):
            list(requests.without(keys, lambda number: False))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(
    ["id", "prompt", "tokens", "seed", "stop", "logit_bias", "logprobs", "top_k", "x"]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(line=st.dictionaries(names, values, max_size=4).map(json.dumps) | st.text(max_size=20))
def test_whatever_a_line_is_it_is_a_request_or_refused(
    line: str, model: ModelToLoad, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line.encode(errors="surrogatepass"))
    try:
        requests, _ = read(path, model)
    except RequestError as error:
        assert re.match(r".* wrong in .*; nothing was run:\n  line \d", str(error))
        return
    for request in requests:
        given = json.loads(line)
        assert request.tokens
        assert request.params.seed == given.get("seed", DEFAULTS.seed)
        assert request.id == given.get("id")
