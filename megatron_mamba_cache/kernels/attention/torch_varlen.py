"""Attention by torch's own flash kernel, from torch 2.13 on: `torch.nn.attention.varlen.varlen_attn`."""

import inspect
from collections.abc import Callable
from typing import cast

from torch import Tensor

from .attention_rows import AttentionRows
from .flash_attn import cumulative_lengths, page_refusal
from .interface import AttentionShape, DeviceLengths, PlannedAttention, attend_rows, half_precision_refusal

_HEAD_DIMS = range(8, 257, 8)


class TorchVarlenAttention:
    """`varlen_attn` with a block table."""

    name = setting = "torch-varlen"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if _varlen_attn() is None:
            return "this torch's varlen_attn reads no block table; torch 2.13's does"
        return half_precision_refusal(shape, _HEAD_DIMS) or page_refusal(shape)

    def __init__(self, shape: AttentionShape) -> None:
        attention = _varlen_attn()
        if attention is None:
            raise ImportError("torch 2.13 or newer is needed")
        self._attention = attention
        self._shape = shape

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention call for each layer."""
        num_tokens = sum(rows.query_lens)
        longest_query, longest_kv = max(rows.query_lens, default=0), max(rows.kv_lens, default=0)
        cu_kv = cumulative_lengths(rows)
        shape = self._shape

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return attend_rows(
                q,
                num_tokens,
                lambda tokens: self._attention(
                    tokens,
                    k_cache,
                    v_cache,
                    rows.cu_query,
                    cu_kv,
                    longest_query,
                    longest_kv,
                    scale=shape.scale,
                    window_size=(-1, 0),
                    enable_gqa=shape.num_heads != shape.num_kv_heads,
                    seqused_k=rows.kv_lengths,
                    block_table=rows.block_table,
                ),
            )

        return attend

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> DeviceLengths:
        """Prepare graphs whose rows are at most as long as these."""
        return DeviceLengths(self, rows)


def _varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's function; None if it reads no block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    return cast(Callable[..., Tensor], varlen_attn)  # it returns a tuple only with `return_aux`
