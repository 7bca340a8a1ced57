"""Attention by FlashInfer's prefill kernels over a paged cache, which serve decode, verify and prefill rows alike.

A step is attended in two calls: its decode rows, then its prompts. "fa2" divides a row's cached tokens among
multiprocessors, as rows of few query tokens need. All rows of a call have one tile size, though: a prompt among decode
rows makes their tiles eight times too large, and leaves none for dividing its own tokens. "fa3" computes prompts 1.6
times as fast, but a program reads all cached tokens of 128 query tokens and a head, so that it needs enough of them. It
counts the way from the first block in 32 bits, of 16 bytes each, and would read others for those beyond 64 GiB without
a word; "fa2" reads them.

FlashInfer compiles for a model's shape at first use and keeps the result on disk. This happens when the backend is
built, with a log line, not at the first request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..kernel_launches import is_hopper, num_multiprocessors
from ..progress import progress
from .attention_rows import AttentionRows
from .interface import AttentionShape, PlannedAttention, half_precision_refusal, is_installed
from .page_lists import ALL_ROWS, PageLists, page_lists

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_ALIGNMENT = 16
_MOST_SHORT_QUERIES = 16  # query tokens of a decode or verify row
_FA3_TILE = 128  # query tokens of a program
_FA3_BYTES = 2**32 * 16  # Source: FlashInfer 0.5.3, hopper/block_sparse_gather.cuh


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`; its host plan of a step serves all layers.

    Args:
        kernel: "fa2" or "fa3" for all rows; None: "fa2" for decode rows, the faster one for prompts that it can read.
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
        self._kernel = kernel
        workspace_bytes = max(_WORKSPACE_BYTES, parts_bytes(shape, num_rows=1, num_tokens=_FA3_TILE))
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=shape.device)
        self._graph_workspace: Tensor | None = None
        with progress("FlashInfer compiles attention kernels for this model, which it does once on a machine"):
            prompt_kernel = kernel or ("fa3" if is_hopper(shape.device) else "fa2")
            self._decoding = PagedAttention(shape, _wrapper(self._workspace, kernel or "fa2"))
            self._prompts = PagedAttention(shape, _wrapper(self._workspace, prompt_kernel))
            self._far_prompts = self._prompts
            if prompt_kernel == "fa3" and is_beyond_fa3(shape, shape.num_blocks - 1):
                self._far_prompts = PagedAttention(shape, _wrapper(self._workspace, "fa2"))
            for attention in (self._decoding, self._prompts):
                _try_out(attention, shape)

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step on the host; needs exact `kv_lens`."""
        num_decode = rows.num_decode_rows
        if max(rows.query_lens[num_decode:], default=0) <= _MOST_SHORT_QUERIES:
            calls = [(self._decoding, ALL_ROWS)]
        else:
            calls = [(self._decoding, slice(num_decode)), (self._prompts, slice(num_decode, None))]
        parts = []
        for attention, part in calls:
            tokens = _tokens_of(rows, part)
            if tokens.start < tokens.stop:
                pages = page_lists(rows, self._shape.block_size, part)
                if attention is self._prompts and is_beyond_fa3(self._shape, int(pages.pages.max())):
                    attention = self._far_prompts
                attention.plan_pages(pages)
                parts.append((attention, tokens))
        num_tokens = sum(rows.query_lens)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            out = torch.empty_like(q)
            out[num_tokens:] = 0
            return _attend_parts(parts, q, k_cache, v_cache, out)

        return attend

    def capture(self, rows: AttentionRows) -> "CapturedFlashInfer":
        """Prepare graphs whose rows are at most as long as these; prepare the largest first, to share its memory."""
        both = slice(rows.num_decode_rows), slice(rows.num_decode_rows, None)
        parts = [part for part in both if rows.query_lens[part]]
        lengths = [rows.query_lens[part] for part in parts]
        needed = max(parts_bytes(self._shape, len(queries), sum(queries)) for queries in lengths)
        if self._graph_workspace is None or self._graph_workspace.numel() < needed:
            self._graph_workspace = torch.zeros(needed, dtype=torch.uint8, device=self._shape.device)
        kernels = ["fa2" if part.stop else self._prompt_kernel(sum(rows.query_lens[part])) for part in parts]
        return CapturedFlashInfer(
            [self._capture_part(rows, part, kernel) for part, kernel in zip(parts, kernels, strict=True)]
        )

    def _prompt_kernel(self, num_tokens: int) -> str:
        """Return the kernel for prompts of a captured step: "fa3" if its programs take half the multiprocessors."""
        shape = self._shape
        num_programs = -(-num_tokens // _FA3_TILE) * shape.num_heads
        can_fa3 = is_hopper(shape.device) and not is_beyond_fa3(shape, shape.num_blocks - 1)
        suits_fa3 = can_fa3 and num_programs > num_multiprocessors(shape.device) // 2
        return "fa3" if suits_fa3 else "fa2"

    def _capture_part(self, rows: AttentionRows, part: slice, kernel: str) -> "CapturedPart":
        table = rows.block_table[part]
        sizes = {
            "qo_indptr_buf": len(table) + 1,
            "paged_kv_indptr_buf": len(table) + 1,
            "paged_kv_indices_buf": table.numel(),
            "paged_kv_last_page_len_buf": len(table),
        }
        workspace, kernel = self._graph_workspace, self._kernel or kernel
        assert workspace is not None
        with torch.inference_mode(False):  # else only inference mode could plan again
            buffers = {
                name: torch.zeros(size, dtype=torch.int32, device=workspace.device) for name, size in sizes.items()
            }
            wrapper = _wrapper(workspace, kernel, use_cuda_graph=True, **buffers)
        if kernel == "fa3":
            self._prompts.lend_offsets(wrapper)
        attention = PagedAttention(self._shape, wrapper)
        last_page_lens = buffers["paged_kv_last_page_len_buf"] if kernel == "fa2" else None
        return CapturedPart(attention, rows, part, self._shape.block_size, last_page_lens)


class PagedAttention:
    """A FlashInfer wrapper."""

    def __init__(self, shape: AttentionShape, wrapper: Any) -> None:
        self._shape = shape
        self._wrapper = wrapper

    def plan_pages(self, pages: PageLists) -> None:
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

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Attend the planned tokens of a layer."""
        self._wrapper.run(q.contiguous(), (k_cache, v_cache), out=out)

    def lend_offsets(self, wrapper: Any) -> None:
        """Let another wrapper of "fa3" use this one's 64 MiB for the places of cached tokens, written by each run."""
        wrapper._vector_sparse_indices_buffer = self._wrapper._vector_sparse_indices_buffer


class CapturedPart:
    """A wrapper whose plan is at fixed addresses; graphs of several shapes share the workspace, one after another.

    Args:
        rows: The longest rows of a step.
        part: Those of them that the wrapper attends.
        last_page_lens: [rows of the part]; where the kernel reads how full last pages are, None if it reads the plan.
    """

    def __init__(
        self,
        attention: PagedAttention,
        rows: AttentionRows,
        part: slice,
        block_size: int,
        last_page_lens: Tensor | None,
    ) -> None:
        self.attention = attention
        self.tokens = _tokens_of(rows, part)
        self._part = part
        self._block_size = block_size
        self._kv_lengths = rows.kv_lengths[part]
        self._last_page_lens = last_page_lens
        self._planned: PageLists | None = None
        self._was_sent = torch.cuda.Event()
        self.plan_again(rows)  # the first plan is the largest that the wrapper accepts

    def begin(self) -> None:
        """Let the device compute last-page lengths at each replay."""
        if self._last_page_lens is not None:
            # Of a row without tokens, which has no pages, it does not matter.
            torch.sub(self._kv_lengths, 1, out=self._last_page_lens).remainder_(self._block_size).add_(1)

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; needs exact lengths, and as many rows as before."""
        pages, planned = page_lists(rows, self._block_size, self._part, keep_all=True), self._planned
        if planned is not None and self._last_page_lens is not None and pages.has_pages_of(planned):
            return
        self._planned = None  # in case planning fails
        self._was_sent.synchronize()  # the plan before is on its way from memory that this one overwrites
        self.attention.plan_pages(pages)
        self._was_sent.record()
        self._planned = pages


@dataclass(frozen=True, slots=True)
class CapturedFlashInfer:
    """The calls of a captured step."""

    parts: Sequence[CapturedPart]

    def begin(self) -> PlannedAttention:
        """Return the attention call for each layer."""
        for part in self.parts:
            part.begin()
        calls = [(part.attention, part.tokens) for part in self.parts]
        return lambda q, k_cache, v_cache: _attend_parts(calls, q, k_cache, v_cache, torch.empty_like(q))

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; needs exact lengths, and as many rows as before."""
        for part in self.parts:
            part.plan_again(rows)


def _tokens_of(rows: AttentionRows, part: slice) -> slice:
    """Return the packed query tokens of some rows."""
    first = sum(rows.query_lens[: part.start or 0])
    return slice(first, first + sum(rows.query_lens[part]))


def _attend_parts(
    parts: Sequence[tuple[PagedAttention, slice]], q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor
) -> Tensor:
    """Attend each part's tokens into `out`, and return it."""
    for attention, tokens in parts:
        attention.run(q[tokens], k_cache, v_cache, out[tokens])
    return out


def is_beyond_fa3(shape: AttentionShape, block: int) -> bool:
    """Return whether a block lies too far from the first one for "fa3" to read it."""
    return (block + 1) * shape.block_bytes_apart > _FA3_BYTES


def parts_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes that FlashInfer's fa2 needs for the partial results of rows inside a graph.

    They are float32 query tiles and their sums: as many as the rows have tiles, with a ragged one each, or as many as
    FlashInfer launches blocks, if that is more. Outside of a graph they are never more than the latter. Source:
    FlashInfer 0.5.3, scheduler.cuh.
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
    q = torch.zeros(1, shape.num_heads, shape.head_dim, **options)
    attention.plan_pages(page_lists(rows, shape.block_size))
    attention.run(q, cache, cache, torch.empty_like(q))
    torch.cuda.synchronize(shape.device)
