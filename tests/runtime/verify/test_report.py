"""The page stands alone, is the same each time, says what failed, and trusts no name."""

import dataclasses
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from export_grok.errors import MissingDependencyError, OutputError
from export_grok.runtime.verify.finding import finding
from export_grok.runtime.verify.page import page_of
from export_grok.runtime.verify.report import write_report
from export_grok.runtime.verify.result import Place
from tests.runtime.verify.results import (
    broken,
    deviation,
    free_run,
    sound,
    with_deviation,
)

EVIL = "<script>alert('x')</script>\"&'"
VOID = {"meta", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Tags in order, the text a reader sees, and whether all elements are closed in turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


RESULTS = {
    "sound": sound(),
    "broken": broken(),
    "deep": broken(64, 37, "k_out"),
    "one layer, one step": sound(1, decoded=0),
    "no free run": sound(free_run=None),
    "no graphs": sound(graphs=()),
    "nothing": sound(graphs=(), free_run=None),
    "bfloat16": sound(dtype="bfloat16", free_run=free_run(floor=free_run())),
}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: page_of(result) for name, result in RESULTS.items()}


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_loads_nothing(name: str, pages: dict[str, str]) -> None:
    source = pages[name]
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", source)
    page = Page(pages[name])
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "base"}
    )
    for tag, attributes in page.tags:
        assert "src" not in attributes and not any(key.startswith("on") for key in attributes)
        link = attributes.get("href") or attributes.get("xlink:href") or "#"
        assert link.startswith("#") or (tag, link) == ("a", "verification.json")


@pytest.mark.parametrize("name", RESULTS)
def test_every_reference_in_the_page_has_its_one_target(name: str, pages: dict[str, str]) -> None:
    ids = re.findall(r'\bid="([^"]+)"', pages[name])
    assert len(ids) == len(set(ids))
    wanted = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', pages[name])
    assert {one or other for one, other in wanted} <= set(ids)


@pytest.mark.parametrize("name", RESULTS)
def test_the_verdict_comes_first_in_a_word(name: str, pages: dict[str, str]) -> None:
    word, other = ("PASSED", "FAILED") if RESULTS[name].passed else ("FAILED", "PASSED")
    text = Page(pages[name]).text
    title, heading = text.split(word)[:2]
    assert not title.strip() and heading.strip() == ": build/demo-engine"
    assert other not in text


def test_the_page_says_what_is_found(pages: dict[str, str]) -> None:
    for name in ("broken", "deep"):
        text = Page(pages[name]).text
        for line in finding(RESULTS[name]):
            assert line in text
    assert "What is wrong" not in Page(pages["sound"]).text


def test_every_tensor_that_failed_is_marked() -> None:
    result = sound(30)
    wrong = [(layer, tensor) for layer in range(3, 27) for tensor in ("heads", "moe")]
    for layer, tensor in wrong:
        result = with_deviation(result, layer + 1, deviation(tensor, "decode 3", 2e4 + layer))
    source = page_of(result)
    table = source[source.index("Every graph") :]
    head = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    marked = []
    for row in re.findall(r"<tr>(<td.*?)</tr>", table):
        cells = re.findall(r"<td([^>]*)>([^<]*)</td>", row)
        marked += [
            (cells[0][1], tensor)
            for tensor, (kind, _) in zip(head, cells, strict=True)
            if "bad" in kind
        ]
    assert marked == [(f"layer {layer}", tensor) for layer, tensor in wrong]


def test_names_are_escaped() -> None:
    result = sound(
        bundle=EVIL, engine=EVIL, reference=EVIL, text=EVIL, notes=(EVIL,), dtype="float32"
    )
    failing = free_run(failures=(EVIL,))
    source = page_of(dataclasses.replace(result, free_run=failing))
    assert "<script" not in source and "alert('x')" not in source
    assert Page(source).text.count(EVIL) == 7  # the title among them


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [write_report(broken(), tmp_path / name) for name in ("one", "two")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    folders = [sorted(file.name for file in path.parent.iterdir()) for path in paths]
    assert folders == [["index.html", "verification.json"]] * 2
    again = write_report(broken(), tmp_path / "one")
    assert again.read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_shown_and_is_null_in_json(
    value: float, tmp_path: Path
) -> None:
    place = Place(row=0, position=5, index=(3,), value=value, wanted=0.4)
    wrong = deviation("heads", "decode 1", 1.0, error=abs(value), largest=abs(value), place=place)
    result = with_deviation(sound(), 2, wrong)
    bad_run = free_run(error={"prefill 1": abs(value)}, perplexity=value, failures=("perplexity",))
    result = dataclasses.replace(result, free_run=bad_run)
    path = write_report(result, tmp_path)
    assert f"engine {value}, reference 0.4" in Page(path.read_text()).text

    def refused(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    saved = json.loads((tmp_path / "verification.json").read_text(), parse_constant=refused)
    assert saved["passed"] is False and saved["free_run"]["perplexity"] is None
    places = [found["place"] for found in saved["graphs"][2]["deviations"]]
    assert {"row": 0, "position": 5, "index": [3], "value": None, "wanted": 0.4} in places


def test_json_holds_the_whole_result(tmp_path: Path) -> None:
    result = broken()
    write_report(result, tmp_path)
    assert json.loads((tmp_path / "verification.json").read_text()) == result.to_dict()


def test_the_pictures_have_all_tensors_layers_and_steps_as_text(pages: dict[str, str]) -> None:
    pictures = re.findall(r"<svg.*?</svg>", pages["broken"], flags=re.DOTALL)
    words = [set(re.findall(r"<text[^>]*>([^<]*)</text>", picture)) for picture in pictures]
    tensors = {"h", "k_out", "v_out", "heads", "attention", "gates", "moe", "h_out", "logits"}
    layers, steps, free = words
    assert tensors | {"embedding", "0", "1", "2", "head", "tolerance"} <= layers
    assert tensors | {"prefill 1", "decode 8", "tolerance"} <= steps
    assert {"engine", "prefill 1", "decode 8", "tolerance"} <= free


def test_there_are_pictures_of_what_was_compared() -> None:
    result = sound(1)
    graphs = tuple(
        dataclasses.replace(graph, deviations=graph.deviations[:1]) for graph in result.graphs
    )
    one_step = dataclasses.replace(result, graphs=graphs)
    for shown, count in (
        (result, 3),
        (one_step, 2),
        (dataclasses.replace(one_step, free_run=None), 1),
        (dataclasses.replace(result, graphs=()), 1),
    ):
        assert page_of(shown).count("<svg") == count


def test_without_matplotlib_nothing_is_written_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"export-grok\[verify\]"):
        write_report(sound(), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        write_report(sound(graphs=(), free_run=None), tmp_path / "file" / "report")
