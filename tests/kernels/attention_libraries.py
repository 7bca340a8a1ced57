"""Stand-ins for the attention libraries, with the libraries' signatures and the reference's results.

For machines without them; nothing here checks the libraries themselves.
"""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention import flashinfer as flashinfer_backend
from megatron_mamba_cache.kernels.attention.interface import AttentionRows
from megatron_mamba_cache.kernels.attention.kv_values import FP8
from megatron_mamba_cache.kernels.attention.reference import paged_attention_ref

IN_GRAPHS = False
"""True while calls are captured; host sizes are then maxima instead of the sizes of a step."""


def _is_size(given: int, needed: Tensor | int) -> bool:
    return bool(given >= needed if IN_GRAPHS else given == needed)


def _attend(q: Tensor, k: Tensor, v: Tensor, cu_query: Tensor, kv_lens: Tensor, table: Tensor, scale: float) -> Tensor:
    lengths = cu_query.diff().tolist()
    assert _is_size(q.shape[0], cu_query[-1])
    assert cu_query.dtype == kv_lens.dtype == table.dtype == torch.int32
    rows = AttentionRows(cu_query, kv_lens, table, tuple(lengths), tuple(kv_lens.tolist()), table.numpy())
    return paged_attention_ref(q, k, v, rows, scale)


def _attend_all(
    q: Tensor, k: Tensor, v: Tensor, cu_query: Tensor, kv_lens: Tensor, table: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return dense attention and the log2 of the softmax sums; 0 and -inf for queries without keys."""
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    for row, (start, stop) in enumerate(zip(cu_query[:-1].tolist(), cu_query[1:].tolist(), strict=True)):
        kv_len, num_tokens = int(kv_lens[row]), stop - start
        pages = table[row, : -(-kv_len // k.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:kv_len].repeat_interleave(q.shape[1] // k.shape[2], 1) for cache in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys.float()) * scale
        if is_causal:
            seen = torch.arange(kv_len) <= torch.arange(kv_len - num_tokens, kv_len)[:, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        sums = scores.logsumexp(-1) if kv_len else torch.full(scores.shape[:2], -torch.inf)
        weights = (scores - sums[..., None]).exp() if kv_len else scores
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype)
        lse[start:stop] = sums.T / np.log(2)
    return out, lse


def flash_attn_2() -> ModuleType:
    """Return a stand-in for flash_attn 2.8 with `flash_attn_varlen_func`."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        assert causal and _is_size(max_seqlen_q, cu_seqlens_q.diff().max())
        assert _is_size(max_seqlen_k, cu_seqlens_k.diff().max())
        return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale)

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def flash_attn_3() -> ModuleType:
    """Return a stand-in for flash_attn_interface with `flash_attn_with_kvcache`."""

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ):
        assert causal and _is_size(max_seqlen_q, cu_seqlens_q.diff().max())
        return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """Compute attention like `varlen_attn` in torch 2.13."""
    assert window_size == (-1, 0) and enable_gqa == (query.shape[1] != key.shape[2])
    assert _is_size(max_q, cu_seq_q.diff().max()) and _is_size(max_k, seqused_k.max())
    assert torch.equal(cu_seq_k.diff(), seqused_k)
    return _attend(query, key, value, cu_seq_q, seqused_k, block_table, scale)


class BatchPrefillWithPagedKVCacheWrapper:
    """Stand-in for FlashInfer's wrapper; `HAS_OFFSETS` is True if its "fa3" has a buffer of token offsets."""

    HAS_OFFSETS = True

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        *,
        backend="auto",
    ) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        assert all((buffer is not None and buffer.dtype == torch.int32) == use_cuda_graph for buffer in buffers)
        assert backend in ("fa2", "fa3")
        self._buffers = buffers if use_cuda_graph else None
        self._reads_plan = backend == "fa3"
        if backend == "fa3" and self.HAS_OFFSETS:
            self._vector_sparse_indices_buffer = torch.zeros(1, dtype=torch.int32)
        self._most_tokens = None

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self.plan_size = len(int_workspace_buffer)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        *,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
    ) -> None:
        assert q_data_type == kv_data_type or (kv_data_type is FP8 and not self._reads_plan)  # fa3 needs equal dtypes
        self._kv_dtype = kv_data_type
        self._is_causal = causal
        if self._buffers is not None:
            found = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            sizes = zip(map(len, found), map(len, self._buffers), strict=True)
            assert all(size == most or (index == 2 and size < most) for index, (size, most) in enumerate(sizes))
            self._most_tokens = self._most_tokens or int(qo_indptr[-1])
            assert qo_indptr[-1] <= self._most_tokens  # the first plan sets the maximum
            for values, buffer in zip(found, self._buffers, strict=True):
                buffer[: len(values)].copy_(values)
        num_pages = paged_kv_indptr.diff()
        table = np.full((len(num_pages), max(1, int(num_pages.max()))), 2**30, np.int32)
        for row, pages in enumerate(paged_kv_indices.split(num_pages.tolist())):
            table[row, : len(pages)] = pages
        self._table, self._cu_query, self._scale = torch.from_numpy(table), qo_indptr, sm_scale
        self._full_lens = (num_pages - 1).clamp_min(0) * page_size
        is_planned = self._buffers is None or self._reads_plan
        self._last_page_lens = paged_kv_last_page_len if is_planned else self._buffers[3]
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out, lse=None, return_lse=False) -> Tensor:
        k, v = paged_kv_cache
        assert k.dtype == v.dtype == self._kv_dtype
        if k.dtype is FP8:
            k, v = k.float() * k_scale, v.float() * v_scale
        assert self._heads == (q.shape[1], k.shape[2], k.shape[3], k.shape[1]) and return_lse == (lse is not None)
        planned = self._cu_query, self._full_lens + self._last_page_lens, self._table, self._scale
        if lse is None and self._is_causal:
            return out.copy_(_attend(q, k, v, *planned))
        attended, sums = _attend_all(q, k, v, *planned, self._is_causal)
        lse.copy_(sums)
        return out.copy_(attended)


def flashinfer() -> ModuleType:
    """Return a stand-in for the flashinfer package."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module


def put_libraries_in_place(patch: pytest.MonkeyPatch, num_multiprocessors: int = 132) -> None:
    """Install the stand-in libraries, and pretend that the GPU is a Hopper GPU."""
    for module in (flash_attn_2(), flash_attn_3(), flashinfer()):
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(flashinfer_backend, "num_multiprocessors", lambda device: num_multiprocessors)
    patch.setattr(flashinfer_backend, "is_hopper", lambda device: True)


def serve_with_flashinfer(patch: pytest.MonkeyPatch) -> None:
    """Let engines on a CPU use the FlashInfer backend in fp32; few multiprocessors make small prompts use "fa3"."""
    put_libraries_in_place(patch, num_multiprocessors=2)
    patch.setattr(sys.modules[__name__], "IN_GRAPHS", True)
    patch.setattr(flashinfer_backend.FlashInferAttention, "refusal", staticmethod(lambda shape: None))
