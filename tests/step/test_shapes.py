"""Steps padded to a captured shape: the inputs of requests and of padding."""

import random
from itertools import accumulate

import numpy as np
import pytest

from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.step.batch import lay_out_step, send_padded_step, view_step
from megatron_mamba_cache.step.buffers import StepBuffers
from megatron_mamba_cache.step.shapes import (
    StepShape,
)
from tests.step.step_requests import GEOMETRY, LIMITS, random_decode, running_request

SHAPES = (StepShape(6, 4), StepShape(0, 1, 3, 40), StepShape(5, 1, 3, 40))
OF_64_BITS = ("token_ids", "token_positions")
PER_TOKEN = (*OF_64_BITS, "token_blocks", "token_offsets")
PER_ROW = ("kv_lengths", "last_block_lens", "computed", "scheduled", "temperature", "top_k", "top_p")
PER_DECODE_REQUEST = ("num_drafts", "accepted", "align_slots")
PER_PREFILL_REQUEST = ("initial_slots", "final_slots")


def some_requests(draw: random.Random, shape: StepShape) -> list[RunningRequest]:
    decoding = draw.randrange(shape.num_decode_requests + 1)
    requests = [random_decode(index, draw, shape.width - 1) for index in range(decoding)]
    left = shape.num_prefill_tokens
    for index in range(draw.randrange(1, shape.num_prefill_requests + 1) if shape.num_prefill_requests else 0):
        computed, scheduled = draw.randrange(20), draw.randrange(1, left // (shape.num_prefill_requests - index) + 1)
        left -= scheduled
        requests.append(
            running_request(decoding + index, prompt_len=computed + scheduled, computed=computed, scheduled=scheduled)
        )
    return requests


def filled_with_junk(device: str) -> StepBuffers:
    """Return buffers with data of an earlier, larger step: block ids and slots of other requests."""
    buffers = StepBuffers(LIMITS, device)
    for name in StepBuffers.SECTIONS:
        buffers.host(name)[:] = 7
    buffers.send(LIMITS.max_requests)
    return buffers


def section(buffers: StepBuffers, name: str) -> np.ndarray:
    return (buffers.device_int64 if name in OF_64_BITS else buffers.device)(name).cpu().numpy()


def send(requests: list[RunningRequest], buffers: StepBuffers, shape: StepShape) -> None:
    send_padded_step(shape.pad(requests, GEOMETRY.dummy_block), buffers, GEOMETRY, shape)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_has_more_query_tokens_than_its_shape_allows(shape: StepShape, seed: int) -> None:
    draw = random.Random(seed)
    requests = some_requests(draw, shape)
    most = shape.most_queries
    assert len(most) == shape.num_requests and sum(most) == shape.num_tokens
    assert max((request.scheduled for request in requests), default=0) <= max(most)
    if shape.num_prefill_requests:
        alone = running_request(0, prompt_len=shape.num_prefill_tokens, computed=0, scheduled=shape.num_prefill_tokens)
        assert shape.holds(StepShape.of([alone])) and alone.scheduled == most[shape.num_decode_requests]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_does_not_change_the_layout_of_requests(device: str, shape: StepShape, seed: int) -> None:
    requests = some_requests(random.Random(seed), shape)
    plain, padded = StepBuffers(LIMITS, device), filled_with_junk(device)
    lay_out_step(requests, plain, GEOMETRY)
    send(requests, padded, shape)
    row_indices, num_decode = list(shape.row_indices(requests)), sum(not request.is_prefilling for request in requests)
    for name in PER_ROW:
        assert np.array_equal(section(plain, name)[: len(requests)], section(padded, name)[row_indices]), name
    for name in PER_DECODE_REQUEST:
        assert np.array_equal(section(plain, name)[:num_decode], section(padded, name)[:num_decode]), name
    for name in PER_PREFILL_REQUEST:
        count = len(requests) - num_decode
        assert np.array_equal(section(plain, name)[:count], section(padded, name)[:count]), name
    columns = [buffers.device_columns().cpu().numpy()[:num_decode] for buffers in (plain, padded)]
    assert np.array_equal(*columns)
    begins = [section(buffers, "cu_query") for buffers in (plain, padded)]
    for index, (request, row) in enumerate(zip(requests, row_indices, strict=True)):
        here, there = (slice(b[i], b[i] + request.scheduled) for b, i in zip(begins, (index, row), strict=True))
        for name in PER_TOKEN:
            assert np.array_equal(section(plain, name)[here], section(padded, name)[there]), name
        wanted = section(padded, "logit_tokens")[slice(*section(padded, "cu_logits")[row : row + 2])]
        assert wanted.tolist() == list(range(there.stop - 1 - len(request.drafts), there.stop))
    if num_decode < len(requests):  # chunk positions are relative to the first prefill token
        first = shape.num_decode_requests
        assert begins[1][first] == shape.num_decode_requests
        num_chunks = section(plain, "cu_request_chunks")[len(requests) - num_decode]
        assert np.array_equal(
            section(plain, "cu_chunks")[: num_chunks + 1], section(padded, "cu_chunks")[: num_chunks + 1]
        )
        assert np.array_equal(section(plain, "chunk_slots")[:num_chunks], section(padded, "chunk_slots")[:num_chunks])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_tokens_write_only_to_dummy_blocks_and_slots(device: str, shape: StepShape, seed: int) -> None:
    requests = some_requests(random.Random(seed), shape)
    buffers = filled_with_junk(device)
    send(requests, buffers, shape)
    row_indices = set(shape.row_indices(requests))
    begins = section(buffers, "cu_query")[: shape.num_requests + 1]
    of_requests = {token for row in row_indices for token in range(begins[row], begins[row + 1])}
    blocks = section(buffers, "token_blocks")
    assert all(blocks[token] == GEOMETRY.dummy_block for token in range(shape.num_tokens) if token not in of_requests)
    padding = [row for row in range(shape.num_requests) if row not in row_indices]
    decoding = [row for row in padding if row < shape.num_decode_requests]
    assert (buffers.device_columns().cpu().numpy()[decoding] == PAD_SLOT).all()
    assert (section(buffers, "align_slots")[decoding] == PAD_SLOT).all()
    assert (section(buffers, "accepted")[decoding] == 1).all()
    prefilling = [row - shape.num_decode_requests for row in padding if row >= shape.num_decode_requests]
    for name in PER_PREFILL_REQUEST:
        assert (section(buffers, name)[prefilling] == PAD_SLOT).all()
    num_chunks = shape.num_chunks(GEOMETRY.grain)
    if shape.num_prefill_requests:
        used = section(buffers, "cu_request_chunks")[shape.num_prefill_requests]
        assert used <= num_chunks
        assert (section(buffers, "chunk_slots")[used:num_chunks] == PAD_SLOT).all()
        assert (np.diff(section(buffers, "cu_chunks")[used : num_chunks + 1]) == 0).all()
    uniforms = section(buffers, "uniforms").view(np.float64)[: shape.num_logits]
    assert ((uniforms >= 0) & (uniforms < 1)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_views_of_a_captured_shape_show_the_inputs_of_later_steps(device: str, shape: StepShape) -> None:
    buffers = StepBuffers(LIMITS, device)
    send([], buffers, shape)
    fullest, num_chunks = shape.fullest_requests(GEOMETRY.dummy_block), shape.num_chunks(GEOMETRY.grain)
    views = view_step(fullest, buffers, num_chunks)
    assert views.num_tokens == len(views.token_ids) == len(views.token_blocks) == shape.num_tokens
    assert len(views.attention.kv_lengths) == shape.num_requests and views.logits.tokens.shape == (shape.num_logits,)
    assert (views.decode is not None) == (views.align is not None) == bool(shape.num_decode_requests)
    assert views.decode is None or views.decode.max_len == shape.width
    assert (views.prefill is not None) == bool(shape.num_prefill_requests)
    assert views.prefill is None or views.prefill.chunk_slots.shape == (num_chunks,)
    requests = some_requests(random.Random(3), shape)
    send(requests, buffers, shape)
    lengths = [request.scheduled for request in shape.pad(requests, GEOMETRY.dummy_block)]
    assert views.attention.cu_query.tolist() == [0, *accumulate(lengths)]
