"""Padding rows, which own nothing and change nothing: their slots are PAD_SLOT, their only block is the dummy."""

import numpy as np

from ..policy.block_hashing import BlockKeyChain
from ..policy.identifiers import BlockId, SlotId
from ..policy.request_settings import RequestSpec, SamplingSettings
from ..policy.requests import ReservedState, RunningRequest, StateCursor
from ..recurrences.rows import PAD_SLOT

_GREEDY = SamplingSettings(top_k=1)


def prefill_padding_row(num_tokens: int, dummy_block: BlockId) -> RunningRequest:
    """Return a row that prefills `num_tokens` tokens, 0 or more; its prompt has at least one."""
    row = _row(RequestSpec(-1, np.zeros(max(1, num_tokens), np.int64), 2 + num_tokens, _GREEDY), dummy_block)
    row.schedule(num_tokens)
    return row


def decode_padding_row(num_tokens: int, dummy_block: BlockId) -> RunningRequest:
    """Return a row that decodes a token and `num_tokens` - 1 drafts, with a state reserved; or one without tokens."""
    row = _row(RequestSpec(-1, np.zeros(0, np.int64), 2, _GREEDY), dummy_block)
    if num_tokens:
        row.append([0])
        row.schedule(num_tokens, (0,) * (num_tokens - 1))
        row.reserve(ReservedState(0, SlotId(PAD_SLOT)))
    return row


def _row(spec: RequestSpec, dummy_block: BlockId) -> RunningRequest:
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), 1),
        epoch=-1,
        age=-1,
        cursor=StateCursor(SlotId(PAD_SLOT)),
        block_ids=[dummy_block],
        num_shared_blocks=0,
        computed=0,
    )
