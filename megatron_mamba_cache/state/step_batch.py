"""Lay the rows of a step out for the model: one token array, decode rows first, then prefill rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import AttentionRows
from ..kernels.varlen_rows import PAD_SLOT, VarlenRows
from ..policy.random_counter import DrawPurpose, counter_uniform
from ..policy.requests import RunningRequest
from .prefill_metadata import write_prefill_rows
from .step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of the step is sampled; device tensors but for `all_greedy`."""

    temperature: Tensor  # [rows] float32
    top_k: Tensor  # [rows] int32
    top_p: Tensor  # [rows] float32
    uniforms: Tensor  # [rows] float64 in [0, 1)
    all_greedy: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes, as the model and the sampler read it.

    Tokens are packed: one for each decode row, then each prefill row's tokens. `prefill` counts tokens from the first
    prefill token. All tensors but the two of int64 are views of `StepBuffers`.
    """

    rows: tuple[RunningRequest, ...]
    num_tokens: int
    num_decode_rows: int
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    token_blocks: Tensor  # [tokens] int32 block each token's KV is written to
    token_offsets: Tensor  # [tokens] int32 position inside it
    last_tokens: Tensor  # [rows] int32 packed index of each row's last token
    decode_slots: Tensor  # [decode rows] int32 live slots
    attention: AttentionRows
    prefill: VarlenRows | None  # None: no prefill row
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """What the layout of a step depends on besides its rows."""

    block_size: int
    ssm_chunk_size: int
    dummy_block: int


def lay_out_step(rows: Sequence[RunningRequest], buffers: StepBuffers, geometry: StepGeometry) -> StepBatch:
    """Write a step's rows into the buffers, send them, and return the views.

    Args:
        rows: Decoding rows first, then prefilling ones; each with `scheduled` tokens.
    """
    num_decode = sum(not row.is_prefilling for row in rows)
    _write_tokens(rows, buffers, geometry)
    _write_rows(rows, buffers)
    _write_sampling(rows, buffers)
    prefill_rows = rows[num_decode:]
    num_chunks = write_prefill_rows(prefill_rows, buffers, geometry.ssm_chunk_size) if prefill_rows else 0
    buffers.send(len(rows))
    return _views(rows, num_decode, num_chunks, buffers)


def _write_tokens(rows: Sequence[RunningRequest], buffers: StepBuffers, geometry: StepGeometry) -> None:
    ids, positions = buffers.host("token_ids"), buffers.host("token_positions")
    blocks, offsets = buffers.host("token_blocks"), buffers.host("token_offsets")
    table = buffers.host_block_table()
    start = 0
    for index, row in enumerate(rows):
        table[index, : len(row.block_ids)] = row.block_ids
        first, end = row.computed, row.computed + row.scheduled
        packed = slice(start, start + row.scheduled)
        start = packed.stop
        ids[packed] = row.tokens(first, end)
        at = np.arange(first, end, dtype=np.int32)
        positions[packed] = at
        offsets[packed] = at % geometry.block_size
        block_index = at // geometry.block_size
        # A block that was found in the cache holds these tokens' KV already and may be in use by others.
        shared = block_index < row.num_shared_blocks
        blocks[packed] = np.where(shared, geometry.dummy_block, table[index, block_index])


def _write_rows(rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    num_rows = len(rows)
    lengths = np.fromiter((row.scheduled for row in rows), np.int32, num_rows)
    cu_query = buffers.host("cu_query")
    cu_query[0] = 0
    np.cumsum(lengths, out=cu_query[1 : num_rows + 1])
    buffers.host("last_tokens")[:num_rows] = cu_query[1 : num_rows + 1] - 1
    buffers.host("kv_lengths")[:num_rows] = [row.computed + row.scheduled for row in rows]
    buffers.host("decode_slots")[:num_rows] = [PAD_SLOT if row.is_prefilling else row.live_slot for row in rows]


def _write_sampling(rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    num_rows = len(rows)
    settings = [row.spec.sampling for row in rows]
    buffers.host("temperature").view(np.float32)[:num_rows] = [s.temperature for s in settings]
    buffers.host("top_k")[:num_rows] = [s.top_k for s in settings]
    buffers.host("top_p").view(np.float32)[:num_rows] = [s.top_p for s in settings]
    buffers.host("uniforms").view(np.float64)[:num_rows] = [
        0.0
        if row.spec.sampling.is_greedy
        else counter_uniform(row.spec.sampling.seed, row.computed + row.scheduled, DrawPurpose.SAMPLE)
        for row in rows
    ]


def _views(rows: Sequence[RunningRequest], num_decode: int, num_chunks: int, buffers: StepBuffers) -> StepBatch:
    num_rows, num_prefill = len(rows), len(rows) - num_decode
    num_tokens = sum(row.scheduled for row in rows)
    device = buffers.device
    prefill = None
    if num_prefill:
        prefill = VarlenRows(
            cu_rows=device("cu_rows")[: num_prefill + 1],
            initial_slots=device("initial_slots")[:num_prefill],
            final_slots=device("final_slots")[:num_prefill],
            cu_chunks=device("cu_chunks")[: num_chunks + 1],
            chunk_rows=device("chunk_rows")[:num_chunks],
            chunk_slots=device("chunk_slots")[:num_chunks],
        )
    return StepBatch(
        rows=tuple(rows),
        num_tokens=num_tokens,
        num_decode_rows=num_decode,
        token_ids=device("token_ids")[:num_tokens].long(),
        positions=device("token_positions")[:num_tokens].long(),
        token_blocks=device("token_blocks")[:num_tokens],
        token_offsets=device("token_offsets")[:num_tokens],
        last_tokens=device("last_tokens")[:num_rows],
        decode_slots=device("decode_slots")[:num_decode],
        attention=_attention_rows(rows, buffers),
        prefill=prefill,
        sampling=SamplingRows(
            temperature=device("temperature")[:num_rows].view(torch.float32),
            top_k=device("top_k")[:num_rows],
            top_p=device("top_p")[:num_rows].view(torch.float32),
            uniforms=device("uniforms")[: 2 * num_rows].view(torch.float64),
            all_greedy=all(row.spec.sampling.is_greedy for row in rows),
        ),
    )


def _attention_rows(rows: Sequence[RunningRequest], buffers: StepBuffers) -> AttentionRows:
    num_rows = len(rows)
    return AttentionRows(
        cu_query=buffers.device("cu_query")[: num_rows + 1],
        kv_lengths=buffers.device("kv_lengths")[:num_rows],
        block_table=buffers.device_block_table()[:num_rows],
        query_lens=tuple(row.scheduled for row in rows),
        kv_lens=tuple(row.computed + row.scheduled for row in rows),
    )
