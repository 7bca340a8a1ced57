"""Attention backends for flash-attn 2 (flash_attn), flash-attn 3 (flash_attn_interface) and torch's varlen_attn."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import (
    AttentionRows,
    AttentionShape,
    DeviceLengths,
    PlannedAttention,
    attend_rows,
    half_precision_refusal,
    is_installed,
)
from .kv_values import UNSCALED, KVScales

_HEAD_DIMS = range(8, 257, 8)
_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (q, k_cache, v_cache); these libraries take no scales
_NO_FP8 = "it does not read an FP8 KV cache; install flashinfer, or set --kv-cache-dtype to auto"
PAGE_MULTIPLE = 256
"""Number of tokens of which flash-attn 2's page size must be a multiple."""


class _FlashAttention(ABC):
    """Base class for backends that call one library function on packed requests with a block table."""

    name: str
    setting: str

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._attention = self._function()

    @staticmethod
    @abstractmethod
    def _function() -> Callable[..., Tensor]:
        """Import and return the library's attention function."""

    @abstractmethod
    def _planned(self, rows: AttentionRows) -> _Attention:
        """Bind the library's function to the step's requests; the result takes queries without padding tokens."""

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        num_tokens, call = sum(rows.query_lens), self._planned(rows)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
            return attend_rows(q, num_tokens, lambda tokens: call(tokens, k_cache, v_cache))

        return attend

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> DeviceLengths:
        """Return the attention to capture in a CUDA graph; requests in a replay must not be longer than in `rows`."""
        return DeviceLengths(self, rows)


class FlashAttention3(_FlashAttention):
    """Backend that calls `flash_attn_with_kvcache` of flash-attn 3; it supports any page size."""

    name, setting = "flash-attn 3", "flash-attn"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""
        if shape.has_fp8_kv:
            return _NO_FP8
        if not is_installed("flash_attn_interface"):
            return "flash_attn_interface is not installed"
        reason = half_precision_refusal(shape, _HEAD_DIMS)
        if reason is None and torch.cuda.get_device_capability(shape.device)[0] != 9:
            return "it needs a Hopper GPU"
        return reason

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        return import_module("flash_attn_interface").flash_attn_with_kvcache

    def _planned(self, rows: AttentionRows) -> _Attention:
        return partial(
            self._attention,
            cache_seqlens=rows.kv_lengths,
            page_table=rows.block_table,
            cu_seqlens_q=rows.cu_query,
            max_seqlen_q=max(rows.query_lens, default=0),
            softmax_scale=self._shape.scale,
            causal=True,
        )


class FlashAttention2(_FlashAttention):
    """Backend that calls `flash_attn_varlen_func` of flash-attn 2 with a block table."""

    name, setting = "flash-attn 2", "flash-attn"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""
        if shape.has_fp8_kv:
            return _NO_FP8
        if not is_installed("flash_attn"):
            return "flash_attn is not installed"
        return half_precision_refusal(shape, _HEAD_DIMS) or page_refusal(shape)

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        return import_module("flash_attn").flash_attn_varlen_func

    def _planned(self, rows: AttentionRows) -> _Attention:
        return partial(
            self._attention,
            cu_seqlens_q=rows.cu_query,
            cu_seqlens_k=cumulative_lengths(rows),
            max_seqlen_q=max(rows.query_lens, default=0),
            max_seqlen_k=max(rows.kv_lens, default=0),
            softmax_scale=self._shape.scale,
            causal=True,
            block_table=rows.block_table,
        )


class TorchVarlenAttention(_FlashAttention):
    """Backend that calls `torch.nn.attention.varlen.varlen_attn` with a block table."""

    name = setting = "torch-varlen"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""
        if shape.has_fp8_kv:
            return _NO_FP8
        if _varlen_attn() is None:
            return "torch's varlen_attn is missing or has no block_table argument; install torch 2.13 or newer"
        return half_precision_refusal(shape, _HEAD_DIMS) or page_refusal(shape)

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        attention = _varlen_attn()
        if attention is None:
            raise ImportError(
                "torch's varlen_attn is missing or has no block_table argument; install torch 2.13 or newer"
            )
        return attention

    def _planned(self, rows: AttentionRows) -> _Attention:
        shape, cu_kv = self._shape, cumulative_lengths(rows)
        longest_query, longest_kv = max(rows.query_lens, default=0), max(rows.kv_lens, default=0)
        return lambda q, k_cache, v_cache: self._attention(
            q,
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
        )


def page_refusal(shape: AttentionShape) -> str | None:
    """Return why flash-attn 2's kernels do not support this block size, or None if they do."""
    if shape.block_size % PAGE_MULTIPLE:
        return f"the block size must be a multiple of {PAGE_MULTIPLE}, found {shape.block_size}"
    return None


def cumulative_lengths(rows: AttentionRows) -> Tensor:
    """Return the cumulative KV lengths, [requests + 1] int32; the first entry is 0."""
    return F.pad(rows.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's `varlen_attn`; None if it is missing or does not accept a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    return cast(Callable[..., Tensor], varlen_attn)  # returns a tuple only if `return_aux` is given
