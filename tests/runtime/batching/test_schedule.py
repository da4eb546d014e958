"""Chunks: bounded in all, shared in equal parts, and never beyond the cache."""

from hypothesis import given
from hypothesis import strategies as st

from export_grok.runtime.batching.answer import Answer
from export_grok.runtime.batching.schedule import chunk_of
from export_grok.runtime.request import Request

LENGTH = 64


def prompt(tokens: int, held: int = 0) -> Answer:
    answer = Answer(Request(prompt=(1,) * tokens), LENGTH)
    answer.held = held
    return answer


def width_of(*prompts: Answer, chunk: int = 16, budget: int = 16, together: int = 8) -> int:
    _, width = chunk_of(prompts, chunk=chunk, budget=budget, together=together, max_length=LENGTH)
    return width


def test_a_prompt_alone_takes_the_whole_chunk() -> None:
    assert width_of(prompt(40)) == 16


def test_prompts_share_a_chunk_in_equal_parts() -> None:
    assert width_of(prompt(40), prompt(40), prompt(40), prompt(40)) == 4


def test_no_more_is_taken_than_the_longest_lacks() -> None:
    assert width_of(prompt(2), prompt(5)) == 5
    assert width_of(prompt(40, held=37)) == 3


def test_every_row_gets_a_token_however_many_there_are() -> None:
    assert width_of(*(prompt(9) for _ in range(8)), budget=3) == 1


def test_padding_stays_within_the_cache() -> None:
    assert width_of(prompt(63, held=61), prompt(40)) == 3


def test_where_rows_go_one_by_one_the_first_goes_alone() -> None:
    first, second = prompt(40), prompt(9)
    chosen, width = chunk_of([first, second], chunk=16, budget=16, together=1, max_length=LENGTH)
    assert (chosen, width) == ([first], 16)


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, LENGTH - 1), st.integers(0, LENGTH)), min_size=1, max_size=9
    ),
    chunk=st.integers(1, 40),
    budget=st.integers(1, 80),
    together=st.integers(1, 9),
)
def test_a_chunk_is_within_all_its_bounds(
    sizes: list[tuple[int, int]], chunk: int, budget: int, together: int
) -> None:
    prompts = [prompt(tokens, held=min(held, tokens - 1)) for tokens, held in sizes]
    chosen, width = chunk_of(
        prompts, chunk=chunk, budget=budget, together=together, max_length=LENGTH
    )
    assert chosen == prompts[:together]
    assert 1 <= width <= chunk
    assert width * len(chosen) <= max(budget, len(chosen))
    assert all(answer.held + width <= LENGTH for answer in chosen)
