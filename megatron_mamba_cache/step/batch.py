"""Lay the rows of a step out for the model: one token array, decode rows first, then prefill rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.attention.interface import AttentionRows
from ..policy.draft_states import num_folded
from ..policy.identifiers import BlockId
from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest, num_decoding
from ..recurrences.batches import PAD_SLOT, AlignBatch, DecodeBatch, PrefillBatch, ReplayBatch
from .buffers import StepBuffers
from .logits import StepLogits, view_logits, write_logits
from .prefill_metadata import write_prefill_batch
from .shapes import StepShape, pad_tail

_Rows = TypeVar("_Rows", AlignBatch, ReplayBatch)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes, as the model and the sampler read it.

    Tokens are packed: each decode row's base token and drafts, then each prefill row's tokens. `prefill` counts tokens
    from the first prefill token. All tensors but those of int64 are views of `StepBuffers`.
    """

    rows: tuple[RunningRequest, ...]
    request_ids: tuple[int, ...]  # [rows]
    places: Sequence[int]  # [rows] where each row's results are; other places are padding
    num_tokens: int
    num_exchanged: int  # tokens that ranks which share experts exchange, the same number on each: at least num_tokens
    num_decode_requests: int
    num_decode_tokens: int
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    token_blocks: Tensor  # [tokens] int32 block each token's KV is written to
    token_offsets: Tensor  # [tokens] int32 position inside it
    real_tokens: Tensor | None  # [tokens] int32, 0 for padding; None if the model does not ask
    attention: AttentionRows
    decode: DecodeBatch | None  # None: no decode row
    replay: ReplayBatch | None  # the decode rows' states; None: no decode row, or states are not replayed
    prefill: PrefillBatch | None  # None: no prefill row
    logits: StepLogits
    align: AlignBatch | None  # None: no decode row can reach a boundary; `accepted` is filled in after verification

    def with_own_verification(self) -> "StepBatch":
        """Return the step with copies, which later steps do not overwrite, of what follows its forward."""
        align = None if self.align is None else _with_own_tensors(self.align)
        replay = None if self.replay is None else _with_own_tensors(self.replay)
        return replace(self, logits=self.logits.clone(), align=align, replay=replay)

    @torch.inference_mode()
    def forget_boundaries(self, places: Iterable[int]) -> None:
        """Write no state of these places, whose rows have left: their slots are others' by now."""
        if self.align is not None:
            for place in places:
                self.align.targets[place].fill_(PAD_SLOT)


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """What the layout of a step depends on besides its rows."""

    block_size: int
    grain: int  # tokens of a chunk of prefill; a block is a multiple
    dummy_block: BlockId


def lay_out_step(
    rows: Sequence[RunningRequest],
    buffers: StepBuffers,
    geometry: StepGeometry,
    *,
    draws_ratios: bool = False,
    purpose: DrawPurpose = DrawPurpose.SAMPLE,
    num_exchanged: int = 0,
) -> StepBatch:
    """Write a step's rows into the buffers, send them, and return the views.

    Args:
        rows: Decoding rows first, then prefilling ones; each with `scheduled` tokens.
        draws_ratios: True when drafts come with distributions, so that accepting them takes random numbers.
        purpose: What the tokens are drawn for.
        num_exchanged: The most tokens of any rank that shares the experts, if it is more than the rows have.
    """
    num_chunks = _write(rows, buffers, geometry, purpose, draws_ratios=draws_ratios)
    buffers.send(len(rows))
    batch = view_step(rows, buffers, num_chunks)
    return replace(batch, num_exchanged=num_exchanged) if num_exchanged > batch.num_tokens else batch


def send_padded_step(
    padded: Sequence[RunningRequest],
    buffers: StepBuffers,
    geometry: StepGeometry,
    shape: StepShape,
    *,
    draws_ratios: bool = False,
    purpose: DrawPurpose = DrawPurpose.SAMPLE,
) -> None:
    """Write and send a step that is padded to a shape, see `StepShape.pad`; its views exist already."""
    _write(padded, buffers, geometry, purpose, draws_ratios=draws_ratios)
    pad_tail(padded, buffers, geometry.dummy_block, shape, shape.num_chunks(geometry.grain))
    buffers.send(len(padded))


def _write(
    rows: Sequence[RunningRequest],
    buffers: StepBuffers,
    geometry: StepGeometry,
    purpose: DrawPurpose,
    *,
    draws_ratios: bool,
) -> int:
    """Write every integer of a step; return the number of its chunks."""
    num_decode = num_decoding(rows)
    buffers.begin()
    _write_rows(rows, buffers, geometry.block_size)
    _write_tokens(rows, num_decode, buffers, geometry)
    write_live_states(rows[:num_decode], buffers)
    write_logits(rows, buffers, purpose, draws_ratios=draws_ratios)
    prefilling = rows[num_decode:]
    return write_prefill_batch(prefilling, buffers, geometry.grain) if prefilling else 0


def _write_rows(rows: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> None:
    num_rows = len(rows)
    scheduled, computed = buffers.host("scheduled")[:num_rows], buffers.host("computed")[:num_rows]
    scheduled[:] = [row.scheduled for row in rows]
    computed[:] = [row.computed for row in rows]
    cu_query = buffers.host("cu_query")
    cu_query[0] = 0
    np.cumsum(scheduled, out=cu_query[1 : num_rows + 1])
    kv_lengths = np.add(computed, scheduled, out=buffers.host("kv_lengths")[:num_rows])
    buffers.host("last_block_lens")[:num_rows] = (kv_lengths - 1) % block_size + 1
    num_blocks = np.fromiter((len(row.block_ids) for row in rows), np.int32, num_rows)
    table = buffers.host_block_table()[:num_rows]
    blocks = chain.from_iterable(row.block_ids for row in rows)
    table[np.arange(table.shape[1]) < num_blocks[:, None]] = np.fromiter(blocks, np.int32, int(num_blocks.sum()))


def _write_tokens(
    rows: Sequence[RunningRequest], num_decode: int, buffers: StepBuffers, geometry: StepGeometry
) -> None:
    """Write the sections that hold one entry a token; called after `_write_rows`."""
    num_rows, block_size = len(rows), geometry.block_size
    scheduled, starts = buffers.host("scheduled")[:num_rows], buffers.host("cu_query")[: num_rows + 1]
    ids, num_tokens = buffers.host_int64("token_ids"), starts[-1]
    decoded = chain.from_iterable(row.inputs for row in rows[:num_decode])
    ids[: starts[num_decode]] = np.fromiter(decoded, np.int64, starts[num_decode])
    for row, start in zip(rows[num_decode:], starts[num_decode:], strict=False):
        ids[start : start + row.scheduled] = row.inputs
    owners = np.repeat(np.arange(num_rows), scheduled)
    at = np.arange(num_tokens, dtype=np.int32) + (buffers.host("computed")[:num_rows] - starts[:-1])[owners]
    index = at // block_size
    buffers.host_int64("token_positions")[:num_tokens] = at
    buffers.host("token_offsets")[:num_tokens] = at - index * block_size
    # A block that was found in the cache holds these tokens' KV already, and other rows may read it.
    num_shared = np.fromiter((row.num_shared_blocks for row in rows), np.int32, num_rows)
    blocks = np.where(index < num_shared[owners], geometry.dummy_block, buffers.host_block_table()[owners, index])
    buffers.host("token_blocks")[:num_tokens] = blocks
    if buffers.limits.marks_real_tokens:
        is_real = np.fromiter((row.cursor.live_slot != PAD_SLOT for row in rows), np.int32, num_rows)
        buffers.host("real_tokens")[:num_tokens] = is_real[owners]


def write_live_states(rows: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write where the states of decode rows are, what of them the last step accepted, and where boundaries go."""
    num_rows = len(rows)
    buffers.host("num_drafts")[:num_rows] = [len(row.drafts) for row in rows]
    buffers.host("accepted")[:num_rows] = [row.cursor.accepted for row in rows]
    buffers.host("align_slots")[:num_rows] = [row.reserved[0].slot if row.reserved else PAD_SLOT for row in rows]
    columns, fold_len = buffers.host_columns(), buffers.limits.fold_len
    live_slots = [row.cursor.live_slot for row in rows]
    if fold_len:
        buffers.host("live_slots")[:num_rows] = live_slots
        columns[:num_rows] = buffers.host("live_slots")[:num_rows, None]  # it has all conv windows
        buffers.host("draft_buffers")[:num_rows] = [row.cursor.draft_buffer or 0 for row in rows]
        buffers.host("folded")[:num_rows] = [num_folded(row, fold_len) for row in rows]
        return
    columns[:num_rows, 0] = live_slots
    if columns.shape[1] > 1:
        columns[:num_rows, 1:] = PAD_SLOT
        for index, row in enumerate(rows):
            columns[index, 1 : 1 + len(row.cursor.draft_slots)] = row.cursor.draft_slots


def view_step(rows: Sequence[RunningRequest], buffers: StepBuffers, num_chunks: int = 0) -> StepBatch:
    """Return the views of a step that has been sent.

    The views and what is computed from them here depend on the numbers of rows, tokens and drafts, not on the rest. A
    graph that is captured over them reads whatever was sent last.
    """
    num_decode = num_decoding(rows)
    num_tokens = sum(row.scheduled for row in rows)
    device = buffers.device
    token_ids = buffers.device_int64("token_ids")[:num_tokens]
    return StepBatch(
        rows=tuple(rows),
        request_ids=tuple(row.request_id for row in rows),
        places=range(len(rows)),
        num_tokens=num_tokens,
        num_exchanged=num_tokens,
        num_decode_requests=num_decode,
        num_decode_tokens=sum(row.scheduled for row in rows[:num_decode]),
        token_ids=token_ids,
        positions=buffers.device_int64("token_positions")[:num_tokens],
        token_blocks=device("token_blocks")[:num_tokens],
        token_offsets=device("token_offsets")[:num_tokens],
        real_tokens=device("real_tokens")[:num_tokens] if buffers.limits.marks_real_tokens else None,
        attention=_attention_rows(rows, buffers),
        decode=_decode_rows(rows[:num_decode], buffers) if num_decode else None,
        replay=_replay_rows(rows[:num_decode], buffers) if num_decode and buffers.limits.fold_len else None,
        prefill=_prefill_rows(len(rows) - num_decode, num_chunks, buffers) if num_decode < len(rows) else None,
        logits=view_logits(rows, token_ids, buffers),
        align=_align_rows(num_decode, buffers) if any(row.reserved for row in rows[:num_decode]) else None,
    )


def _attention_rows(rows: Sequence[RunningRequest], buffers: StepBuffers) -> AttentionRows:
    num_rows = len(rows)
    return AttentionRows(
        cu_query=buffers.device("cu_query")[: num_rows + 1],
        kv_lengths=buffers.device("kv_lengths")[:num_rows],
        last_block_lens=buffers.device("last_block_lens")[:num_rows],
        block_table=buffers.device_block_table()[:num_rows],
        query_lens=tuple(row.scheduled for row in rows),
        kv_lens=tuple(row.computed + row.scheduled for row in rows),
        host_block_table=buffers.host_block_table()[:num_rows],
        num_decode_requests=num_decoding(rows),
    )


def _decode_rows(rows: Sequence[RunningRequest], buffers: StepBuffers) -> DecodeBatch:
    num_rows = len(rows)
    return DecodeBatch(
        cu_tokens=buffers.device("cu_query")[: num_rows + 1],
        columns=buffers.device_columns()[:num_rows],
        accepted=buffers.device("accepted")[:num_rows],
        max_len=max(row.scheduled for row in rows),
    )


def _replay_rows(rows: Sequence[RunningRequest], buffers: StepBuffers) -> ReplayBatch:
    num_rows, device = len(rows), buffers.device
    return ReplayBatch(
        cu_tokens=device("cu_query")[: num_rows + 1],
        slots=device("live_slots")[:num_rows],
        buffers=device("draft_buffers")[:num_rows],
        folded=device("folded")[:num_rows],
        computed=device("computed")[:num_rows],
        max_tokens=max(row.scheduled for row in rows),
    )


def _prefill_rows(num_rows: int, num_chunks: int, buffers: StepBuffers) -> PrefillBatch:
    device = buffers.device
    return PrefillBatch(
        cu_seqlens=device("cu_seqlens")[: num_rows + 1],
        initial_slots=device("initial_slots")[:num_rows],
        final_slots=device("final_slots")[:num_rows],
        cu_chunks=device("cu_chunks")[: num_chunks + 1],
        chunk_requests=device("chunk_requests")[:num_chunks],
        chunk_slots=device("chunk_slots")[:num_chunks],
        cu_request_chunks=device("cu_request_chunks")[: num_rows + 1],
        longest_first=device("longest_first")[:num_rows],
    )


def _align_rows(num_rows: int, buffers: StepBuffers) -> AlignBatch:
    device = buffers.device
    return AlignBatch(
        computed=device("computed")[:num_rows],
        scheduled=device("scheduled")[:num_rows],
        drafts=device("num_drafts")[:num_rows],
        accepted=device("accepted")[:num_rows],
        columns=buffers.device_columns()[:num_rows],
        state_columns=device("state_columns")[:num_rows],
        targets=device("align_slots")[:num_rows],
    )


def _with_own_tensors(rows: _Rows) -> _Rows:
    found = {field.name: getattr(rows, field.name) for field in fields(rows)}
    copies: dict[str, Any] = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    return replace(rows, **copies)
