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


def test_prompt_one_token_longer_than_a_block_caches_the_state_after_that_block() -> None:
    assert whole_prompt(64, 65) == [64]


def test_prompt_shorter_than_a_block_caches_no_state() -> None:
    assert whole_prompt(64, 63) == []


def test_resumed_prompt_caches_only_the_state_after_its_last_block() -> None:
    rule = BoundaryRule(256)
    boundaries = select_boundaries(rule, prompt_len=832, start=512, end=832, kv_match_end=512)
    assert [(p - 512, (p - 1) // 256) for p in boundaries] == [(256, 2)]


def test_prompt_of_whole_blocks_also_caches_the_state_one_block_earlier() -> None:
    assert whole_prompt(64, 192) == [128, 192]


def test_prompt_of_exactly_one_block_caches_no_state_at_position_zero() -> None:
    assert whole_prompt(64, 64) == [64]


def test_state_is_cached_at_the_end_of_matched_kv_blocks() -> None:
    assert whole_prompt(64, 300, kv_match_end=128) == [128, 256]


def test_stride_of_1_caches_a_state_after_every_block() -> None:
    assert whole_prompt(64, 300, stride=1) == [64, 128, 192, 256]


def test_state_stride_counts_from_the_prompt_start_not_the_chunk_start() -> None:
    boundaries = select_boundaries(BoundaryRule(64, 2), prompt_len=1000, start=192, end=530, kv_match_end=0)
    assert boundaries == (256, 384, 512)


def test_chunk_that_ends_at_a_block_end_caches_its_state() -> None:
    assert select_boundaries(BoundaryRule(64), prompt_len=300, start=0, end=128, kv_match_end=0) == (128,)


def test_chunk_that_ends_within_a_block_caches_no_state() -> None:
    assert select_boundaries(BoundaryRule(64), prompt_len=300, start=0, end=100, kv_match_end=0) == ()


def test_chunked_prompt_caches_states_at_chunk_ends_and_its_last_block() -> None:
    ends = chunk_ends(800, 300, 256, align=True)
    assert ends == [256, 512, 800]
    rule = BoundaryRule(256)
    chunks = zip([0, *ends], ends, strict=False)
    reserved = [select_boundaries(rule, prompt_len=800, start=s, end=e, kv_match_end=0) for s, e in chunks]
    assert reserved == [(256,), (512,), (768,)]


def test_unaligned_chunks_use_the_whole_token_budget() -> None:
    assert chunk_ends(800, 300, 256, align=False) == [300, 600, 800]


def test_chunk_smaller_than_a_block_uses_the_whole_token_budget() -> None:
    assert chunk_ends(100, 30, 64, align=True) == [30, 60, 64, 94, 100]


def test_rest_of_a_prompt_within_the_budget_is_one_chunk() -> None:
    assert prefill_chunk_end(start=64, prompt_len=164, budget=100, block_size=64, align=True) == 164


@given(st.data())
def test_selected_boundaries_match_a_token_by_token_reference(data: st.DataObject) -> None:
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
def test_chunks_stay_within_the_budget_and_end_with_the_prompt(
    prompt_len: int, budget: int, block_size: int, align: bool
) -> None:
    ends = chunk_ends(prompt_len, budget, block_size, align=align)
    assert ends[-1] == prompt_len
    assert all(0 < end - start <= budget for start, end in zip([0, *ends], ends, strict=False))


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 40))
def test_aligned_chunk_ends_at_the_last_block_end_within_budget(prompt_len: int, budget: int, block_size: int) -> None:
    ends = chunk_ends(prompt_len, budget, block_size, align=True)
    for start, end in zip([0, *ends], ends, strict=False):
        reachable = [p for p in range(start + 1, start + budget + 1) if p % block_size == 0]
        assert end == prompt_len or end == (reachable[-1] if reachable else start + budget)


@pytest.mark.parametrize(("block_size", "stride"), [(0, None), (-1, None), (16, 0), (16, -2)])
def test_block_size_or_stride_below_1_is_refused(block_size: int, stride: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BoundaryRule(block_size, stride)


@pytest.mark.parametrize(
    ("start", "end", "match"), [(5, 4, 0), (-1, 4, 0), (0, 11, 0), (0, 4, 3), (0, 4, 12), (0, 4, -4)]
)
def test_chunk_or_match_positions_outside_the_prompt_are_refused(start: int, end: int, match: int) -> None:
    with pytest.raises(ValueError, match="found"):
        select_boundaries(BoundaryRule(4), prompt_len=10, start=start, end=end, kv_match_end=match)


@pytest.mark.parametrize(("start", "budget", "block_size"), [(10, 5, 4), (-1, 5, 4), (0, 0, 4), (0, 5, 0)])
def test_chunk_end_is_refused_for_an_invalid_start_budget_or_block_size(
    start: int, budget: int, block_size: int
) -> None:
    with pytest.raises(ValueError, match="found"):
        prefill_chunk_end(start=start, prompt_len=10, budget=budget, block_size=block_size, align=True)
