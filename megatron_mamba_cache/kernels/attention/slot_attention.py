"""Attention backend for FP8 keys and values without a library: `fp8_decode` for decodes, the reference for prompts."""

import torch
from torch import Tensor

from .fp8_decode import SlotAttention
from .interface import AttentionRows, AttentionShape, DeviceLengths, PlannedAttention, half_precision_refusal
from .kv_values import UNSCALED, KVScales
from .reference import paged_attention_ref, token_rows

_HEAD_DIMS = range(8, 257, 8)


class TritonAttention:
    """Backend that calls the kernels of `fp8_decode`, and `paged_attention_ref` for prompts."""

    name = setting = "triton"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""
        if not shape.has_fp8_kv:
            return "it only reads an FP8 KV cache; set --kv-cache-dtype to fp8"
        return half_precision_refusal(shape, _HEAD_DIMS)

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        return self.attention(rows, rows_after(rows, rows.num_decode_requests))

    def attention(self, rows: AttentionRows, prompts: AttentionRows) -> PlannedAttention:
        """Return the attention function for the decode requests of `rows`, and for `prompts`."""
        num_decode, shape = rows.num_decode_requests, self._shape
        num_tokens = sum(rows.query_lens[:num_decode])
        decodes = SlotAttention(shape, rows, num_decode) if num_tokens else None

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
            out = torch.empty_like(q)
            if decodes is not None:
                decodes.run(q, k_cache, v_cache, out, scales)
            out[num_tokens:] = paged_attention_ref(q[num_tokens:], k_cache, v_cache, prompts, shape.scale, scales)
            return out

        return attend

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> "CapturedTriton":
        """Return the attention to capture in a CUDA graph; requests in a replay must not be longer than in `rows`."""
        return CapturedTriton(self, rows)


class CapturedTriton(DeviceLengths):
    """`TritonAttention` inside a CUDA graph: each prompt token becomes a request that reads its length."""

    _backend: TritonAttention

    def begin(self) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        num_tokens = sum(self._rows.query_lens[: self._rows.num_decode_requests])
        return self._backend.attention(self._rows, rows_after(token_rows(self._rows), num_tokens))


def rows_after(rows: AttentionRows, first: int) -> AttentionRows:
    """Return the requests from `first` on; `cu_query` still counts all tokens."""
    return AttentionRows(
        cu_query=rows.cu_query[first:],
        kv_lengths=rows.kv_lengths[first:],
        block_table=rows.block_table[first:],
        query_lens=rows.query_lens[first:],
        kv_lens=rows.kv_lens[first:],
        host_block_table=rows.host_block_table[first:],
    )
