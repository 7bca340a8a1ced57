"""Attention by FlashInfer's prefill kernels over a paged cache, for decode, verify and prefill alike.

A step is attended in two calls: its decodes, then its prompts. "fa2" splits the cached tokens of a request over
multiprocessors, as requests with few query tokens need. All requests of a call have one tile size, though: a prompt
among decodes makes their tiles eight times too large, and prevents the split of its own tokens. "fa3" computes prompts
1.6 times as fast, but a program reads all cached tokens of 128 query tokens and a head, so it needs enough of them.
Before release 0.6 it has 32-bit offsets, in units of 16 bytes, and silently reads wrong blocks beyond 64 GiB; "fa2"
reads them. If there are such blocks, graphs of up to 1,024 prompt tokens use "fa2"; larger ones use "fa3", and are
skipped, if allowed, in steps whose prompts have such a block.

FlashInfer compiles for a model's shape at first use and keeps the result on disk. This happens when the backend is
built, with a log line, not at the first request. Graphs use more of FlashInfer than its documentation promises. That is
tested at start too: an incompatible release is skipped and does not stop a start that has loaded its weights.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from ..kernel_launches import is_hopper, num_multiprocessors
from ..progress import progress
from .flashinfer_calls import (
    ALL_ROWS,
    CapturedFlashInfer,
    CapturedPart,
    PagedAttention,
    attend_parts,
    page_lists,
    tokens_of,
)
from .flashinfer_compiler import scripts_in_path
from .interface import AttentionRows, AttentionShape, PlannedAttention, half_precision_refusal, is_installed

OLDEST = Version("0.5.3")
"""Oldest tested release."""

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_ALIGNMENT = 16
_PLAN_GRAIN = 64 * 2**10
_MOST_SHORT_QUERIES = 16  # query tokens of a decode or verify request
_FA3_TILE = 128  # query tokens of a program
_LEAST_LEFT_OUT = 1025  # prompt tokens of a step that a graph may leave out: with fewer, the host would take far longer
_FA3_BYTES = 2**32 * 16  # that "fa3" reads before release 0.6. Source: FlashInfer 0.5.3, hopper/block_sparse_gather.cuh
_FA3_READS_ALL = Version("0.6")


class FlashInferAttention:
    """`BatchPrefillWithPagedKVCacheWrapper`; its host plan of a step serves all layers.

    Args:
        kernel: "fa2" or "fa3" for all requests; None: "fa2" for decodes, the faster one for prompts that it can read.
    """

    name = setting = "flashinfer"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model, None if it can."""
        if not is_installed("flashinfer"):
            return "flashinfer is not installed; the extra gpu installs it"
        found = _release()
        if found is not None and found < OLDEST:
            return f"flashinfer {found} is older than {OLDEST}; the extra gpu installs a newer release"
        return half_precision_refusal(shape, _HEAD_DIMS)

    def __init__(self, shape: AttentionShape, kernel: str | None = None) -> None:
        self._shape = shape
        self._kernel = kernel
        workspace_bytes = max(_WORKSPACE_BYTES, parts_bytes(shape, num_rows=1, num_tokens=_FA3_TILE))
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=shape.device)
        self._graph_workspace = self._workspace  # until a graph needs more
        self._last_of_fa3 = last_block_of_fa3(shape, _release())
        message = "FlashInfer compiles attention kernels for this model, which it does once on a machine"
        with progress(message), scripts_in_path():
            prompt_kernel = kernel or ("fa3" if is_hopper(shape.device) else "fa2")
            self._decoding = PagedAttention(shape, _wrapper(self._workspace, kernel or "fa2"))
            self._prompts = PagedAttention(shape, _wrapper(self._workspace, prompt_kernel))
            self._far_prompts = self._prompts
            if prompt_kernel == "fa3" and self._last_of_fa3 is not None:
                self._far_prompts = PagedAttention(shape, _wrapper(self._workspace, "fa2"))
            self._try_out((kernel or "fa2", prompt_kernel))

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step on the host; needs exact `kv_lens`."""
        num_decode = rows.num_decode_requests
        if max(rows.query_lens[num_decode:], default=0) <= _MOST_SHORT_QUERIES:
            calls = [(self._decoding, ALL_ROWS)]
        else:
            calls = [(self._decoding, slice(num_decode)), (self._prompts, slice(num_decode, None))]
        parts = []
        for attention, part in calls:
            tokens = tokens_of(rows, part)
            if tokens.start < tokens.stop:
                pages = page_lists(rows, self._shape.block_size, part)
                last = self._last_of_fa3
                if attention is self._prompts and last is not None and pages.pages.max() > last:
                    attention = self._far_prompts
                attention.plan_pages(pages)
                parts.append((attention, tokens))
        num_tokens = sum(rows.query_lens)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            out = torch.empty_like(q)
            out[num_tokens:] = 0
            return attend_parts(parts, q, k_cache, v_cache, out)

        return attend

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> CapturedFlashInfer:
        """Prepare graphs for requests at most as long as these; the largest first, to share its memory."""
        both = slice(rows.num_decode_requests), slice(rows.num_decode_requests, None)
        parts = [part for part in both if rows.query_lens[part]]
        lengths = [rows.query_lens[part] for part in parts]
        of_prompts = self._prompt_kernel(sum(rows.query_lens[both[1]]), may_be_left_out)
        kernels = [self._kernel or ("fa2" if part.stop else of_prompts) for part in parts]
        needed = max(
            parts_bytes(self._shape, len(queries), sum(queries)) if kernel == "fa2" else 0
            for queries, kernel in zip(lengths, kernels, strict=True)
        )
        if self._graph_workspace.numel() < needed:
            self._graph_workspace = torch.zeros(needed, dtype=torch.uint8, device=self._shape.device)
        return CapturedFlashInfer(
            [self._capture_part(rows, part, kernel) for part, kernel in zip(parts, kernels, strict=True)],
            self._last_of_fa3 if "fa3" in kernels else None,
        )

    def _try_out(self, kernels: tuple[str, str]) -> None:
        """Run steps of one token, to compile all kernels and test what graphs need.

        Args:
            kernels: For decodes and for prompts.
        """
        shape = self._shape
        one = torch.ones(1, dtype=torch.int32, device=shape.device)
        table = torch.zeros(1, 1, dtype=torch.int32)
        rows = AttentionRows(
            torch.cat((one - 1, one)), one, table.to(shape.device), (1,), (1,), table.numpy(), last_block_lens=one
        )
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        cache = torch.zeros(1, shape.block_size, shape.num_kv_heads, shape.head_dim, **options)
        q = torch.zeros(1, shape.num_heads, shape.head_dim, **options)
        for attention in (self._decoding, self._prompts):
            attention.plan_pages(page_lists(rows, shape.block_size))
            attention.run(q, cache, cache, torch.empty_like(q))
        for kernel in kernels:
            part = self._capture_part(rows, slice(0, 1), kernel)
            part.plan_again(rows)
            part.attention.run(q, cache, cache, torch.empty_like(q))
        torch.cuda.synchronize(shape.device)

    def _prompt_kernel(self, num_tokens: int, may_be_left_out: bool) -> str:
        """Return the kernel for prompts of a captured step: "fa3" if its programs take half the multiprocessors."""
        shape = self._shape
        num_programs = -(-num_tokens // _FA3_TILE) * shape.num_heads
        reaches = self._last_of_fa3 is None or (may_be_left_out and num_tokens >= _LEAST_LEFT_OUT)
        suits_fa3 = is_hopper(shape.device) and num_programs > num_multiprocessors(shape.device) // 2
        return "fa3" if suits_fa3 and reaches else "fa2"

    def _capture_part(self, rows: AttentionRows, part: slice, kernel: str) -> CapturedPart:
        table = rows.block_table[part]
        sizes = {
            "qo_indptr_buf": len(table) + 1,
            "paged_kv_indptr_buf": len(table) + 1,
            "paged_kv_indices_buf": table.numel(),
        }
        workspace = self._graph_workspace
        assert rows.last_block_lens is not None
        # A plan writes what each step writes there before it.
        last_lens = {"paged_kv_last_page_len_buf": rows.last_block_lens[part]}
        with torch.inference_mode(False):  # else only inference mode could plan again
            buffers = {
                name: torch.zeros(size, dtype=torch.int32, device=workspace.device) for name, size in sizes.items()
            }
            wrapper = _wrapper(workspace, kernel, use_cuda_graph=True, **buffers, **last_lens)
            # A wrapper has 8 MiB for its plan, on the device and in pinned memory; there are dozens of graphs.
            num_bytes = plan_bytes(self._shape, len(table), sum(rows.query_lens[part]))
            wrapper.reset_workspace_buffer(
                workspace, torch.empty(num_bytes, dtype=torch.uint8, device=workspace.device)
            )
            sent_pages = torch.empty(table.numel(), dtype=torch.int32, pin_memory=workspace.is_cuda)
        if kernel == "fa3":
            self._prompts.lend_offsets(wrapper)
        attention = PagedAttention(self._shape, wrapper)
        pages = sent_pages, buffers["paged_kv_indices_buf"]
        return CapturedPart(attention, rows, part, self._shape.block_size, pages, reads_lengths=kernel == "fa2")


def last_block_of_fa3(shape: AttentionShape, release: Version | None) -> int | None:
    """Return the last block that "fa3" of a release reads, None if it reads all; an unknown release counts as old."""
    reads_all = release is not None and release >= _FA3_READS_ALL
    if reads_all or shape.num_blocks * shape.block_bytes_apart <= _FA3_BYTES:
        return None
    return _FA3_BYTES // shape.block_bytes_apart - 1


def parts_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of FlashInfer fa2's partial results inside a graph.

    They are float32 query tiles and their sums: as many as the requests have tiles, with a ragged one each, or as many
    as FlashInfer launches blocks, if that is more. Outside of a graph they are never more than the latter. Source:
    FlashInfer 0.5.3, scheduler.cuh.
    """
    tile, num_tiles = _query_tiles(shape, num_rows, num_tokens)
    return shape.num_heads * num_tiles * tile * (shape.head_dim + 1) * 4 + 2 * _ALIGNMENT


def plan_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return an upper bound of the bytes of FlashInfer's plan inside a graph.

    A plan of "fa2" has 13 bytes per query tile and 4 per request and query token, one of "fa3" 28 for each tile of 128
    query tokens and each head, and 4 per multiprocessor. Source: FlashInfer 0.5.3, scheduler.cuh.
    """
    fa2 = 13 * _query_tiles(shape, num_rows, num_tokens)[1] + 4 * (num_rows + num_tokens)
    fa3 = 28 * shape.num_heads * (-(-num_tokens // _FA3_TILE) + num_rows) + 4 * num_multiprocessors(shape.device)
    return (max(fa2, fa3) // _PLAN_GRAIN + 2) * _PLAN_GRAIN


def _query_tiles(shape: AttentionShape, num_rows: int, num_tokens: int) -> tuple[int, int]:
    """Return the query tokens of an fa2 tile, each with all heads of a group, and the most tiles of the requests."""
    group = shape.num_heads // shape.num_kv_heads
    longest = (num_tokens - num_rows + 1) * group
    tile = 128 if longest > 64 and shape.head_dim < 256 else 64 if longest > 16 else 16
    blocks_on_gpu = 2 * num_multiprocessors(shape.device)
    return tile, max(-(-num_tokens * group // tile) + num_rows - 1, blocks_on_gpu // shape.num_kv_heads)


def _wrapper(workspace: Tensor, kernel: str, **settings: Any) -> Any:
    build = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    setattr(import_module(build.__module__), "max", largest)  # noqa: B010 - a module has no such attribute yet
    return build(workspace, "NHD", backend=kernel, **settings)


def largest(*values: Any, **options: Any) -> Any:
    """Replace `max` in FlashInfer's planning: on a tensor the built-in takes about 3 µs per element."""
    if len(values) == 1 and isinstance(values[0], Tensor) and not options:
        return values[0].max()
    return max(*values, **options)


def _release() -> Version | None:
    """Return FlashInfer's release; None if unknown, as for builds from source."""
    try:
        found = Version(version("flashinfer-python"))
    except (PackageNotFoundError, InvalidVersion):
        return None
    return found if any(found.release) else None
