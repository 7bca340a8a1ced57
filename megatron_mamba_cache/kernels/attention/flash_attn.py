"""Attention by flash-attn 2 and 3 (flash_attn, flash_attn_interface), and by torch's own flash kernel from 2.13 on."""

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

_HEAD_DIMS = range(8, 257, 8)
PAGE_MULTIPLE = 256
"""flash-attn 2's page size is a multiple of this many tokens."""


class _FlashAttention(ABC):
    """A flash kernel over packed requests with a block table."""

    name: str
    setting: str

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._attention = self._function()

    @staticmethod
    @abstractmethod
    def _function() -> Callable[..., Tensor]:
        """Return the library's function."""

    @abstractmethod
    def _planned(self, rows: AttentionRows) -> PlannedAttention:
        """Return the function for a step's requests; its queries contain no padding."""

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention call for each layer."""
        num_tokens, call = sum(rows.query_lens), self._planned(rows)
        return lambda q, k_cache, v_cache: attend_rows(q, num_tokens, lambda tokens: call(tokens, k_cache, v_cache))

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> DeviceLengths:
        """Prepare graphs for requests at most as long as these."""
        return DeviceLengths(self, rows)


class FlashAttention3(_FlashAttention):
    """`flash_attn_with_kvcache` of flash-attn 3; pages of any size."""

    name, setting = "flash-attn 3", "flash-attn"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if not is_installed("flash_attn_interface"):
            return "flash_attn_interface is not installed"
        reason = half_precision_refusal(shape, _HEAD_DIMS)
        if reason is None and torch.cuda.get_device_capability(shape.device)[0] != 9:
            return "it needs a Hopper GPU"
        return reason

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        return import_module("flash_attn_interface").flash_attn_with_kvcache

    def _planned(self, rows: AttentionRows) -> PlannedAttention:
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
    """`flash_attn_varlen_func` of flash-attn 2 with a block table."""

    name, setting = "flash-attn 2", "flash-attn"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if not is_installed("flash_attn"):
            return "flash_attn is not installed"
        return half_precision_refusal(shape, _HEAD_DIMS) or page_refusal(shape)

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        return import_module("flash_attn").flash_attn_varlen_func

    def _planned(self, rows: AttentionRows) -> PlannedAttention:
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
    """`torch.nn.attention.varlen.varlen_attn` with a block table."""

    name = setting = "torch-varlen"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if _varlen_attn() is None:
            return "this torch's varlen_attn reads no block table; torch 2.13's does"
        return half_precision_refusal(shape, _HEAD_DIMS) or page_refusal(shape)

    @staticmethod
    def _function() -> Callable[..., Tensor]:
        attention = _varlen_attn()
        if attention is None:
            raise ImportError("torch 2.13 or newer is needed")
        return attention

    def _planned(self, rows: AttentionRows) -> PlannedAttention:
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
    """Return why flash-attn 2's kernels cannot read KV blocks of this size, None if they can."""
    if shape.block_size % PAGE_MULTIPLE:
        return f"it needs a block size that is a multiple of {PAGE_MULTIPLE}, found {shape.block_size}"
    return None


def cumulative_lengths(rows: AttentionRows) -> Tensor:
    """Return [requests + 1] int32: the starts of the cached tokens if they were packed."""
    return F.pad(rows.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _varlen_attn() -> Callable[..., Tensor] | None:
    """Return torch's function; None if it reads no block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    return cast(Callable[..., Tensor], varlen_attn)  # it returns a tuple only with `return_aux`
