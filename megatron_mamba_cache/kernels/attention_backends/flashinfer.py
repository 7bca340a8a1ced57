"""Attention by FlashInfer's prefill kernels over a paged cache, which serve decode, verify and prefill rows alike.

FlashInfer compiles for a model's shape at first use and keeps the result on disk. Building the backend does that, with
a line that says so, rather than the first request.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..progress import progress
from .interface import AttentionShape, PlannedAttention, attend_rows, half_precision_refusal, is_installed

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`; its host plan of a step serves all layers.

    Args:
        kernel: "fa2" or "fa3"; "auto" lets FlashInfer choose.
    """

    name = setting = "flashinfer"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if not is_installed("flashinfer"):
            return "flashinfer is not installed"
        return half_precision_refusal(shape, _HEAD_DIMS)

    def __init__(self, shape: AttentionShape, kernel: str = "auto") -> None:
        self._shape = shape
        with progress("FlashInfer compiles attention kernels for this model, which it does once on a machine"):
            self._wrapper: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
                torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device), "NHD", backend=kernel
            )
            self._try_out()

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step on the host; needs exact `kv_lens`."""
        shape, num_tokens = self._shape, sum(rows.query_lens)
        if num_tokens:
            pages = page_lists(rows, shape.block_size)
            self._wrapper.plan(
                qo_indptr=pages.cu_query,
                paged_kv_indptr=pages.cu_pages,
                paged_kv_indices=pages.pages,
                paged_kv_last_page_len=pages.last_page_lens,
                num_qo_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim_qk=shape.head_dim,
                page_size=shape.block_size,
                causal=True,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return attend_rows(q, num_tokens, lambda tokens: self._wrapper.run(tokens.contiguous(), (k_cache, v_cache)))

        return attend

    def _try_out(self) -> None:
        """Compile all that a step needs, by a step of one token."""
        shape = self._shape
        one = torch.ones(1, dtype=torch.int32, device=shape.device)
        table = torch.zeros(1, 1, dtype=torch.int32)
        rows = AttentionRows(torch.cat((one - 1, one)), one, table.to(shape.device), (1,), (1,), table.numpy())
        options = {"dtype": shape.dtype, "device": shape.device}
        cache = torch.zeros(1, shape.block_size, shape.num_kv_heads, shape.head_dim, **options)
        self.plan(rows)(torch.zeros(1, shape.num_heads, shape.head_dim, **options), cache, cache)
        torch.cuda.synchronize(shape.device)


@dataclass(frozen=True, slots=True)
class PageLists:
    """The rows that have query tokens, as FlashInfer's plan reads them; all int32 on the host.

    Args:
        cu_query: [rows + 1]; first packed query token of each row.
        cu_pages: [rows + 1]; where each row's pages begin in `pages`.
        last_page_lens: [rows]; tokens in each row's last page.
    """

    cu_query: Tensor
    cu_pages: Tensor
    pages: Tensor
    last_page_lens: Tensor


def page_lists(rows: AttentionRows, block_size: int) -> PageLists:
    """Return the pages of a step's rows, leaving out rows without query tokens."""
    query_lens, kv_lens = np.array(rows.query_lens, np.int32), np.array(rows.kv_lens, np.int32)
    used = query_lens > 0
    query_lens, kv_lens, table = query_lens[used], kv_lens[used], rows.host_block_table[used]
    num_pages = -(-kv_lens // block_size)
    held = np.arange(table.shape[1]) < num_pages[:, None]
    return PageLists(
        cu_query=_cumulative(query_lens),
        cu_pages=_cumulative(num_pages),
        pages=torch.from_numpy(table[held]),
        last_page_lens=torch.from_numpy(kv_lens - (num_pages - 1) * block_size),
    )


def _cumulative(lengths: npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
