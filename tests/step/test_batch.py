"""The layout of a step equals a reference that is computed token by token."""

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.align import plan_align_copy
from megatron_mamba_cache.policy.random_counter import DrawPurpose, counter_uniform
from megatron_mamba_cache.policy.request_settings import SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.step.batch import lay_out_step
from megatron_mamba_cache.step.buffers import StepBuffers
from megatron_mamba_cache.step.logits import Draws
from tests.step.step_requests import (
    BLOCK,
    DUMMY,
    GEOMETRY,
    LIMITS,
    MOST_DRAFTS,
    SSM_CHUNK,
    decoding,
    lay_out,
    random_decode,
    random_sampling,
    running_request,
)


def random_requests(seed: int) -> list[RunningRequest]:
    draw = random.Random(seed)
    num_decode, num_prefill = draw.randint(0, 4), draw.randint(0, 4)
    most_drafts = draw.choice([0, MOST_DRAFTS])
    requests = [random_decode(index, draw, most_drafts) for index in range(num_decode)]
    slots = iter(range(100, 200))
    for index in range(num_decode, num_decode + num_prefill):
        prompt_len = draw.randint(1, 56)
        shared = draw.randint(0, prompt_len // BLOCK)
        is_hit = draw.random() < 0.5
        skip = draw.randint(0, min(shared, (prompt_len - 1) // BLOCK)) * BLOCK
        computed = skip if is_hit else draw.choice([0, draw.randint(0, prompt_len - 1)])
        scheduled = draw.randint(1, prompt_len - computed)
        boundaries = [p for p in range(computed + 1, computed + scheduled + 1) if p % BLOCK == 0]
        requests.append(
            running_request(
                index,
                prompt_len=prompt_len,
                computed=computed,
                scheduled=scheduled,
                num_shared=shared,
                source_slot=next(slots) if is_hit and computed else None,
                reserved={p: next(slots) for p in boundaries if draw.random() < 0.6},
                sampling=random_sampling(draw),
            )
        )
    return requests


@dataclass(slots=True)
class Expected:
    """Expected contents of a step, computed request by request and token by token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    cu_query: list[int] = field(default_factory=lambda: [0])
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    initial_slots: list[int] = field(default_factory=list)
    final_slots: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)  # packed start and end, request, slot
    logits: list[tuple[int, int, int | None]] = field(
        default_factory=list
    )  # packed token, request, draft that follows it


def walk(requests: list[RunningRequest]) -> Expected:
    expected = Expected()
    num_decode_tokens = 0
    for number, request in enumerate(requests):
        is_prefilling = request.computed < request.spec.prompt_len
        known = [*request.spec.prompt.tolist(), *request.generated]
        text, end = [*known, *request.drafts], request.computed + request.scheduled
        for position in range(request.computed, end):
            if position + 1 == end:
                expected.logits.append((len(expected.ids), number, None))
            elif position + 1 >= len(known):
                expected.logits.append((len(expected.ids), number, text[position + 1]))
            index = position // BLOCK
            expected.ids.append(text[position])
            expected.positions.append(position)
            expected.blocks.append(DUMMY if index < request.num_shared_blocks else request.block_ids[index])
            expected.offsets.append(position - index * BLOCK)
            if is_prefilling:
                walk_prefill_token(request, position, len(expected.cu_seqlens) - 1, expected)
        expected.cu_query.append(len(expected.ids))
        num_decode_tokens += 0 if is_prefilling else request.scheduled
        if is_prefilling:
            expected.cu_seqlens.append(len(expected.ids) - num_decode_tokens)
            start_slot = request.cursor.live_slot if request.computed else PAD_SLOT
            expected.initial_slots.append(start_slot if request.source_slot is None else request.source_slot)
            expected.final_slots.append(request.cursor.live_slot)
    return expected


def walk_prefill_token(request: RunningRequest, position: int, request_index: int, expected: Expected) -> None:
    """Append a token to the request's current chunk; start a new chunk at each absolute multiple of the chunk size."""
    if position == request.computed or position % SSM_CHUNK == 0:
        start = expected.chunks[-1][1] if expected.chunks else 0
        expected.chunks.append((start, start, request_index, PAD_SLOT))
    start, end, number, _ = expected.chunks.pop()
    reached = {state.position: state.slot for state in request.reserved}
    expected.chunks.append((start, end + 1, number, reached.get(position + 1, PAD_SLOT)))


def ints(tensor: Tensor) -> list[int]:
    return tensor.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_step_layout_equals_a_token_by_token_reference(device: str, seed: int) -> None:
    requests = random_requests(seed)
    batch, expected = lay_out(requests, device), walk(requests)
    assert batch.requests == tuple(requests)
    assert batch.num_tokens == len(expected.ids)
    assert ints(batch.token_ids) == expected.ids
    assert ints(batch.positions) == expected.positions
    assert ints(batch.token_blocks) == expected.blocks
    assert ints(batch.token_offsets) == expected.offsets
    assert ints(batch.attention.cu_query) == expected.cu_query
    assert batch.attention.query_lens == tuple(end - start for start, end in pairwise(expected.cu_query))
    assert ints(batch.attention.kv_lengths) == [request.computed + request.scheduled for request in requests]
    assert list(batch.attention.kv_lens) == ints(batch.attention.kv_lengths)
    held = [
        request.computed + request.scheduled - (len(request.block_ids) - 1) * GEOMETRY.block_size
        for request in requests
    ]
    found = ints(batch.attention.last_block_lens)
    assert all(mine == theirs for mine, theirs in zip(found, held, strict=True) if 0 < theirs <= GEOMETRY.block_size)
    num_decode = sum(not request.is_prefilling for request in requests)
    assert batch.num_decode_requests == num_decode
    assert batch.num_decode_tokens == expected.cu_query[num_decode]
    for index, request in enumerate(requests):
        assert ints(batch.attention.block_table[index, : len(request.block_ids)]) == request.block_ids


@pytest.mark.parametrize("seed", range(60))
def test_prefill_layout_equals_a_token_by_token_reference(device: str, seed: int) -> None:
    requests = random_requests(seed)
    prefill, expected = lay_out(requests, device).prefill, walk(requests)
    if not expected.final_slots:
        assert prefill is None
        return
    assert prefill is not None
    assert ints(prefill.cu_seqlens) == expected.cu_seqlens
    assert ints(prefill.initial_slots) == expected.initial_slots
    assert ints(prefill.final_slots) == expected.final_slots
    assert ints(prefill.cu_chunks) == [0, *(end for _, end, _, _ in expected.chunks)]
    assert ints(prefill.chunk_requests) == [number for _, _, number, _ in expected.chunks]
    assert ints(prefill.chunk_slots) == [slot for _, _, _, slot in expected.chunks]
    assert sorted(slot for _, _, _, slot in expected.chunks if slot != PAD_SLOT) == sorted(
        state.slot for request in requests if request.is_prefilling for state in request.reserved
    )


@pytest.mark.parametrize("seed", range(60))
def test_decode_layout_has_the_draft_slots_and_state_of_each_request(device: str, seed: int) -> None:
    requests = [request for request in random_requests(seed) if not request.is_prefilling]
    batch, expected = lay_out(requests, device), walk(requests)
    if not requests:
        assert batch.decode is None and batch.num_decode_tokens == 0
        return
    assert batch.decode is not None
    assert ints(batch.decode.cu_tokens) == expected.cu_query
    assert ints(batch.decode.accepted) == [request.cursor.accepted for request in requests]
    assert batch.decode.max_len == max(len(request.drafts) for request in requests) + 1
    for request, columns in zip(requests, ints(batch.decode.columns), strict=True):
        cursor, num_missing = request.cursor, MOST_DRAFTS - len(request.cursor.draft_slots)
        assert columns == [cursor.live_slot, *cursor.draft_slots, *[PAD_SLOT] * num_missing]
        assert columns[cursor.accepted - 1] == cursor.state_slot


@pytest.mark.parametrize("seed", range(60))
def test_align_copy_targets_are_the_slots_reserved_by_requests(device: str, seed: int) -> None:
    requests = random_requests(seed)
    decode = [request for request in requests if not request.is_prefilling]
    batch = lay_out(requests, device)
    align = batch.align
    if not any(request.reserved for request in decode):
        assert align is None
        return
    assert align is not None and batch.decode is not None
    assert ints(align.targets) == [request.reserved[0].slot if request.reserved else PAD_SLOT for request in decode]
    assert ints(align.computed) == [request.computed for request in decode]
    assert ints(align.scheduled) == [request.scheduled for request in decode]
    assert ints(align.drafts) == [len(request.drafts) for request in decode]
    assert ints(align.columns) == ints(batch.decode.columns)
    assert ints(align.state_columns) == [0] * len(decode)


@pytest.mark.parametrize("seed", range(60))
def test_align_copy_copies_states_only_at_reserved_positions(device: str, seed: int) -> None:
    for request in random_requests(seed):
        align = lay_out([request], device).align
        if align is None:
            continue
        (reserved,) = request.reserved
        arguments = [int(values[0]) for values in (align.computed, align.scheduled, align.drafts)]
        for accepted in range(1, 2 + len(request.drafts)):
            plan = plan_align_copy(*arguments, accepted, int(align.state_columns[0]), BLOCK)
            assert (plan is not None) == (request.computed + accepted >= reserved.position)
            if plan is not None:
                assert (plan.destination_column + 1) * BLOCK == reserved.position
                # Column j holds the state after the step's token j.
                assert plan.source_column == plan.shift == reserved.position - 1 - request.computed


@pytest.mark.parametrize("seed", range(60))
def test_step_computes_logits_of_last_tokens_and_of_tokens_before_drafts(device: str, seed: int) -> None:
    requests = random_requests(seed)
    logits, expected = lay_out(requests, device).logits, walk(requests).logits
    assert ints(logits.tokens) == [token for token, _, _ in expected]
    counts = [sum(owner == number for _, owner, _ in expected) for number in range(len(requests))]
    assert logits.starts == (0, *accumulate(counts))
    assert ints(logits.verify.cu_logits) == list(logits.starts)
    assert logits.verify.max_drafts == max((len(request.drafts) for request in requests), default=0)
    for found, (_, _, draft) in zip(ints(logits.verify.draft_ids), expected, strict=True):
        assert draft is None or found == draft


@pytest.mark.parametrize("draws_ratios", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_each_logits_row_has_the_settings_and_random_number_of_its_request(
    device: str, seed: int, draws_ratios: bool
) -> None:
    requests = random_requests(seed)
    logits = lay_out_step(requests, StepBuffers(LIMITS, device), GEOMETRY, draws_ratios=draws_ratios).logits
    expected = walk(requests)
    settings = [requests[number].spec.sampling for _, number, _ in expected.logits]
    assert (logits.draws is Draws.BEST) == all(s.is_greedy for s in settings)
    if logits.draws is Draws.BEST:
        settings = [SamplingSettings(temperature=0.0, top_k=1)] * len(settings)
    assert logits.temperature.tolist() == [s.temperature for s in settings]
    assert logits.top_k.tolist() == [s.top_k for s in settings]
    assert logits.top_p.tolist() == [s.top_p for s in settings]
    sampled = [expected.positions[token] + 1 for token, _, _ in expected.logits]
    uniforms_for = {DrawPurpose.SAMPLE: logits.uniforms}
    if draws_ratios:
        uniforms_for |= {DrawPurpose.ACCEPT: logits.accept_uniforms, DrawPurpose.RESIDUAL: logits.residual_uniforms}
    for purpose, uniforms in uniforms_for.items():
        assert uniforms.tolist() == [
            0.0 if s.is_greedy else counter_uniform(s.seed, position, purpose)
            for s, position in zip(settings, sampled, strict=True)
        ]


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        ([], Draws.BEST),
        ([SamplingSettings(top_k=1), SamplingSettings(temperature=0.0, top_p=0.5)], Draws.BEST),
        ([SamplingSettings(top_k=1), SamplingSettings(top_p=1.0)], Draws.ALL_TOKENS),
        ([SamplingSettings(top_p=0.5), SamplingSettings()], Draws.KEPT_TOKENS),
        ([SamplingSettings(top_k=2), SamplingSettings(top_k=1)], Draws.KEPT_TOKENS),
    ],
)
def test_step_uses_the_fastest_sampler_that_suits_all_requests(settings: list[SamplingSettings], draws: Draws) -> None:
    assert Draws.of([decoding(index, sampling=sampling) for index, sampling in enumerate(settings)]) is draws


def test_step_tensors_have_the_dtypes_expected_by_model_and_kernels(device: str) -> None:
    batch = lay_out([decoding(0), running_request(1, prompt_len=9, computed=0, scheduled=9)], device)
    assert batch.token_ids.dtype == batch.positions.dtype == torch.int64
    assert batch.prefill is not None and batch.decode is not None
    logits, decode = batch.logits, batch.decode
    int32 = [
        batch.token_blocks,
        batch.prefill.cu_chunks,
        logits.tokens,
        logits.top_k,
        logits.verify.cu_logits,
        decode.cu_tokens,
        decode.columns,
        decode.accepted,
    ]
    assert {tensor.dtype for tensor in int32} == {torch.int32}
    assert logits.uniforms.dtype == torch.float64 and logits.verify.draft_ids.dtype == torch.int64
    assert all(tensor.device.type == device for tensor in (*int32, batch.token_ids, logits.uniforms))


@pytest.mark.parametrize(
    ("computed", "source_slot", "initial"), [(0, None, PAD_SLOT), (8, 7, 7), (8, None, 51), (3, None, 51)]
)
def test_prefill_reads_its_initial_state_from_the_cached_or_live_slot(
    device: str, computed: int, source_slot: int | None, initial: int
) -> None:
    request = running_request(1, prompt_len=20, computed=computed, scheduled=20 - computed, source_slot=source_slot)
    prefill = lay_out([request], device).prefill
    assert prefill is not None
    assert (ints(prefill.initial_slots), ints(prefill.final_slots)) == ([initial], [51])


def test_kv_of_tokens_in_shared_blocks_is_written_to_the_dummy_block(device: str) -> None:
    request = running_request(1, prompt_len=20, computed=8, scheduled=12, num_shared=2, source_slot=7)
    batch = lay_out([request], device)
    assert ints(batch.token_blocks) == [DUMMY] * 8 + [22] * 4
    assert ints(batch.attention.block_table[0, :3]) == [20, 21, 22]


def test_prefill_writes_states_at_reserved_positions_to_the_reserved_slots(device: str) -> None:
    requests = [decoding(0), running_request(1, prompt_len=30, computed=3, scheduled=21, reserved={8: 70, 24: 71})]
    prefill = lay_out(requests, device).prefill
    assert prefill is not None
    assert ints(prefill.cu_chunks) == [0, 1, 5, 9, 13, 17, 21]
    assert ints(prefill.chunk_slots) == [PAD_SLOT, 70, PAD_SLOT, PAD_SLOT, PAD_SLOT, 71]


def test_reserved_position_that_is_not_the_end_of_a_chunk_raises(device: str) -> None:
    request = running_request(1, prompt_len=30, computed=0, scheduled=20, reserved={6: 70})
    with pytest.raises(CacheIntegrityError, match="no chunk ends at packed position 6"):
        lay_out([request], device)


def test_step_buffers_are_large_enough_for_the_largest_prefill_step(device: str) -> None:
    requests = [running_request(index, prompt_len=62, computed=3, scheduled=32) for index in range(8)]
    batch = lay_out(requests, device)
    assert batch.num_tokens == LIMITS.max_tokens
    assert batch.prefill is not None and len(batch.prefill.chunk_requests) == 8 * 9


def test_step_buffers_are_large_enough_for_max_requests_with_max_drafts(device: str) -> None:
    requests = [decoding(index, num_drafts=MOST_DRAFTS) for index in range(LIMITS.max_requests)]
    logits = lay_out(requests, device).logits
    assert len(logits.tokens) == LIMITS.max_logits == LIMITS.max_requests * (1 + MOST_DRAFTS)


def test_step_with_fewer_drafts_has_no_slots_of_the_previous_step(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    before = lay_out_step([decoding(0, num_drafts=5, reserved={8: 70})], buffers, GEOMETRY)
    assert len(ints(before.positions)) == 6  # wait for the copy, so that the host buffer may be overwritten
    batch = lay_out_step([decoding(1), decoding(2, accepted=3)], buffers, GEOMETRY)
    assert batch.decode is not None and batch.align is None
    empty = [PAD_SLOT] * MOST_DRAFTS
    assert ints(batch.decode.columns) == [[51, *empty], [52, 320, 321, *empty[2:]]]
    assert ints(buffers.device("align_slots")[:2]) == [PAD_SLOT, PAD_SLOT]


def test_step_without_drafts_has_one_state_slot_per_request(device: str) -> None:
    limits = replace(LIMITS, max_drafts=0)
    batch = lay_out_step([decoding(0), decoding(1)], StepBuffers(limits, device), GEOMETRY)
    assert batch.decode is not None and ints(batch.decode.columns) == [[50], [51]]


def test_step_layout_contains_no_data_of_the_previous_step(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    lay_out_step(random_requests(1), buffers, GEOMETRY)
    requests = random_requests(2)
    second, alone = lay_out_step(requests, buffers, GEOMETRY), lay_out(requests, device)
    assert ints(second.token_ids) == ints(alone.token_ids)
    assert ints(second.attention.cu_query) == ints(alone.attention.cu_query)
    assert ints(second.logits.tokens) == ints(alone.logits.tokens)
    assert (second.prefill is None) == (alone.prefill is None)
    if second.prefill is not None and alone.prefill is not None:
        for name in ("cu_seqlens", "initial_slots", "final_slots", "cu_chunks", "chunk_requests", "chunk_slots"):
            assert ints(getattr(second.prefill, name)) == ints(getattr(alone.prefill, name))


def test_step_tensors_are_views_of_the_step_buffers(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    batch = lay_out_step([decoding(0), running_request(1, prompt_len=9, computed=0, scheduled=9)], buffers, GEOMETRY)
    assert batch.token_blocks.data_ptr() == buffers.device("token_blocks").data_ptr()
    assert batch.attention.block_table.data_ptr() == buffers.device_block_table().data_ptr()
    assert batch.logits.uniforms.data_ptr() == buffers.device("uniforms").data_ptr()
    assert batch.prefill is not None
    assert batch.prefill.chunk_slots.data_ptr() == buffers.device("chunk_slots").data_ptr()
