"""Attention by FlashInfer's prefill kernels over a paged cache, which serve decode, verify and prefill rows alike.

FlashInfer compiles for a model's shape at first use and keeps the result on disk. This happens when the backend is
built, with a log line, not at the first request.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernel_launches import num_multiprocessors
from ..progress import progress
from .attention_rows import AttentionRows
from .interface import AttentionShape, PlannedAttention, attend_rows, half_precision_refusal, is_installed

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_ALIGNMENT = 16
_MOST_SHORT_QUERIES = 16  # query tokens of a decode or verify row


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`; its host plan of a step serves all layers.

    Decode and verify rows go to "fa2", which spreads the cached tokens of a row over the GPU; "fa3" does not.

    Args:
        kernel: "fa2" or "fa3" for all steps; None lets FlashInfer choose one for prefill.
    """

    name = setting = "flashinfer"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if not is_installed("flashinfer"):
            return "flashinfer is not installed"
        return half_precision_refusal(shape, _HEAD_DIMS)

    def __init__(self, shape: AttentionShape, kernel: str | None = None) -> None:
        self._shape = shape
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        self._graph_workspace: Tensor | None = None
        with progress("FlashInfer compiles attention kernels for this model, which it does once on a machine"):
            short, long = (kernel, kernel) if kernel else ("fa2", "auto")
            self._short = PagedAttention(shape, _wrapper(self._workspace, short))
            self._long = self._short if short == long else PagedAttention(shape, _wrapper(self._workspace, long))
            for attention in (self._short, self._long):
                _try_out(attention, shape)

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step on the host; needs exact `kv_lens`."""
        longest = max(rows.query_lens, default=0)
        return (self._short if longest <= _MOST_SHORT_QUERIES else self._long).plan(rows)

    def capture(self, rows: AttentionRows) -> "CapturedFlashInfer":
        """Prepare graphs whose rows are at most as long as these; prepare the largest first, to share its memory."""
        needed = parts_bytes(self._shape, len(rows.query_lens), sum(rows.query_lens))
        if self._graph_workspace is None or self._graph_workspace.numel() < needed:
            self._graph_workspace = torch.zeros(needed, dtype=torch.uint8, device=self._shape.device)
        return CapturedFlashInfer(self._shape, self._graph_workspace, rows)


class PagedAttention:
    """A FlashInfer wrapper."""

    def __init__(self, shape: AttentionShape, wrapper: Any) -> None:
        self._shape = shape
        self._wrapper = wrapper

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step's rows that have query tokens."""
        num_tokens = sum(rows.query_lens)
        if num_tokens:
            self.plan_pages(page_lists(rows, self._shape.block_size))

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return attend_rows(q, num_tokens, lambda tokens: self.run(tokens, k_cache, v_cache))

        return attend

    def plan_pages(self, pages: "PageLists") -> None:
        """Plan on the host which thread blocks read which pages."""
        shape = self._shape
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

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attend the planned tokens of a layer."""
        attended: Tensor = self._wrapper.run(q.contiguous(), (k_cache, v_cache))
        return attended


class CapturedFlashInfer:
    """A wrapper whose plan is at fixed addresses; graphs of several shapes share the workspace, one after another."""

    def __init__(self, shape: AttentionShape, workspace: Tensor, rows: AttentionRows) -> None:
        num_rows, num_blocks = rows.block_table.shape
        sizes = {
            "qo_indptr_buf": num_rows + 1,
            "paged_kv_indptr_buf": num_rows + 1,
            "paged_kv_indices_buf": num_rows * num_blocks,
            "paged_kv_last_page_len_buf": num_rows,
        }
        with torch.inference_mode(False):  # else only inference mode could plan again
            device = workspace.device
            buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
            wrapper = _wrapper(workspace, "fa2", use_cuda_graph=True, **buffers)
        self._attention = PagedAttention(shape, wrapper)
        self._block_size = shape.block_size
        self._kv_lengths = rows.kv_lengths
        self._last_page_lens = buffers["paged_kv_last_page_len_buf"]
        self._planned: PageLists | None = None
        self.plan_again(rows)  # the first plan is the largest that the wrapper accepts

    def begin(self) -> PlannedAttention:
        """Return the attention call for each layer; the device computes last-page lengths at each replay."""
        lengths = self._kv_lengths
        self._last_page_lens.copy_(torch.where(lengths > 0, (lengths - 1) % self._block_size + 1, 0))
        return self._attention.run

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; needs exact lengths, and as many rows as before."""
        pages, planned = page_lists(rows, self._block_size, keep_all=True), self._planned
        if planned is not None and pages.has_pages_of(planned):
            return
        self._planned = None  # in case planning fails
        self._attention.plan_pages(pages)
        self._planned = pages


def parts_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes that FlashInfer's fa2 needs for the partial results of rows inside a graph.

    They are float32 query tiles and their sums: as many as the rows have tiles, with a ragged one each, or as many as
    FlashInfer launches blocks, if that is more. Source: FlashInfer 0.5.3, scheduler.cuh.
    """
    group = shape.num_heads // shape.num_kv_heads
    longest = (num_tokens - num_rows + 1) * group
    tile = 128 if longest > 64 else 64 if longest > 16 else 16
    blocks_on_gpu = 2 * num_multiprocessors(shape.device)
    num_tiles = max(-(-num_tokens * group // tile) + num_rows - 1, blocks_on_gpu // shape.num_kv_heads)
    return shape.num_heads * num_tiles * tile * (shape.head_dim + 1) * 4 + 2 * _ALIGNMENT


def _wrapper(workspace: Tensor, kernel: str, **settings: Any) -> Any:
    build = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    setattr(import_module(build.__module__), "max", largest)  # noqa: B010 - a module has no such attribute yet
    return build(workspace, "NHD", backend=kernel, **settings)


def largest(*values: Any, **options: Any) -> Any:
    """Replace `max` where FlashInfer plans: on a tensor the built-in takes about 3 µs an element."""
    if len(values) == 1 and isinstance(values[0], Tensor) and not options:
        return values[0].max()
    return max(*values, **options)


def _try_out(attention: PagedAttention, shape: AttentionShape) -> None:
    """Compile all that a step needs by running a step of one token."""
    one = torch.ones(1, dtype=torch.int32, device=shape.device)
    table = torch.zeros(1, 1, dtype=torch.int32)
    rows = AttentionRows(torch.cat((one - 1, one)), one, table.to(shape.device), (1,), (1,), table.numpy())
    options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    cache = torch.zeros(1, shape.block_size, shape.num_kv_heads, shape.head_dim, **options)
    attention.plan(rows)(torch.zeros(1, shape.num_heads, shape.head_dim, **options), cache, cache)
    torch.cuda.synchronize(shape.device)


@dataclass(frozen=True, slots=True)
class PageLists:
    """Rows as FlashInfer's plan reads them; all int32 on the host.

    Args:
        cu_query: [rows + 1]; first packed query token of each row.
        cu_pages: [rows + 1]; where each row's pages begin in `pages`.
        last_page_lens: [rows]; tokens in each row's last page.
    """

    cu_query: Tensor
    cu_pages: Tensor
    pages: Tensor
    last_page_lens: Tensor

    def has_pages_of(self, other: "PageLists") -> bool:
        """Return whether the same rows have the same pages; they may fill them further than the other's."""
        return all(
            mine.equal(theirs)
            for mine, theirs in (
                (self.cu_query, other.cu_query),
                (self.cu_pages, other.cu_pages),
                (self.pages, other.pages),
            )
        )


def page_lists(rows: AttentionRows, block_size: int, *, keep_all: bool = False) -> PageLists:
    """Return the pages of a step's rows; rows without query tokens are left out unless `keep_all`."""
    query_lens, kv_lens = np.array(rows.query_lens, np.int32), np.array(rows.kv_lens, np.int32)
    table = rows.host_block_table
    if not keep_all:
        used = query_lens > 0
        query_lens, kv_lens, table = query_lens[used], kv_lens[used], table[used]
    num_pages = -(-kv_lens // block_size)
    held = np.arange(table.shape[1]) < num_pages[:, None]
    return PageLists(
        cu_query=_cumulative(query_lens),
        cu_pages=_cumulative(num_pages),
        pages=torch.from_numpy(table[held]),
        last_page_lens=torch.from_numpy(kv_lens - np.maximum(num_pages - 1, 0) * block_size),
    )


def _cumulative(lengths: npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
