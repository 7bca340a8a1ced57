"""Steps that are padded to a shape: what the rows are given, what padding is given, and which shape is taken."""

import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.kernels.prefill_rows import PAD_SLOT
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.step.batch import lay_out_step, send_padded_step, view_step
from megatron_mamba_cache.step.buffers import StepBuffers
from megatron_mamba_cache.step.shapes import (
    StepShape,
    decode_shapes,
    most_padding_rows,
    prefill_shapes,
    smallest_holding,
)
from tests.step.test_batch import GEOMETRY, LIMITS, random_decode, row_of

SHAPES = (StepShape(6, 4), StepShape(0, 1, 3, 40), StepShape(5, 1, 3, 40))
OF_64_BITS = ("token_ids", "token_positions")
PER_TOKEN = (*OF_64_BITS, "token_blocks", "token_offsets")
PER_ROW = ("kv_lengths", "last_block_lens", "computed", "scheduled", "temperature", "top_k", "top_p")
PER_DECODE_ROW = ("num_drafts", "accepted", "align_slots")
PER_PREFILL_ROW = ("initial_slots", "final_slots")


def some_rows(draw: random.Random, shape: StepShape) -> list[RunningRequest]:
    decoding = draw.randrange(shape.num_decode_rows + 1)
    rows = [random_decode(index, draw, shape.width - 1) for index in range(decoding)]
    left = shape.num_prefill_tokens
    for index in range(draw.randrange(1, shape.num_prefill_rows + 1) if shape.num_prefill_rows else 0):
        computed, scheduled = draw.randrange(20), draw.randrange(1, left // (shape.num_prefill_rows - index) + 1)
        left -= scheduled
        rows.append(row_of(decoding + index, prompt_len=computed + scheduled, computed=computed, scheduled=scheduled))
    return rows


def filled_with_junk(device: str) -> StepBuffers:
    """Return buffers as a larger step may have left them, with block ids and slots of other requests."""
    buffers = StepBuffers(LIMITS, device)
    for name in StepBuffers.SECTIONS:
        buffers.host(name)[:] = 7
    buffers.send(LIMITS.max_rows)
    return buffers


def section(buffers: StepBuffers, name: str) -> np.ndarray:
    return (buffers.device_int64 if name in OF_64_BITS else buffers.device)(name).cpu().numpy()


def send(rows: list[RunningRequest], buffers: StepBuffers, shape: StepShape) -> None:
    send_padded_step(shape.pad(rows, GEOMETRY.dummy_block), buffers, GEOMETRY, shape)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_has_more_query_tokens_than_a_shape_says(shape: StepShape, seed: int) -> None:
    draw = random.Random(seed)
    rows = some_rows(draw, shape)
    most = shape.most_queries
    assert len(most) == shape.num_rows and sum(most) == shape.num_tokens
    assert max((row.scheduled for row in rows), default=0) <= max(most)
    if shape.num_prefill_rows:
        alone = row_of(0, prompt_len=shape.num_prefill_tokens, computed=0, scheduled=shape.num_prefill_tokens)
        assert shape.holds(StepShape.of([alone])) and alone.scheduled == most[shape.num_decode_rows]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_laid_out_as_without_padding(device: str, shape: StepShape, seed: int) -> None:
    rows = some_rows(random.Random(seed), shape)
    plain, padded = StepBuffers(LIMITS, device), filled_with_junk(device)
    lay_out_step(rows, plain, GEOMETRY)
    send(rows, padded, shape)
    places, num_decode = list(shape.places(rows)), sum(not row.is_prefilling for row in rows)
    for name in PER_ROW:
        assert np.array_equal(section(plain, name)[: len(rows)], section(padded, name)[places]), name
    for name in PER_DECODE_ROW:
        assert np.array_equal(section(plain, name)[:num_decode], section(padded, name)[:num_decode]), name
    for name in PER_PREFILL_ROW:
        count = len(rows) - num_decode
        assert np.array_equal(section(plain, name)[:count], section(padded, name)[:count]), name
    columns = [buffers.device_columns().cpu().numpy()[:num_decode] for buffers in (plain, padded)]
    assert np.array_equal(*columns)
    begins = [section(buffers, "cu_query") for buffers in (plain, padded)]
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        here, there = (slice(b[i], b[i] + row.scheduled) for b, i in zip(begins, (index, place), strict=True))
        for name in PER_TOKEN:
            assert np.array_equal(section(plain, name)[here], section(padded, name)[there]), name
        wanted = section(padded, "logit_tokens")[slice(*section(padded, "cu_logits")[place : place + 2])]
        assert wanted.tolist() == list(range(there.stop - 1 - len(row.drafts), there.stop))
    if num_decode < len(rows):  # SSM chunks count from the first prefill token
        first = shape.num_decode_rows
        assert begins[1][first] == shape.num_decode_rows
        num_chunks = section(plain, "cu_row_chunks")[len(rows) - num_decode]
        assert np.array_equal(
            section(plain, "cu_chunks")[: num_chunks + 1], section(padded, "cu_chunks")[: num_chunks + 1]
        )
        assert np.array_equal(section(plain, "chunk_slots")[:num_chunks], section(padded, "chunk_slots")[:num_chunks])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_owns_nothing(device: str, shape: StepShape, seed: int) -> None:
    rows = some_rows(random.Random(seed), shape)
    buffers = filled_with_junk(device)
    send(rows, buffers, shape)
    places = set(shape.places(rows))
    begins = section(buffers, "cu_query")[: shape.num_rows + 1]
    of_rows = {token for place in places for token in range(begins[place], begins[place + 1])}
    blocks = section(buffers, "token_blocks")
    assert all(blocks[token] == GEOMETRY.dummy_block for token in range(shape.num_tokens) if token not in of_rows)
    padding = [place for place in range(shape.num_rows) if place not in places]
    decoding = [place for place in padding if place < shape.num_decode_rows]
    assert (buffers.device_columns().cpu().numpy()[decoding] == PAD_SLOT).all()
    assert (section(buffers, "align_slots")[decoding] == PAD_SLOT).all()
    assert (section(buffers, "accepted")[decoding] == 1).all()
    prefilling = [place - shape.num_decode_rows for place in padding if place >= shape.num_decode_rows]
    for name in PER_PREFILL_ROW:
        assert (section(buffers, name)[prefilling] == PAD_SLOT).all()
    num_chunks = shape.num_chunks(GEOMETRY.ssm_chunk_size)
    if shape.num_prefill_rows:
        used = section(buffers, "cu_row_chunks")[shape.num_prefill_rows]
        assert used <= num_chunks
        assert (section(buffers, "chunk_slots")[used:num_chunks] == PAD_SLOT).all()
        assert (np.diff(section(buffers, "cu_chunks")[used : num_chunks + 1]) == 0).all()
    uniforms = section(buffers, "uniforms").view(np.float64)[: shape.num_logits]
    assert ((uniforms >= 0) & (uniforms < 1)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_views_of_a_shape_are_of_its_size_and_read_what_is_sent_later(device: str, shape: StepShape) -> None:
    buffers = StepBuffers(LIMITS, device)
    send([], buffers, shape)
    fullest, num_chunks = shape.fullest_rows(GEOMETRY.dummy_block), shape.num_chunks(GEOMETRY.ssm_chunk_size)
    views = view_step(fullest, buffers, num_chunks)
    assert views.num_tokens == len(views.token_ids) == len(views.token_blocks) == shape.num_tokens
    assert len(views.attention.kv_lengths) == shape.num_rows and views.logits.tokens.shape == (shape.num_logits,)
    assert (views.decode is not None) == (views.align is not None) == bool(shape.num_decode_rows)
    assert views.decode is None or views.decode.max_len == shape.width
    assert (views.prefill is not None) == bool(shape.num_prefill_rows)
    assert views.prefill is None or views.prefill.chunk_slots.shape == (num_chunks,)
    rows = some_rows(random.Random(3), shape)
    send(rows, buffers, shape)
    lengths = [row.scheduled for row in shape.pad(rows, GEOMETRY.dummy_block)]
    assert views.attention.cu_query.tolist() == [0, *accumulate(lengths)]


@given(st.data())
def test_the_smallest_shape_that_holds_a_step_is_taken(data: st.DataObject) -> None:
    count, drafts = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 8))
    max_rows = data.draw(st.integers(1, 80))
    max_tokens = data.draw(st.integers(max_rows, 800))
    most_prefilled = data.draw(st.integers(0, 300))
    for_decode = decode_shapes(count, max_rows, drafts, max_tokens)
    shapes = for_decode + prefill_shapes(most_prefilled, max_rows, max_tokens)
    assert len(shapes) == len(set(shapes)) and len(for_decode) <= 2 * count
    most_rows = max_rows + most_padding_rows(max_rows)
    assert all(shape.num_tokens <= max_tokens and shape.num_rows <= most_rows for shape in shapes)
    assert all(shape.num_prefill_tokens <= most_prefilled for shape in shapes)
    assert max(shape.num_rows for shape in for_decode if shape.width == 1) == max_rows
    num_rows = data.draw(st.integers(1, max_rows))
    rows = [row_of(i, prompt_len=1, computed=1, scheduled=1, num_generated=1) for i in range(num_rows)]
    shape = smallest_holding(StepShape.of(rows), shapes)
    assert shape is not None and shape.width == 1 and not shape.num_prefill_rows
    assert shape.num_rows == min(s.num_rows for s in for_decode if s.width == 1 and s.num_rows >= num_rows)


@pytest.mark.parametrize(
    ("max_rows", "max_drafts", "total"),
    [(64, 6, 65 * 7), (64, 4, 65 * 5), (104, 3, 105 * 4), (64, 7, 512), (64, 3, 256), (40, 15, 640), (63, 6, 441)],
)
def test_a_verify_step_of_a_total_that_products_take_slowly_has_a_row_more(
    max_rows: int, max_drafts: int, total: int
) -> None:
    width = 1 + max_drafts

    def most(room: int, max_tokens: int = 8192) -> int:
        return max(shape.num_tokens for shape in decode_shapes(9, max_rows, max_drafts, max_tokens, room=room))

    assert most(max_rows + 3) == total
    assert most(0) == most(max_rows) == most(max_rows + 3, max_rows * width) == max_rows * width


@pytest.mark.parametrize("max_rows", [32, 64, 72, 100, 256])
def test_decode_rows_beside_prompts_are_an_odd_number_of_few_or_nearly_all(max_rows: int) -> None:
    some, most = sorted({shape.num_decode_rows for shape in prefill_shapes(1024, max_rows, 8192)} - {0})
    assert some % 2 == 1 and max_rows // 8 - 1 <= some <= max_rows // 8 and most == max_rows - 1


@pytest.mark.parametrize("max_rows", [8, 32, 64, 256])
def test_steps_beside_any_rows_have_totals_that_products_take_fast(max_rows: int) -> None:
    shapes = prefill_shapes(4096, max_rows, 8192)
    for num_decode in {shape.num_decode_rows for shape in shapes}:
        sizes = [shape.num_prefill_tokens for shape in shapes if shape.num_decode_rows == num_decode]
        assert sizes == sorted(set(sizes)) and sizes[0] == 64 and sizes[-1] == 4096
        totals = {num_decode + size for size in sizes}
        assert {351, 447, 639, 895} <= totals and {num_decode + 512, num_decode + 1024} <= totals
        assert all(after <= max(2 * size, 128) and after - size <= 512 for size, after in pairwise(sizes))


@pytest.mark.parametrize("max_rows", [*range(1, 80), 127, 128, 129, 255, 256])
def test_no_step_of_a_prompt_has_a_total_that_products_are_slow_for(max_rows: int) -> None:
    totals = {shape.num_tokens for shape in prefill_shapes(4096, max_rows, 8192)}
    slow = [total for total in totals if 320 <= total <= 1056 and total % 32 == 0 and total % 128]
    assert not slow and len(totals) >= 15
    sizes = [shape.num_prefill_tokens for shape in prefill_shapes(4096, max_rows, 8192) if not shape.num_decode_rows]
    assert {64, 128, 256, 351, 384, 447, 512, 639, 768, 895, 1024} <= set(sizes)


def test_whole_steps_of_a_long_prompt_have_shapes_alone_and_beside_rows() -> None:
    shapes = prefill_shapes(8192, 64, 8192)
    largest = {shape.num_decode_rows: shape.num_prefill_tokens for shape in shapes}
    assert largest == {0: 8192, 7: 8192 - 7, 63: 8192 - 63}
    sizes = [shape.num_prefill_tokens for shape in shapes if not shape.num_decode_rows]
    assert sizes[-6:] == [3584, 4096, 5120, 6144, 7168, 8192]
    longer = [shape.num_prefill_tokens for shape in prefill_shapes(16_000, 64, 10**6) if not shape.num_decode_rows]
    assert longer[-5:] == [8192, 10_240, 12_288, 14_336, 16_000]
    assert prefill_shapes(3, 8, 64) == [] and prefill_shapes(64, 8, 3) == []  # four prompts have no room


def test_sizes_that_are_little_smaller_than_others_are_left_out() -> None:
    sizes = [shape.num_prefill_tokens for shape in prefill_shapes(4096, 72, 8192) if shape.num_decode_rows == 71]
    assert 384 in sizes and 447 - 71 not in sizes and 351 - 71 in sizes
    assert [shape.num_prefill_tokens for shape in prefill_shapes(360, 1, 8192)] == [64, 128, 256, 360]


@pytest.mark.parametrize("most_tokens", [4, 64, 65, 351, 352, 1024, 1793, 2048, 2049])
def test_no_step_has_more_prompt_tokens_than_asked_for(most_tokens: int) -> None:
    sizes = [shape.num_prefill_tokens for shape in prefill_shapes(most_tokens, 4, 8192) if not shape.num_decode_rows]
    assert sizes == sorted(set(sizes)) and sizes[-1] == most_tokens


def test_a_step_takes_a_shape_of_its_kind_or_none() -> None:
    shapes = decode_shapes(3, 8, 2, 256) + prefill_shapes(100, 8, 256)
    decoding = row_of(0, prompt_len=1, computed=1, scheduled=1, num_generated=1)
    drafting = row_of(0, prompt_len=1, computed=1, scheduled=3, num_generated=1, num_drafts=2)
    prefilling = row_of(1, prompt_len=90, computed=1, scheduled=80)
    wide = row_of(2, prompt_len=1, computed=1, scheduled=4, num_generated=1, num_drafts=3)
    assert smallest_holding(StepShape.of([decoding]), shapes) == StepShape(1, 1)
    assert smallest_holding(StepShape.of([decoding, drafting]), shapes) == StepShape(3, 3)
    assert smallest_holding(StepShape.of([prefilling]), shapes) == StepShape(0, 1, 4, 100)
    assert smallest_holding(StepShape.of([decoding, prefilling]), shapes) == StepShape(7, 1, 4, 100)
    assert smallest_holding(StepShape.of([drafting, prefilling]), shapes) is None
    assert smallest_holding(StepShape.of([prefilling, prefilling]), shapes) is None
    assert smallest_holding(StepShape.of([wide]), shapes) is None
    assert smallest_holding(StepShape.of([decoding] * 9), shapes) is None
