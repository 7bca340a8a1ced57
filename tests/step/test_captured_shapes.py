"""The captured shapes, and how a step's shape is chosen from them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.step.buffers import StepLimits
from megatron_mamba_cache.step.captured_shapes import decode_shapes, draft_shapes, most_padding_requests, prefill_shapes
from megatron_mamba_cache.step.shapes import StepShape, smallest_holding
from tests.step.step_requests import running_request


def shapes_of_few(most_tokens: int, max_requests: int, max_tokens: int = 8192) -> list[StepShape]:
    """Return the captured shapes for few prefill requests."""
    shapes = prefill_shapes(most_tokens, max_requests, max_tokens, most_tokens)
    return [shape for shape in shapes if shape.num_prefill_requests == min(4, max_requests)]


@given(st.data())
def test_step_uses_the_smallest_captured_shape_that_fits(data: st.DataObject) -> None:
    count, drafts = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 8))
    max_requests = data.draw(st.integers(1, 80))
    max_tokens = data.draw(st.integers(max_requests, 800))
    most_prefilled = data.draw(st.integers(0, 300))
    for_decode = decode_shapes(count, max_requests, drafts, max_tokens)
    shapes = for_decode + prefill_shapes(most_prefilled, max_requests, max_tokens, most_prefilled)
    assert len(shapes) == len(set(shapes)) and len(for_decode) <= 2 * count
    most_requests = max_requests + most_padding_requests(max_requests)
    assert all(shape.num_tokens <= max_tokens and shape.num_requests <= most_requests for shape in shapes)
    assert all(shape.num_prefill_tokens <= most_prefilled for shape in shapes)
    assert max(shape.num_requests for shape in for_decode if shape.width == 1) == max_requests
    num_requests = data.draw(st.integers(1, max_requests))
    requests = [running_request(i, prompt_len=1, computed=1, scheduled=1, num_generated=1) for i in range(num_requests)]
    shape = smallest_holding(StepShape.of(requests), shapes)
    assert shape is not None and shape.width == 1 and not shape.num_prefill_requests
    assert shape.num_requests == min(
        s.num_requests for s in for_decode if s.width == 1 and s.num_requests >= num_requests
    )


@pytest.mark.parametrize(
    ("max_requests", "max_drafts", "total"),
    [(64, 6, 65 * 7), (64, 4, 65 * 5), (104, 3, 105 * 4), (64, 7, 512), (64, 3, 256), (40, 15, 640), (63, 6, 441)],
)
def test_verify_shape_with_a_slow_gemm_size_gets_one_more_request(
    max_requests: int, max_drafts: int, total: int
) -> None:
    width = 1 + max_drafts

    def most(room: int, max_tokens: int = 8192) -> int:
        return max(shape.num_tokens for shape in decode_shapes(9, max_requests, max_drafts, max_tokens, room=room))

    assert most(max_requests + 3) == total
    assert most(0) == most(max_requests) == most(max_requests + 3, max_requests * width) == max_requests * width


@pytest.mark.parametrize("max_requests", [32, 64, 72, 100, 256])
def test_mixed_shapes_have_two_different_numbers_of_decode_requests(max_requests: int) -> None:
    shapes = prefill_shapes(1024, max_requests, 8192, 1024)
    some, most = sorted({shape.num_decode_requests for shape in shapes if shape.num_prefill_requests == 4} - {0})
    assert some % 2 == 1 and max_requests // 8 - 1 <= some <= max_requests // 8 and most == max_requests - 1
    of_many = sorted({shape.num_decode_requests for shape in shapes if shape.num_prefill_requests == 32})
    assert of_many == [some, max_requests - 5]


@pytest.mark.parametrize("max_requests", [8, 32, 64, 256])
def test_mixed_shapes_have_token_totals_with_fast_gemms(max_requests: int) -> None:
    shapes = shapes_of_few(4096, max_requests)
    for num_decode in {shape.num_decode_requests for shape in shapes}:
        sizes = [shape.num_prefill_tokens for shape in shapes if shape.num_decode_requests == num_decode]
        assert sizes == sorted(set(sizes)) and sizes[0] == 64 and sizes[-1] == 4096
        totals = {num_decode + size for size in sizes}
        assert {351, 447, 639, 895} <= totals and {num_decode + 512, num_decode + 1024} <= totals
        assert all(after <= max(2 * size, 128) and after - size <= 512 for size, after in pairwise(sizes))


@pytest.mark.parametrize("max_requests", [*range(1, 80), 127, 128, 129, 255, 256])
def test_no_prefill_shape_has_a_token_total_with_slow_gemms(max_requests: int) -> None:
    totals = {shape.num_tokens for shape in prefill_shapes(4096, max_requests, 8192, 4096)}
    slow = [total for total in totals if 320 <= total <= 1056 and total % 32 == 0 and total % 128]
    assert not slow and len(totals) >= 15
    sizes = [shape.num_prefill_tokens for shape in shapes_of_few(4096, max_requests) if not shape.num_decode_requests]
    assert {64, 128, 256, 351, 384, 447, 512, 639, 768, 895, 1024} <= set(sizes)


def test_largest_prefill_chunks_have_shapes_with_and_without_decode_requests() -> None:
    shapes = shapes_of_few(8192, 64)
    largest = {shape.num_decode_requests: shape.num_prefill_tokens for shape in shapes}
    assert largest == {0: 8192, 7: 8192 - 7, 63: 8192 - 63}
    sizes = [shape.num_prefill_tokens for shape in shapes if not shape.num_decode_requests]
    assert sizes[-6:] == [3584, 4096, 5120, 6144, 7168, 8192]
    longer = [shape.num_prefill_tokens for shape in shapes_of_few(16_000, 64, 10**6) if not shape.num_decode_requests]
    assert longer[-5:] == [8192, 10_240, 12_288, 14_336, 16_000]
    assert prefill_shapes(3, 8, 64, 3) == [] and prefill_shapes(64, 8, 3, 64) == []  # too small for four prompts


def test_token_counts_close_to_another_captured_count_are_omitted() -> None:
    sizes = [shape.num_prefill_tokens for shape in shapes_of_few(4096, 72) if shape.num_decode_requests == 71]
    assert 384 in sizes and 447 - 71 not in sizes and 351 - 71 in sizes
    assert [shape.num_prefill_tokens for shape in shapes_of_few(360, 1)] == [64, 128, 256, 360]


@pytest.mark.parametrize("most_tokens", [4, 64, 65, 351, 352, 1024, 1793, 2048, 2049])
def test_largest_captured_shape_has_the_maximum_number_of_prompt_tokens(most_tokens: int) -> None:
    sizes = [shape.num_prefill_tokens for shape in shapes_of_few(most_tokens, 4) if not shape.num_decode_requests]
    assert sizes == sorted(set(sizes)) and sizes[-1] == most_tokens


def test_step_uses_only_captured_shapes_of_its_own_kind() -> None:
    shapes = decode_shapes(3, 8, 2, 256) + prefill_shapes(100, 8, 256, 100)
    decoding = running_request(0, prompt_len=1, computed=1, scheduled=1, num_generated=1)
    drafting = running_request(0, prompt_len=1, computed=1, scheduled=3, num_generated=1, num_drafts=2)
    prefilling = running_request(1, prompt_len=90, computed=1, scheduled=80)
    short = running_request(1, prompt_len=20, computed=1, scheduled=10)
    wide = running_request(2, prompt_len=1, computed=1, scheduled=4, num_generated=1, num_drafts=3)
    assert smallest_holding(StepShape.of([decoding]), shapes) == StepShape(1, 1)
    assert smallest_holding(StepShape.of([decoding, drafting]), shapes) == StepShape(3, 3)
    assert smallest_holding(StepShape.of([prefilling]), shapes) == StepShape(0, 1, 4, 100)
    assert smallest_holding(StepShape.of([decoding, prefilling]), shapes) == StepShape(7, 1, 4, 100)
    assert smallest_holding(StepShape.of([drafting, prefilling]), shapes) is None
    assert smallest_holding(StepShape.of([prefilling, prefilling]), shapes) is None
    assert smallest_holding(StepShape.of([short] * 4), shapes) == StepShape(0, 1, 4, 64)
    assert smallest_holding(StepShape.of([short] * 5), shapes) == StepShape(3, 1, 8, 100)
    assert smallest_holding(StepShape.of([decoding] * 3 + [short] * 5), shapes) == StepShape(3, 1, 8, 100)
    assert smallest_holding(StepShape.of([decoding] * 4 + [short] * 4), shapes) == StepShape(7, 1, 4, 64)
    assert smallest_holding(StepShape.of([wide]), shapes) is None
    assert smallest_holding(StepShape.of([decoding] * 9), shapes) is None


@given(st.data())
def test_every_step_within_the_limits_has_a_captured_shape(data: st.DataObject) -> None:
    max_requests = data.draw(st.integers(1, 300))
    most_tokens = data.draw(st.sampled_from([512, 1000, 4096, 8192]))
    most_launched = data.draw(st.sampled_from([300, 1741, 4655, 21_600]))
    num_prefill = data.draw(st.integers(1, min(max_requests, 32)))
    is_shared = data.draw(st.booleans())  # with other ranks, whose requests may be the ones that decode
    num_decode = data.draw(st.integers(0, max_requests if is_shared else max_requests - num_prefill))
    most = most_tokens if num_prefill <= 4 else min(most_tokens, most_launched)
    num_tokens = data.draw(st.integers(num_prefill, most))
    max_tokens = most_tokens + max_requests + 1
    shapes = prefill_shapes(most_tokens, max_requests, max_tokens, most_launched, is_shared=is_shared)
    most_requests = max_requests + most_padding_requests(max_requests, is_shared=is_shared)
    assert all(shape.num_requests <= most_requests and shape.num_tokens <= max_tokens for shape in shapes)
    step = StepShape(num_decode, 1, num_prefill, num_tokens)
    found = smallest_holding(step, shapes)
    assert found is not None and found.num_prefill_requests == min(max_requests, 4 if num_prefill <= 4 else 32)
    fuller = [
        shape for shape in shapes if shape.holds(step) and shape.num_prefill_requests == found.num_prefill_requests
    ]
    assert found.num_tokens == min(shape.num_tokens for shape in fuller)
    assert smallest_holding(StepShape(0, 1, 33, 40), shapes) is None
    assert smallest_holding(StepShape(0, 1, 5, min(most_tokens, most_launched) + 1), shapes) is None


@pytest.mark.parametrize(("max_requests", "max_tokens"), [(64, 2048), (63, 2048), (256, 4096), (3, 40), (1, 35)])
def test_rank_may_use_its_whole_token_budget_in_expert_parallel_steps(max_requests: int, max_tokens: int) -> None:
    shapes = prefill_shapes(max_tokens, max_requests, max_tokens, max_tokens, is_shared=True)
    fullest = StepShape(max_requests - 1, 1, 1, max_tokens - (max_requests - 1))
    assert smallest_holding(fullest, shapes) is not None and len(shapes) == len(set(shapes))
    assert all(shape.num_tokens <= max_tokens for shape in shapes)


@pytest.mark.parametrize("max_requests", [5, 8, 31, 32, 64, 256])
@pytest.mark.parametrize(("most_launched", "sizes"), [(1741, 7), (4655, 12), (200, 1)])
def test_few_shapes_are_captured_for_steps_with_many_prompts(max_requests: int, most_launched: int, sizes: int) -> None:
    shapes = prefill_shapes(4096, max_requests, 8192, most_launched)
    shapes = [shape for shape in shapes if shape.num_prefill_requests > 4]
    decode_counts = {shape.num_decode_requests for shape in shapes}
    assert len(decode_counts) == (2 if max_requests >= 32 else 1) and max(decode_counts) == max_requests - 5
    assert len(shapes) == sizes * len(decode_counts)
    assert max(shape.num_prefill_tokens for shape in shapes) == min(most_launched, 4096)
    assert prefill_shapes(4096, 4, 8192, most_launched) == shapes_of_few(4096, 4)


@given(st.data())
def test_draft_models_have_captured_shapes_without_decode_requests(data: st.DataObject) -> None:
    max_requests = data.draw(st.integers(1, 300))
    max_tokens = data.draw(st.sampled_from([max_requests, max_requests + 1, 4 * max_requests, 8192]))
    config = CacheConfig(
        max_requests=max_requests,
        max_tokens=max_tokens,
        num_cuda_graphs=data.draw(st.integers(1, 12)),
        cuda_graph_prefill_tokens=data.draw(st.sampled_from([0, 1, 40, 4096, 8192])),
    )
    limits = StepLimits(max_tokens, max_requests + most_padding_requests(max_requests), max_chunks=1000, max_blocks=8)
    most_launched = data.draw(st.sampled_from([None, 1741, 21_600]))
    shapes = draft_shapes(config, limits, most_launched)
    assert len(shapes) == len(set(shapes))
    for shape in shapes:
        assert shape.num_decode_requests == 0 and shape.num_prefill_requests <= min(max_requests, shape.num_tokens)
        assert shape.num_tokens <= max(8 * max_requests, min(config.most_graph_tokens, most_launched or 8192))
        assert shape.num_tokens <= max_tokens
    num_requests = data.draw(st.integers(1, max_requests))
    one_draft = smallest_holding(StepShape(0, 1, num_requests, num_requests), shapes)
    assert one_draft is not None and (
        num_requests < max_requests or one_draft == StepShape(0, 1, max_requests, max_requests)
    )
