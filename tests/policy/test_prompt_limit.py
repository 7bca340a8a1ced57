"""How many prompt tokens a step computes beside rows that decode."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.prompt_limit import PromptLimit

SHARES = st.floats(0, 0.1)


@given(st.data())
def test_a_chunk_costs_no_more_than_is_left_and_fills_a_captured_step_where_that_computes_half(
    data: st.DataObject,
) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(1, 400), max_size=6)))
    limit = PromptLimit(512, data.draw(SHARES), lambda num_decoding: [size - num_decoding for size in sizes])
    start, remaining = data.draw(st.integers(0, 10_000)), data.draw(st.integers(1, 1000))
    left, num_before = data.draw(st.integers(1, 512)), data.draw(st.integers(0, 100))
    num_tokens = limit.chunk(start, remaining, left, num_decoding=1, num_before=num_before)
    assert 1 <= num_tokens <= remaining
    assert num_tokens == 1 or limit.cost(start, num_tokens) <= left + 1e-6
    without = PromptLimit(512, limit.attention_share)
    most = without.chunk(start, remaining, left, num_decoding=1, num_before=num_before)
    filling = [size - 1 - num_before for size in sizes if size - 1 - num_before <= most]
    if most == remaining or 2 * max(filling, default=0) < most:
        assert num_tokens == most
    else:
        assert num_tokens == max(filling)


@given(SHARES, st.integers(0, 10_000), st.integers(0, 10_000))
def test_tokens_cost_more_the_longer_their_history(share: float, start: int, further: int) -> None:
    limit = PromptLimit(512, share)
    assert limit.cost(0, 7) == 7 <= limit.cost(start, 7) <= limit.cost(start + further, 7)
    near, far = (limit.chunk(at, 1000, 512, num_decoding=1, num_before=0) for at in (start, start + further))
    assert 1 <= far <= near <= 512


@given(st.integers(1, 600), st.integers(0, 20_000), st.integers(1, 600))
def test_about_one_chunk_in_sixteen_keeps_its_state(most: int, start: int, num_tokens: int) -> None:
    limit = PromptLimit(most)
    crossed = [position for position in range(start + 1, start + num_tokens + 1) if position % (16 * most) == 0]
    assert limit.keeps_state(start, num_tokens) == bool(crossed)
