"""Rows that own nothing, for steps that change nothing: their slots are PAD_SLOT, their block is read by nobody."""

import numpy as np

from ..kernels.varlen_rows import PAD_SLOT
from ..policy.block_hashing import BlockKeyChain
from ..policy.identifiers import BlockId, SlotId
from ..policy.requests import RequestSpec, ReservedState, RunningRequest, SamplingSettings
from ..state.padded_step import DecodeShape


def prefill_padding_row(num_tokens: int, dummy_block: BlockId) -> RunningRequest:
    """Return a row that prefills some tokens."""
    return _padding(RequestSpec(-1, np.zeros(num_tokens, np.int64), 2 + num_tokens, SamplingSettings()), dummy_block)


def decode_padding_row(num_drafts: int, dummy_block: BlockId) -> RunningRequest:
    """Return a row that decodes its first token, with a state reserved, so that the align copy is launched."""
    row = _padding(RequestSpec(-1, np.zeros(0, np.int64), 2, SamplingSettings()), dummy_block)
    row.scheduled, row.generated, row.drafts = 1 + num_drafts, [0], (0,) * num_drafts
    row.reserved = [ReservedState(0, SlotId(PAD_SLOT))]
    return row


def decode_padding(shape: DecodeShape, dummy_block: BlockId) -> list[RunningRequest]:
    """Return the rows of a whole step."""
    return [decode_padding_row(shape.width - 1, dummy_block) for _ in range(shape.num_rows)]


def _padding(spec: RequestSpec, dummy_block: BlockId) -> RunningRequest:
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), 1),
        epoch=-1,
        age=-1,
        live_slot=SlotId(PAD_SLOT),
        block_ids=[dummy_block],
        num_shared_blocks=0,
        computed=0,
        scheduled=spec.prompt_len,
    )
