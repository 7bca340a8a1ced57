"""Advance each request from one draft token to the next, on the device.

A drafter that writes keys and values into a request's KV blocks computes its tokens one pass after another. Between two
passes, `advance_drafts` stores the tokens that the last pass found, and makes them the inputs of the next one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping


@dataclass(frozen=True, slots=True)
class DraftRows:
    """State of the requests that draft, one row each, on one device; the first seven tensors change with each pass.

    Args:
        token_ids: [rows] int64 input of the pass: the newest token, then each draft.
        positions: [rows] int64 position of this token.
        token_blocks, token_offsets: [rows] int32 KV block of this position, and its offset in the block.
        kv_lengths: [rows] int32 number of tokens up to this one.
        last_block_lens: [rows] int32 number of these tokens in the last block.
        num_found: [rows] int32 number of tokens that passes have found.
        newest: [rows] int32 position of the newest token.
        num_drafts: [rows] int32 number of tokens to draft; 0 for padding.
        block_table: [rows, max_blocks] int32; must cover all positions that are drafted from.
        dummy_block: KV block that passes of a request write when it needs no more drafts; never read.
        block_size: Number of tokens per KV block.
    """

    token_ids: Tensor
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    kv_lengths: Tensor
    last_block_lens: Tensor
    num_found: Tensor
    newest: Tensor
    num_drafts: Tensor
    block_table: Tensor
    dummy_block: int
    block_size: int


@triton.jit
def _advance_kernel(
    found,
    drafts,
    drafts_stride,
    token_ids,
    positions,
    token_blocks,
    token_offsets,
    kv_lengths,
    last_block_lens,
    num_found,
    newest,
    num_drafts,
    block_table,
    table_stride,
    dummy_block,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Advance one request. Long because of its arguments."""
    await_inputs(OVERLAPS)
    row = tl.program_id(0)
    index, most, token = tl.load(num_found + row), tl.load(num_drafts + row), tl.load(found + row)
    tl.store(drafts + row * drafts_stride + index, token, mask=index < most)
    tl.store(num_found + row, index + 1)
    is_needed = index + 1 < most
    position = tl.load(newest + row) + tl.minimum(index + 1, tl.maximum(most - 1, 0))
    block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE, mask=is_needed, other=dummy_block)
    tl.store(token_ids + row, token)
    tl.store(positions + row, position.to(tl.int64))
    tl.store(token_blocks + row, block)
    tl.store(token_offsets + row, position % BLOCK_SIZE)
    tl.store(kv_lengths + row, position + 1)
    tl.store(last_block_lens + row, position % BLOCK_SIZE + 1)


def advance_drafts(found: Tensor, drafts: Tensor, rows: DraftRows) -> None:
    """Store the tokens that a pass found, and write the inputs of the next pass to `rows`, in place.

    A request that has all its drafts stays at its last position, but its keys and values go to the dummy block.

    Args:
        found: [rows] int64 token drafted by the pass for each request.
        drafts: [rows, max drafts] int64; the tokens of each request are stored from the left.

    Reference: `advance_drafts_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(found):
        advance_drafts_ref(found, drafts, rows)
        return
    _advance_kernel[(len(found),)](
        found=found,
        drafts=drafts,
        drafts_stride=drafts.stride(0),
        token_ids=rows.token_ids,
        positions=rows.positions,
        token_blocks=rows.token_blocks,
        token_offsets=rows.token_offsets,
        kv_lengths=rows.kv_lengths,
        last_block_lens=rows.last_block_lens,
        num_found=rows.num_found,
        newest=rows.newest,
        num_drafts=rows.num_drafts,
        block_table=rows.block_table,
        table_stride=rows.block_table.stride(0),
        dummy_block=rows.dummy_block,
        BLOCK_SIZE=rows.block_size,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(found.device),
    )


def advance_drafts_ref(found: Tensor, drafts: Tensor, rows: DraftRows) -> None:
    """Torch reference for `advance_drafts`."""
    is_stored = rows.num_found < rows.num_drafts
    index = rows.num_found.to(torch.int64)
    kept = drafts.gather(1, index.clamp_max(drafts.shape[1] - 1)[:, None])[:, 0]
    drafts.scatter_(1, index.clamp_max(drafts.shape[1] - 1)[:, None], torch.where(is_stored, found, kept)[:, None])
    rows.num_found.add_(1)
    is_needed = rows.num_found < rows.num_drafts
    positions = rows.newest + torch.minimum(rows.num_found, (rows.num_drafts - 1).clamp_min(0))
    blocks = rows.block_table.gather(1, (positions // rows.block_size).to(torch.int64)[:, None])[:, 0]
    rows.token_ids.copy_(found)
    rows.positions.copy_(positions)
    rows.token_blocks.copy_(torch.where(is_needed, blocks, rows.dummy_block))
    rows.token_offsets.copy_(positions % rows.block_size)
    rows.kv_lengths.copy_(positions + 1)
    rows.last_block_lens.copy_(positions % rows.block_size + 1)
