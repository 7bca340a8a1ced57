"""Write the requests of a step into the step buffers as packed tokens, decode requests first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
from .logits import StepLogits, view_logits, with_own_tensors, write_logits
from .prefill_metadata import write_prefill_batch
from .shapes import StepShape, pad_tail


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of one step for the model and the sampler, as device tensors.

    Tokens are packed: each decode request's newest token and its drafts, then each prefill request's tokens. Token
    indices in `prefill` are relative to the first prefill token. The tensors are views of `StepBuffers`, except for
    some tensors of `logits` in a step with drafts.
    """

    requests: tuple[RunningRequest, ...]
    request_ids: tuple[int, ...]  # [requests]
    row_indices: Sequence[int]  # [requests] index of each request in the step's tensors; other indices are padding
    num_tokens: int
    num_exchanged: int  # number of tokens that each expert-parallel rank exchanges, padding included
    num_decode_requests: int
    num_decode_tokens: int
    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    token_blocks: Tensor  # [tokens] int32 KV block to which each token is written
    token_offsets: Tensor  # [tokens] int32 offset inside that block
    real_tokens: Tensor | None  # [tokens] int32, 0 for padding; None if the model does not need it
    attention: AttentionRows
    decode: DecodeBatch | None  # None without decode requests
    replay: ReplayBatch | None  # replay rings of the decode requests; None if drafts do not use rings
    prefill: PrefillBatch | None  # None without prefill requests
    logits: StepLogits
    align: AlignBatch | None  # None if no decode request can reach a boundary; `accepted` is set after verification

    def with_own_verification(self) -> "StepBatch":
        """Return a batch with copies of the tensors that verification reads, because later steps overwrite them."""
        align = None if self.align is None else with_own_tensors(self.align)
        replay = None if self.replay is None else with_own_tensors(self.replay)
        return replace(self, logits=self.logits.clone(), align=align, replay=replay)

    @torch.inference_mode()
    def forget_boundaries(self, row_indices: Iterable[int]) -> None:
        """Do not write the boundary states of these finished requests, because their slots may have new owners."""
        if self.align is not None:
            for row in row_indices:
                self.align.targets[row].fill_(PAD_SLOT)


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """Block size, chunk size and dummy block, which determine the layout of every step."""

    block_size: int  # number of tokens per KV block
    grain: int  # number of tokens per prefill chunk; the block size is a multiple
    dummy_block: BlockId  # receives the KV of padding tokens; never read


def lay_out_step(
    requests: Sequence[RunningRequest],
    buffers: StepBuffers,
    geometry: StepGeometry,
    *,
    draws_ratios: bool = False,
    purpose: DrawPurpose = DrawPurpose.SAMPLE,
    num_exchanged: int = 0,
) -> StepBatch:
    """Write a step's requests into the buffers, copy the buffers to the device, and return the device views.

    Args:
        requests: Decoding requests first, then prefilling ones; each with `scheduled` tokens.
        draws_ratios: True if any draft was sampled from a distribution; its verification needs random numbers.
        purpose: What the random numbers are used for, e.g. sampling or drafting; part of their seed.
        num_exchanged: Number of tokens that each expert-parallel rank exchanges. If it is less than this step's number
            of tokens, that number is used.
    """
    num_chunks = _write(requests, buffers, geometry, purpose, draws_ratios=draws_ratios)
    buffers.send(len(requests))
    batch = view_step(requests, buffers, num_chunks)
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
    """Write a step padded by `StepShape.pad` and copy it to the device, where captured graphs read it."""
    _write(padded, buffers, geometry, purpose, draws_ratios=draws_ratios)
    pad_tail(padded, buffers, geometry.dummy_block, shape, shape.num_chunks(geometry.grain))
    buffers.send(len(padded))


def _write(
    requests: Sequence[RunningRequest],
    buffers: StepBuffers,
    geometry: StepGeometry,
    purpose: DrawPurpose,
    *,
    draws_ratios: bool,
) -> int:
    """Write all inputs of a step to the host buffer; return its number of prefill chunks."""
    num_decode = num_decoding(requests)
    buffers.begin()
    _write_requests(requests, buffers, geometry.block_size)
    _write_tokens(requests, num_decode, buffers, geometry)
    write_live_states(requests[:num_decode], buffers)
    write_logits(requests, buffers, purpose, draws_ratios=draws_ratios)
    prefilling = requests[num_decode:]
    return write_prefill_batch(prefilling, buffers, geometry.grain) if prefilling else 0


def _write_requests(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> None:
    num_requests = len(requests)
    scheduled, computed = buffers.host("scheduled")[:num_requests], buffers.host("computed")[:num_requests]
    scheduled[:] = [request.scheduled for request in requests]
    computed[:] = [request.computed for request in requests]
    cu_query = buffers.host("cu_query")
    cu_query[0] = 0
    np.cumsum(scheduled, out=cu_query[1 : num_requests + 1])
    kv_lengths = np.add(computed, scheduled, out=buffers.host("kv_lengths")[:num_requests])
    buffers.host("last_block_lens")[:num_requests] = (kv_lengths - 1) % block_size + 1
    write_block_table(requests, buffers)


def write_block_table(requests: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write the KV blocks of each request to the first rows of the host block table; entries after them are kept."""
    num_blocks = np.fromiter((len(request.block_ids) for request in requests), np.int32, len(requests))
    table = buffers.host_block_table()[: len(requests)]
    blocks = chain.from_iterable(request.block_ids for request in requests)
    table[np.arange(table.shape[1]) < num_blocks[:, None]] = np.fromiter(blocks, np.int32, int(num_blocks.sum()))


def _write_tokens(
    requests: Sequence[RunningRequest], num_decode: int, buffers: StepBuffers, geometry: StepGeometry
) -> None:
    """Write the buffer sections with one entry per token. Call this after `_write_requests`."""
    num_requests, block_size = len(requests), geometry.block_size
    scheduled, starts = buffers.host("scheduled")[:num_requests], buffers.host("cu_query")[: num_requests + 1]
    ids, num_tokens = buffers.host_int64("token_ids"), starts[-1]
    decoded = chain.from_iterable(request.inputs for request in requests[:num_decode])
    ids[: starts[num_decode]] = np.fromiter(decoded, np.int64, starts[num_decode])
    for request, start in zip(requests[num_decode:], starts[num_decode:], strict=False):
        ids[start : start + request.scheduled] = request.inputs
    owners = np.repeat(np.arange(num_requests), scheduled)
    at = np.arange(num_tokens, dtype=np.int32) + (buffers.host("computed")[:num_requests] - starts[:-1])[owners]
    index = at // block_size
    buffers.host_int64("token_positions")[:num_tokens] = at
    buffers.host("token_offsets")[:num_tokens] = at - index * block_size
    # A shared block already contains the KV of its tokens and must not change, so they go to the dummy block instead.
    num_shared = np.fromiter((request.num_shared_blocks for request in requests), np.int32, num_requests)
    blocks = np.where(index < num_shared[owners], geometry.dummy_block, buffers.host_block_table()[owners, index])
    buffers.host("token_blocks")[:num_tokens] = blocks
    if buffers.limits.marks_real_tokens:
        is_real = np.fromiter((request.cursor.live_slot != PAD_SLOT for request in requests), np.int32, num_requests)
        buffers.host("real_tokens")[:num_tokens] = is_real[owners]


def write_live_states(requests: Sequence[RunningRequest], buffers: StepBuffers) -> None:
    """Write each decode request's state slots, number of tokens accepted in the last step, and boundary slot."""
    num_requests = len(requests)
    buffers.host("num_drafts")[:num_requests] = [len(request.drafts) for request in requests]
    buffers.host("accepted")[:num_requests] = [request.cursor.accepted for request in requests]
    buffers.host("align_slots")[:num_requests] = [
        request.reserved[0].slot if request.reserved else PAD_SLOT for request in requests
    ]
    columns, fold_len = buffers.host_columns(), buffers.limits.fold_len
    live_slots = [request.cursor.live_slot for request in requests]
    if fold_len:
        buffers.host("live_slots")[:num_requests] = live_slots
        columns[:num_requests] = buffers.host("live_slots")[:num_requests, None]  # the live slot holds the conv windows
        buffers.host("draft_buffers")[:num_requests] = [request.cursor.draft_buffer or 0 for request in requests]
        buffers.host("folded")[:num_requests] = [num_folded(request, fold_len) for request in requests]
        return
    columns[:num_requests, 0] = live_slots
    if columns.shape[1] > 1:
        columns[:num_requests, 1:] = PAD_SLOT
        for index, request in enumerate(requests):
            columns[index, 1 : 1 + len(request.cursor.draft_slots)] = request.cursor.draft_slots


def view_step(requests: Sequence[RunningRequest], buffers: StepBuffers, num_chunks: int) -> StepBatch:
    """Return views of a step's inputs on the device, sized by its numbers of requests, tokens and drafts.

    The addresses are fixed: a graph captured with these views reads the step that was sent last.
    """
    num_decode = num_decoding(requests)
    num_tokens = sum(request.scheduled for request in requests)
    device = buffers.device
    token_ids = buffers.device_int64("token_ids")[:num_tokens]
    return StepBatch(
        requests=tuple(requests),
        request_ids=tuple(request.request_id for request in requests),
        row_indices=range(len(requests)),
        num_tokens=num_tokens,
        num_exchanged=num_tokens,
        num_decode_requests=num_decode,
        num_decode_tokens=sum(request.scheduled for request in requests[:num_decode]),
        token_ids=token_ids,
        positions=buffers.device_int64("token_positions")[:num_tokens],
        token_blocks=device("token_blocks")[:num_tokens],
        token_offsets=device("token_offsets")[:num_tokens],
        real_tokens=device("real_tokens")[:num_tokens] if buffers.limits.marks_real_tokens else None,
        attention=_attention_batch(requests, buffers),
        decode=_decode_batch(requests[:num_decode], buffers) if num_decode else None,
        replay=_replay_batch(requests[:num_decode], buffers) if num_decode and buffers.limits.fold_len else None,
        prefill=_prefill_batch(len(requests) - num_decode, num_chunks, buffers) if num_decode < len(requests) else None,
        logits=view_logits(requests, token_ids, buffers),
        align=_align_batch(num_decode, buffers) if any(request.reserved for request in requests[:num_decode]) else None,
    )


def _attention_batch(requests: Sequence[RunningRequest], buffers: StepBuffers) -> AttentionRows:
    num_requests = len(requests)
    return AttentionRows(
        cu_query=buffers.device("cu_query")[: num_requests + 1],
        kv_lengths=buffers.device("kv_lengths")[:num_requests],
        last_block_lens=buffers.device("last_block_lens")[:num_requests],
        block_table=buffers.device_block_table()[:num_requests],
        query_lens=tuple(request.scheduled for request in requests),
        kv_lens=tuple(request.computed + request.scheduled for request in requests),
        host_block_table=buffers.host_block_table()[:num_requests],
        num_decode_requests=num_decoding(requests),
    )


def _decode_batch(requests: Sequence[RunningRequest], buffers: StepBuffers) -> DecodeBatch:
    num_requests = len(requests)
    return DecodeBatch(
        cu_tokens=buffers.device("cu_query")[: num_requests + 1],
        columns=buffers.device_columns()[:num_requests],
        accepted=buffers.device("accepted")[:num_requests],
        max_len=max(request.scheduled for request in requests),
        computed=buffers.device("computed")[:num_requests],
    )


def _replay_batch(requests: Sequence[RunningRequest], buffers: StepBuffers) -> ReplayBatch:
    num_requests, device = len(requests), buffers.device
    return ReplayBatch(
        cu_tokens=device("cu_query")[: num_requests + 1],
        slots=device("live_slots")[:num_requests],
        buffers=device("draft_buffers")[:num_requests],
        folded=device("folded")[:num_requests],
        computed=device("computed")[:num_requests],
        max_tokens=max(request.scheduled for request in requests),
    )


def _prefill_batch(num_requests: int, num_chunks: int, buffers: StepBuffers) -> PrefillBatch:
    device = buffers.device
    return PrefillBatch(
        cu_seqlens=device("cu_seqlens")[: num_requests + 1],
        initial_slots=device("initial_slots")[:num_requests],
        final_slots=device("final_slots")[:num_requests],
        cu_chunks=device("cu_chunks")[: num_chunks + 1],
        chunk_requests=device("chunk_requests")[:num_chunks],
        chunk_slots=device("chunk_slots")[:num_chunks],
        cu_request_chunks=device("cu_request_chunks")[: num_requests + 1],
        longest_first=device("longest_first")[:num_requests],
        computed=device("prefill_computed")[:num_requests],
        block_size=buffers.limits.block_size,
    )


def _align_batch(num_requests: int, buffers: StepBuffers) -> AlignBatch:
    device = buffers.device
    return AlignBatch(
        computed=device("computed")[:num_requests],
        scheduled=device("scheduled")[:num_requests],
        drafts=device("num_drafts")[:num_requests],
        accepted=device("accepted")[:num_requests],
        columns=buffers.device_columns()[:num_requests],
        state_columns=device("state_columns")[:num_requests],
        targets=device("align_slots")[:num_requests],
    )
