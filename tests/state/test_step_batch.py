"""The layout of a step against a walk over every token."""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.identifiers import BlockId, SlotId
from megatron_mamba_cache.policy.random_counter import DrawPurpose, counter_uniform
from megatron_mamba_cache.policy.requests import RequestSpec, ReservedState, RunningRequest, SamplingSettings
from megatron_mamba_cache.state.step_batch import StepBatch, StepGeometry, lay_out_step
from megatron_mamba_cache.state.step_buffers import StepBuffers, StepLimits

BLOCK, SSM_CHUNK, DUMMY = 8, 4, 999
GEOMETRY = StepGeometry(BLOCK, SSM_CHUNK, DUMMY, window_len=3)
LIMITS = StepLimits(max_tokens=256, max_rows=8, max_chunks=256 // SSM_CHUNK + 16, max_blocks=8)


def row_of(
    index: int,
    *,
    prompt_len: int,
    computed: int,
    scheduled: int,
    num_generated: int = 0,
    num_shared: int = 0,
    source_slot: int | None = None,
    reserved: dict[int, int] | None = None,
    sampling: SamplingSettings | None = None,
) -> RunningRequest:
    """Return a row whose tokens, blocks and live slot all follow from its index and can be told apart."""
    num_blocks = -(-(prompt_len + num_generated) // BLOCK)
    prompt = np.arange(prompt_len, dtype=np.int64) + 1000 * index
    spec = RequestSpec(index, prompt, 10_000, sampling or SamplingSettings(top_k=1))
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), BLOCK),
        epoch=0,
        age=index,
        live_slot=SlotId(50 + index),
        block_ids=[BlockId(20 * index + number) for number in range(num_blocks)],
        num_shared_blocks=num_shared,
        computed=computed,
        scheduled=scheduled,
        generated=[1000 * index + 500 + number for number in range(num_generated)],
        source_slot=None if source_slot is None else SlotId(source_slot),
        reserved=[ReservedState(position, SlotId(slot)) for position, slot in (reserved or {}).items()],
    )


def decoding(index: int, *, prompt_len: int = 5, num_generated: int = 1, **settings: object) -> RunningRequest:
    computed = prompt_len + num_generated - 1
    return row_of(
        index,
        prompt_len=prompt_len,
        computed=computed,
        scheduled=1,
        num_generated=num_generated,
        **settings,  # type: ignore[arg-type]
    )


def lay_out(rows: list[RunningRequest], device: str) -> StepBatch:
    return lay_out_step(rows, StepBuffers(LIMITS, device), GEOMETRY)


def random_rows(seed: int) -> list[RunningRequest]:
    draw = random.Random(seed)
    num_decode, num_prefill = draw.randint(0, 4), draw.randint(0, 4)
    rows = [
        decoding(
            index,
            prompt_len=draw.randint(1, 20),
            num_generated=draw.randint(1, 20),
            sampling=random_sampling(draw),
        )
        for index in range(num_decode)
    ]
    slots = iter(range(100, 200))
    for index in range(num_decode, num_decode + num_prefill):
        prompt_len = draw.randint(1, 60)
        shared = draw.randint(0, prompt_len // BLOCK)
        is_hit = draw.random() < 0.5
        skip = draw.randint(0, min(shared, (prompt_len - 1) // BLOCK)) * BLOCK
        computed = skip if is_hit else draw.choice([0, draw.randint(0, prompt_len - 1)])
        scheduled = draw.randint(1, prompt_len - computed)
        boundaries = [p for p in range(computed + 1, computed + scheduled + 1) if p % BLOCK == 0]
        rows.append(
            row_of(
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
    return rows


def random_sampling(draw: random.Random) -> SamplingSettings:
    return SamplingSettings(
        temperature=draw.choice([0.0, 0.5, 1.0]),
        top_k=draw.choice([0, 1, 7]),
        top_p=draw.choice([0.0, 0.25]),
        seed=draw.randint(0, 2**64 - 1),
    )


@dataclass(slots=True)
class Expected:
    """What a walk over the rows, token by token, says the step holds."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    cu_query: list[int] = field(default_factory=lambda: [0])
    cu_rows: list[int] = field(default_factory=lambda: [0])
    initial_slots: list[int] = field(default_factory=list)
    final_slots: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int, int, int]] = field(default_factory=list)  # packed start and end, row, slot


def walk(rows: list[RunningRequest]) -> Expected:
    expected = Expected()
    num_decode_tokens = 0
    for row in rows:
        is_prefilling = row.computed < row.spec.prompt_len
        text = [*row.spec.prompt.tolist(), *row.generated]
        for position in range(row.computed, row.computed + row.scheduled):
            index = position // BLOCK
            expected.ids.append(text[position])
            expected.positions.append(position)
            expected.blocks.append(DUMMY if index < row.num_shared_blocks else row.block_ids[index])
            expected.offsets.append(position - index * BLOCK)
            if is_prefilling:
                walk_prefill_token(row, position, len(expected.cu_rows) - 1, expected)
        expected.cu_query.append(len(expected.ids))
        num_decode_tokens += not is_prefilling
        if is_prefilling:
            expected.cu_rows.append(len(expected.ids) - num_decode_tokens)
            start_slot = row.live_slot if row.computed else PAD_SLOT
            expected.initial_slots.append(start_slot if row.source_slot is None else row.source_slot)
            expected.final_slots.append(row.live_slot)
    return expected


def walk_prefill_token(row: RunningRequest, position: int, row_number: int, expected: Expected) -> None:
    """Extend the row's chunk by a token, or begin one where an absolute multiple of the chunk is passed."""
    if position == row.computed or position % SSM_CHUNK == 0:
        start = expected.chunks[-1][1] if expected.chunks else 0
        expected.chunks.append((start, start, row_number, PAD_SLOT))
    start, end, number, _ = expected.chunks.pop()
    reached = {state.position: state.slot for state in row.reserved}
    expected.chunks.append((start, end + 1, number, reached.get(position + 1, PAD_SLOT)))


def ints(tensor: Tensor) -> list[int]:
    return tensor.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_step_is_what_a_walk_over_its_tokens_says(device: str, seed: int) -> None:
    rows = random_rows(seed)
    batch, expected = lay_out(rows, device), walk(rows)
    assert batch.rows == tuple(rows)
    assert batch.num_tokens == len(expected.ids)
    assert ints(batch.token_ids) == expected.ids
    assert ints(batch.positions) == expected.positions
    assert ints(batch.token_blocks) == expected.blocks
    assert ints(batch.token_offsets) == expected.offsets
    assert ints(batch.attention.cu_query) == expected.cu_query
    assert batch.attention.query_lens == tuple(end - start for start, end in pairwise(expected.cu_query))
    assert ints(batch.attention.kv_lengths) == [row.computed + row.scheduled for row in rows]
    assert list(batch.attention.kv_lens) == ints(batch.attention.kv_lengths)
    assert ints(batch.logits.tokens) == [end - 1 for end in expected.cu_query[1:]]
    assert batch.logits.starts == tuple(range(len(rows) + 1))
    num_decode = sum(not row.is_prefilling for row in rows)
    assert batch.num_decode_rows == num_decode
    assert batch.num_decode_tokens == num_decode
    assert (batch.decode is None) == (num_decode == 0)
    if batch.decode is not None:
        assert ints(batch.decode.columns) == [[row.live_slot] for row in rows[:num_decode]]
    for index, row in enumerate(rows):
        assert ints(batch.attention.block_table[index, : len(row.block_ids)]) == row.block_ids


@pytest.mark.parametrize("seed", range(60))
def test_prefill_rows_are_what_a_walk_over_their_tokens_says(device: str, seed: int) -> None:
    rows = random_rows(seed)
    prefill, expected = lay_out(rows, device).prefill, walk(rows)
    if not expected.final_slots:
        assert prefill is None
        return
    assert prefill is not None
    assert ints(prefill.cu_rows) == expected.cu_rows
    assert ints(prefill.initial_slots) == expected.initial_slots
    assert ints(prefill.final_slots) == expected.final_slots
    assert ints(prefill.cu_chunks) == [0, *(end for _, end, _, _ in expected.chunks)]
    assert ints(prefill.chunk_rows) == [number for _, _, number, _ in expected.chunks]
    assert ints(prefill.chunk_slots) == [slot for _, _, _, slot in expected.chunks]
    assert sorted(slot for _, _, _, slot in expected.chunks if slot != PAD_SLOT) == sorted(
        state.slot for row in rows for state in row.reserved
    )


@pytest.mark.parametrize("seed", range(60))
def test_sampling_rows_carry_each_request_s_settings_and_its_own_random_number(device: str, seed: int) -> None:
    rows = random_rows(seed)
    sampling = lay_out(rows, device).logits
    settings = [row.spec.sampling for row in rows]
    assert sampling.temperature.tolist() == [s.temperature for s in settings]
    assert sampling.top_k.tolist() == [s.top_k for s in settings]
    assert sampling.top_p.tolist() == [s.top_p for s in settings]
    assert sampling.all_greedy == all(s.is_greedy for s in settings)
    assert sampling.uniforms.tolist() == [
        0.0 if s.is_greedy else counter_uniform(s.seed, row.computed + row.scheduled, DrawPurpose.SAMPLE)
        for row, s in zip(rows, settings, strict=True)
    ]


def test_tensors_are_of_the_types_that_the_model_and_the_kernels_take(device: str) -> None:
    batch = lay_out([decoding(0), row_of(1, prompt_len=9, computed=0, scheduled=9)], device)
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
def test_row_starts_from_nothing_a_cached_slot_or_its_live_slot(
    device: str, computed: int, source_slot: int | None, initial: int
) -> None:
    row = row_of(1, prompt_len=20, computed=computed, scheduled=20 - computed, source_slot=source_slot)
    prefill = lay_out([row], device).prefill
    assert prefill is not None
    assert (ints(prefill.initial_slots), ints(prefill.final_slots)) == ([initial], [51])


def test_tokens_of_shared_blocks_are_written_to_the_dummy(device: str) -> None:
    row = row_of(1, prompt_len=20, computed=8, scheduled=12, num_shared=2, source_slot=7)
    batch = lay_out([row], device)
    assert ints(batch.token_blocks) == [DUMMY] * 8 + [22] * 4
    assert ints(batch.attention.block_table[0, :3]) == [20, 21, 22]


def test_boundaries_that_a_step_passes_and_ends_on_are_written_to_their_slots(device: str) -> None:
    rows = [decoding(0), row_of(1, prompt_len=30, computed=3, scheduled=21, reserved={8: 70, 24: 71})]
    prefill = lay_out(rows, device).prefill
    assert prefill is not None
    assert ints(prefill.cu_chunks) == [0, 1, 5, 9, 13, 17, 21]
    assert ints(prefill.chunk_slots) == [PAD_SLOT, 70, PAD_SLOT, PAD_SLOT, PAD_SLOT, 71]


def test_boundary_that_no_chunk_ends_on_is_an_error(device: str) -> None:
    row = row_of(1, prompt_len=30, computed=0, scheduled=20, reserved={6: 70})
    with pytest.raises(CacheIntegrityError, match="need an SSM chunk that ends at packed position 6"):
        lay_out([row], device)


def test_largest_steps_fit_the_buffers(device: str) -> None:
    rows = [row_of(index, prompt_len=62, computed=3, scheduled=32) for index in range(8)]
    batch = lay_out(rows, device)
    assert batch.num_tokens == LIMITS.max_tokens
    assert batch.prefill is not None and len(batch.prefill.chunk_rows) == 8 * 9


def test_a_second_step_shows_nothing_of_the_first(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    lay_out_step(random_rows(1), buffers, GEOMETRY)
    rows = random_rows(2)
    second, alone = lay_out_step(rows, buffers, GEOMETRY), lay_out(rows, device)
    assert ints(second.token_ids) == ints(alone.token_ids)
    assert ints(second.attention.cu_query) == ints(alone.attention.cu_query)
    assert (second.prefill is None) == (alone.prefill is None)
    if second.prefill is not None and alone.prefill is not None:
        for name in ("cu_rows", "initial_slots", "final_slots", "cu_chunks", "chunk_rows", "chunk_slots"):
            assert ints(getattr(second.prefill, name)) == ints(getattr(alone.prefill, name))


def test_views_of_a_step_lie_in_its_buffers(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    batch = lay_out_step([decoding(0), row_of(1, prompt_len=9, computed=0, scheduled=9)], buffers, GEOMETRY)
    assert batch.token_blocks.data_ptr() == buffers.device("token_blocks").data_ptr()
    assert batch.attention.block_table.data_ptr() == buffers.device_block_table().data_ptr()
    assert batch.logits.uniforms.data_ptr() == buffers.device("uniforms").data_ptr()
    assert batch.prefill is not None
    assert batch.prefill.chunk_slots.data_ptr() == buffers.device("chunk_slots").data_ptr()
