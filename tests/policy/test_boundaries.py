"""Properties of boundary selection and prefill chunk ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.boundaries import BoundaryRule, prefill_chunk_end, select_boundaries


def whole_prompt(block_size: int, prompt_len: int, *, stride: int | None = None, kv_match_end: int = 0) -> list[int]:
    rule = BoundaryRule(block_size, stride)
    return list(select_boundaries(rule, prompt_len=prompt_len, start=0, end=prompt_len, kv_match_end=kv_match_end))


def chunk_ends(prompt_len: int, budget: int, block_size: int, *, align: bool) -> list[int]:
    ends = [0]
    while ends[-1] < prompt_len:
        start = ends[-1]
        ends.append(
            prefill_chunk_end(start=start, prompt_len=prompt_len, budget=budget, block_size=block_size, align=align)
        )
    return ends[1:]


def test_prompt_one_token_past_a_block_reserves_that_block() -> None:
    assert whole_prompt(64, 65) == [64]


def test_prompt_shorter_than_a_block_reserves_nothing() -> None:
    assert whole_prompt(64, 63) == []


def test_resumed_prompt_reserves_only_its_last_boundary() -> None:
    rule = BoundaryRule(256)
    boundaries = select_boundaries(rule, prompt_len=832, start=512, end=832, kv_match_end=512)
    assert [(p - 512, (p - 1) // 256) for p in boundaries] == [(256, 2)]


def test_aligned_prompt_also_reserves_the_boundary_before_its_end() -> None:
    assert whole_prompt(64, 192) == [128, 192]


def test_aligned_prompt_of_one_block_does_not_reserve_position_zero() -> None:
    assert whole_prompt(64, 64) == [64]


def test_end_of_the_kv_match_is_reserved_when_computed_again() -> None:
    assert whole_prompt(64, 300, kv_match_end=128) == [128, 256]


def test_stride_of_one_reserves_every_boundary() -> None:
    assert whole_prompt(64, 300, stride=1) == [64, 128, 192, 256]


def test_stride_counts_from_the_request_start_not_the_chunk_start() -> None:
    boundaries = select_boundaries(BoundaryRule(64, 2), prompt_len=1000, start=192, end=530, kv_match_end=0)
    assert boundaries == (256, 384, 512)


def test_chunk_that_stops_on_a_boundary_reserves_it() -> None:
    assert select_boundaries(BoundaryRule(64), prompt_len=300, start=0, end=128, kv_match_end=0) == (128,)


def test_chunk_that_stops_off_a_boundary_reserves_nothing() -> None:
    assert select_boundaries(BoundaryRule(64), prompt_len=300, start=0, end=100, kv_match_end=0) == ()


def test_chunked_prompt_reserves_each_chunk_end_and_its_last_boundary() -> None:
    ends = chunk_ends(800, 300, 256, align=True)
    assert ends == [256, 512, 800]
    rule = BoundaryRule(256)
    chunks = zip([0, *ends], ends, strict=False)
    reserved = [select_boundaries(rule, prompt_len=800, start=s, end=e, kv_match_end=0) for s, e in chunks]
    assert reserved == [(256,), (512,), (768,)]


def test_unaligned_chunks_take_the_whole_budget() -> None:
    assert chunk_ends(800, 300, 256, align=False) == [300, 600, 800]


def test_chunk_without_a_boundary_in_its_budget_takes_the_whole_budget() -> None:
    assert chunk_ends(100, 30, 64, align=True) == [30, 60, 64, 94, 100]


def test_remainder_within_the_budget_is_not_cut() -> None:
    assert prefill_chunk_end(start=64, prompt_len=164, budget=100, block_size=64, align=True) == 164


@given(st.data())
def test_selection_equals_a_walk_over_every_token(data: st.DataObject) -> None:
    block = data.draw(st.integers(1, 9))
    stride = data.draw(st.none() | st.integers(1, 4))
    prompt_len = data.draw(st.integers(0, 60))
    start = data.draw(st.integers(0, prompt_len))
    end = data.draw(st.integers(start, prompt_len))
    match = data.draw(st.integers(0, prompt_len // block)) * block
    branches = data.draw(st.lists(st.integers(0, prompt_len // block).map(block.__mul__), max_size=2))

    def is_wanted(position: int) -> bool:
        tokens_left = prompt_len - position
        is_last = tokens_left < block
        is_before_aligned_end = prompt_len % block == 0 and tokens_left == block
        is_chunk_end = position == end < prompt_len
        is_strided = stride is not None and (position // block) % stride == 0
        is_derived = position == match or is_last or is_before_aligned_end or is_chunk_end
        return is_derived or is_strided or position in branches

    walked = [p for p in range(start + 1, end + 1) if p % block == 0 and is_wanted(p)]
    selected = select_boundaries(
        BoundaryRule(block, stride),
        prompt_len=prompt_len,
        start=start,
        end=end,
        kv_match_end=match,
        branches=branches,
    )
    assert list(selected) == walked


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 40), st.booleans())
def test_chunks_advance_within_the_budget_and_end_with_the_prompt(
    prompt_len: int, budget: int, block_size: int, align: bool
) -> None:
    ends = chunk_ends(prompt_len, budget, block_size, align=align)
    assert ends[-1] == prompt_len
    assert all(0 < end - start <= budget for start, end in zip([0, *ends], ends, strict=False))


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 40))
def test_aligned_chunk_ends_on_the_last_boundary_in_reach(prompt_len: int, budget: int, block_size: int) -> None:
    ends = chunk_ends(prompt_len, budget, block_size, align=True)
    for start, end in zip([0, *ends], ends, strict=False):
        reachable = [p for p in range(start + 1, start + budget + 1) if p % block_size == 0]
        assert end == prompt_len or end == (reachable[-1] if reachable else start + budget)


@pytest.mark.parametrize(("block_size", "stride"), [(0, None), (-1, None), (16, 0), (16, -2)])
def test_rule_refuses_sizes_below_one(block_size: int, stride: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BoundaryRule(block_size, stride)


@pytest.mark.parametrize(
    ("start", "end", "match"), [(5, 4, 0), (-1, 4, 0), (0, 11, 0), (0, 4, 3), (0, 4, 12), (0, 4, -4)]
)
def test_selection_refuses_impossible_positions(start: int, end: int, match: int) -> None:
    with pytest.raises(ValueError, match="got"):
        select_boundaries(BoundaryRule(4), prompt_len=10, start=start, end=end, kv_match_end=match)


@pytest.mark.parametrize(("start", "budget", "block_size"), [(10, 5, 4), (-1, 5, 4), (0, 0, 4), (0, 5, 0)])
def test_chunk_end_refuses_a_step_that_cannot_advance(start: int, budget: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="got"):
        prefill_chunk_end(start=start, prompt_len=10, budget=budget, block_size=block_size, align=True)
