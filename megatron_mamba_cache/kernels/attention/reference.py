"""Attention by the torch twin: exact, for any shape, dtype and device, but slow."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .attention_rows import AttentionRows
from .interface import AttentionShape, PlannedAttention
from .reference_attention import paged_attention_ref


class ReferenceAttention:
    """`paged_attention_ref` as a backend."""

    name = setting = "reference"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return None: it serves any model."""
        return None

    def __init__(self, shape: AttentionShape) -> None:
        self._scale = shape.scale

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention call for each layer; there is nothing to prepare."""
        return partial(self._attend, rows)

    def _attend(self, rows: AttentionRows, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return paged_attention_ref(q, k_cache, v_cache, rows, self._scale)

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> "CapturedReference":
        """Prepare graphs whose rows are at most as long as these."""
        return CapturedReference(rows, self)


@dataclass(frozen=True, slots=True)
class CapturedReference:
    """The twin for rows whose lengths the host does not know: each token is its own row."""

    is_planned = False
    last_block = None

    rows: AttentionRows
    backend: ReferenceAttention

    def begin(self) -> PlannedAttention:
        """Return the attention call for each layer."""
        return self.backend.plan(token_rows(self.rows))

    def plan_again(self, rows: AttentionRows) -> None:
        """Do nothing."""


def token_rows(rows: AttentionRows) -> AttentionRows:
    """Return rows of one token each, one for every possible packed token, computed on the device.

    Args:
        rows: Host lengths are upper bounds. A packed token past the last row gets a row without cached tokens.
    """
    num_tokens = sum(rows.query_lens)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.cu_query.device)
    ends = rows.cu_query[1:]
    owners = torch.searchsorted(ends, tokens, right=True)
    is_owned = owners < ends.shape[0]
    owners = owners.clamp_max(ends.shape[0] - 1)
    seen = rows.kv_lengths[owners] - (ends[owners] - 1 - tokens)
    longest = max(rows.kv_lens, default=0)
    return AttentionRows(
        cu_query=torch.arange(num_tokens + 1, dtype=torch.int32, device=tokens.device),
        kv_lengths=torch.where(is_owned, seen, 0).to(torch.int32),
        block_table=rows.block_table[owners],
        query_lens=(1,) * num_tokens,
        kv_lens=(longest,) * num_tokens,
        host_block_table=rows.host_block_table,
    )
