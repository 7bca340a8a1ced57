"""Derive the next step of decode requests from the outcome of a step with drafts, on the device.

How many drafts a step accepts decides the positions of the next step. `begin_drafts` writes the inputs of the first
draft pass after the accepted tokens, and `follow_step` writes the next step, with the same number of drafts, over the
inputs of this one. The host need not read the outcome in between.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .draft_passes import DraftRows

_LEAST_COLUMNS = 16
"""Maximum number of tokens per request for which one compiled kernel supports any number of drafts."""


class FollowedRows(NamedTuple):
    """Inputs of a decode step, one row per request, in the step buffers; all but two change with `follow_step`.

    Args:
        cu_tokens: [rows + 1] int32 index of each request's first token; a request without tokens is padding.
        computed: [rows] int32 number of tokens before the step.
        accepted: [rows] int32 number of tokens that the step before accepted.
        kv_lengths, last_block_lens: [rows] int32 number of tokens after the step, and in the last block.
        token_ids, positions: [tokens] int64.
        token_blocks, token_offsets: [tokens] int32 KV block and offset of each token.
        uniforms: [tokens] int64 words of the random numbers for each token; before `follow_step`, those for the
            positions that follow if one token is accepted.
        later_uniforms: [tokens] int64 words of random numbers for the positions after those of `uniforms`.
        block_table: [rows, max_blocks] int32; must cover the next step, whatever is accepted.
    """

    cu_tokens: Tensor
    computed: Tensor
    accepted: Tensor
    kv_lengths: Tensor
    last_block_lens: Tensor
    token_ids: Tensor
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    uniforms: Tensor
    later_uniforms: Tensor
    block_table: Tensor


class _PassRows(NamedTuple):
    """The tensors of `DraftRows` as a kernel argument."""

    token_ids: Tensor
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    kv_lengths: Tensor
    last_block_lens: Tensor
    num_found: Tensor
    newest: Tensor
    num_drafts: Tensor


@triton.jit
def _begin_kernel(
    outcome, outcome_stride, step, passes, table_stride, BLOCK_SIZE: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Write the first pass of one request."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0)
    num_tokens = tl.load(step.cu_tokens + row + 1) - tl.load(step.cu_tokens + row)
    accepted = tl.load(outcome + row * outcome_stride)
    position = tl.where(num_tokens > 0, tl.load(step.computed + row) + accepted.to(tl.int32), 0)
    tl.store(passes.token_ids + row, tl.load(outcome + row * outcome_stride + accepted))
    tl.store(passes.positions + row, position.to(tl.int64))
    tl.store(passes.token_blocks + row, tl.load(step.block_table + row * table_stride + position // BLOCK_SIZE))
    tl.store(passes.token_offsets + row, position % BLOCK_SIZE)
    tl.store(passes.kv_lengths + row, position + 1)
    tl.store(passes.last_block_lens + row, position % BLOCK_SIZE + 1)
    tl.store(passes.num_found + row, 0)
    tl.store(passes.newest + row, position)
    tl.store(passes.num_drafts + row, tl.maximum(num_tokens - 1, 0))


def begin_drafts(outcome: Tensor, step: FollowedRows, rows: DraftRows) -> None:
    """Write the first pass after the accepted tokens of a step to `rows`, in place; as many drafts as the step has.

    Args:
        outcome: [rows, 2 + max drafts] int64 outcome of the step; see the module `verification`.

    Reference: `begin_drafts_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(outcome):
        begin_drafts_ref(outcome, step, rows)
        return
    _begin_kernel[(len(outcome),)](
        outcome=outcome,
        outcome_stride=outcome.stride(0),
        step=step,
        passes=_PassRows(*(getattr(rows, name) for name in _PassRows._fields)),
        table_stride=step.block_table.stride(0),
        BLOCK_SIZE=rows.block_size,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(outcome.device),
    )


def begin_drafts_ref(outcome: Tensor, step: FollowedRows, rows: DraftRows) -> None:
    """Torch reference for `begin_drafts`."""
    num_tokens = step.cu_tokens.diff()
    accepted = outcome[:, 0]
    positions = torch.where(num_tokens > 0, step.computed + accepted, 0)
    rows.token_ids.copy_(outcome.gather(1, accepted[:, None])[:, 0])
    rows.positions.copy_(positions)
    rows.token_blocks.copy_(step.block_table.gather(1, (positions // rows.block_size)[:, None])[:, 0])
    rows.token_offsets.copy_(positions % rows.block_size)
    rows.kv_lengths.copy_(positions + 1)
    rows.last_block_lens.copy_(positions % rows.block_size + 1)
    rows.num_found.zero_()
    rows.newest.copy_(positions)
    rows.num_drafts.copy_((num_tokens - 1).clamp_min(0))


@triton.jit
def _follow_kernel(
    outcome, outcome_stride, drafts, drafts_stride, step, table_stride,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the next step of one request."""
    await_inputs(OVERLAPS)
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    start = tl.load(step.cu_tokens + row)
    num_tokens = tl.load(step.cu_tokens + row + 1) - start
    if num_tokens > 0:
        accepted = tl.load(outcome + row * outcome_stride)
        is_draft = (column > 0) & (column < num_tokens)
        newest = tl.load(outcome + row * outcome_stride + accepted)
        token = tl.load(drafts + row * drafts_stride + column - 1, mask=is_draft, other=0)
        first = tl.load(step.computed + row) + accepted.to(tl.int32)
        position = first + column
        at = accepted.to(tl.int32) - 1 + column
        inside = column < num_tokens
        is_late = inside & (at >= num_tokens)
        early = tl.load(step.uniforms + start + at, mask=inside & (at < num_tokens), other=0)
        late = tl.load(step.later_uniforms + start + at - num_tokens, mask=is_late, other=0)
        tl.debug_barrier()  # all threads must read before any writes
        block = tl.load(step.block_table + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
        tl.store(step.token_ids + start + column, tl.where(column > 0, token, newest), mask=inside)
        tl.store(step.positions + start + column, position.to(tl.int64), mask=inside)
        tl.store(step.token_blocks + start + column, block, mask=inside)
        tl.store(step.token_offsets + start + column, position % BLOCK_SIZE, mask=inside)
        tl.store(step.uniforms + start + column, tl.where(is_late, late, early), mask=inside)
        end = first + num_tokens
        tl.store(step.computed + row, first)
        tl.store(step.accepted + row, accepted.to(tl.int32))
        tl.store(step.kv_lengths + row, end)
        tl.store(step.last_block_lens + row, (end - 1) % BLOCK_SIZE + 1)


def follow_step(outcome: Tensor, drafts: Tensor, step: FollowedRows, block_size: int) -> None:
    """Replace a step by the next one, in place: the last accepted token of each request, then its drafts.

    Args:
        outcome: [rows, 2 + max drafts] int64 outcome of the step; see the module `verification`.
        drafts: [rows, at least max drafts] int64 drafts that follow the accepted tokens, from the left.
        block_size: Number of tokens per KV block.

    Reference: `follow_step_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(outcome):
        follow_step_ref(outcome, drafts, step, block_size)
        return
    _follow_kernel[(len(outcome),)](
        outcome=outcome,
        outcome_stride=outcome.stride(0),
        drafts=drafts,
        drafts_stride=drafts.stride(0),
        step=step,
        table_stride=step.block_table.stride(0),
        BLOCK_SIZE=block_size,
        COLUMNS=max(_LEAST_COLUMNS, triton.next_power_of_2(outcome.shape[1] - 1)),
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(outcome.device),
    )


def follow_step_ref(outcome: Tensor, drafts: Tensor, step: FollowedRows, block_size: int) -> None:
    """Torch reference for `follow_step`."""
    starts, num_tokens = step.cu_tokens[:-1].to(torch.int64), step.cu_tokens.diff().to(torch.int64)
    accepted, is_real = outcome[:, :1], num_tokens > 0
    columns = torch.arange(outcome.shape[1] - 1, device=outcome.device)
    inside = columns < num_tokens[:, None]
    tokens = torch.cat((outcome.gather(1, accepted), drafts[:, : len(columns) - 1]), dim=1)
    positions = step.computed[:, None] + accepted + columns
    blocks = step.block_table.gather(1, (positions // block_size).clamp_max(step.block_table.shape[1] - 1))
    candidates = (accepted - 1 + columns)[inside]
    owners = num_tokens[:, None].expand_as(inside)[inside]
    at = starts[:, None].expand_as(inside)[inside]
    most = len(step.uniforms) - 1
    early = step.uniforms[(at + candidates).clamp_max(most)]
    late = step.later_uniforms[(at + candidates - owners).clamp(0, most)]
    targets = (starts[:, None] + columns)[inside]
    step.uniforms.scatter_(0, targets, torch.where(candidates < owners, early, late))
    for section, values in (
        (step.token_ids, tokens),
        (step.positions, positions),
        (step.token_blocks, blocks),
        (step.token_offsets, positions % block_size),
    ):
        section[targets] = values[inside].to(section.dtype)
    ends = positions[:, 0] + num_tokens
    for section, values in (
        (step.computed, positions[:, 0]),
        (step.accepted, accepted[:, 0]),
        (step.kv_lengths, ends),
        (step.last_block_lens, (ends - 1) % block_size + 1),
    ):
        section.copy_(torch.where(is_real, values, section))
