"""Attention by FlashInfer's prefill kernels over a paged cache, for decode, verify and prefill alike.

A step is attended in two calls: its decodes, then its prompts. "fa2" splits the cached tokens of a request over
multiprocessors, as requests with few query tokens need. All requests of a call have one tile size, though: a prompt
among decodes makes their tiles eight times too large, and prevents the split of its own tokens. "fa3" computes prompts
1.6 times as fast, but a program reads all cached tokens of 128 query tokens and a head. With fewer programs than
multiprocessors, a graph attends the history of its prompts in pieces (`split_prompts`).
Before release 0.6 it has 32-bit offsets, in units of 16 bytes, and silently reads wrong blocks beyond 64 GiB; "fa2"
reads them. If there are such blocks, graphs of up to 1,024 prompt tokens use "fa2"; larger ones use "fa3", and are
skipped, if allowed, in steps whose prompts have such a block.

FlashInfer compiles for a model's shape at first use and keeps the result on disk. This happens when the backend is
built, with a log line. Graphs use more of FlashInfer than its documentation promises. That is tested at start too: an
incompatible release is skipped and does not stop a start that has loaded its weights.
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
    CapturedCall,
    CapturedFlashInfer,
    CapturedPart,
    PagedAttention,
    PlannedPart,
    attend_parts,
    page_lists,
    tokens_of,
)
from .flashinfer_compiler import scripts_in_path
from .interface import AttentionRows, AttentionShape, PlannedAttention, half_precision_refusal, is_installed
from .split_prompts import SplitPart

OLDEST = Version("0.5.3")
"""Oldest tested release."""

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_ALIGNMENT = 16
_PLAN_GRAIN = 64 * 2**10
_MOST_SHORT_QUERIES = 16  # query tokens of a decode or verify request
_FA3_TILE = 128  # query tokens of a program
_MOST_PIECES = 8
_CALL_COST, _PIECE_COST = 0.1, 0.0008  # of a wave, after 8,192 tokens; the second for each program of each piece
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
        of_prompts = self._num_pieces(sum(rows.query_lens[both[1]]), may_be_left_out)
        of_decodes = int(self._kernel == "fa3")
        parts = [(part, of_decodes if part.stop else of_prompts) for part in both if rows.query_lens[part]]
        lengths = [rows.query_lens[part] for part, pieces in parts if pieces == 0]
        needed = max((parts_bytes(self._shape, len(queries), sum(queries)) for queries in lengths), default=0)
        if self._graph_workspace.numel() < needed:
            self._graph_workspace = torch.zeros(needed, dtype=torch.uint8, device=self._shape.device)
        has_fa3 = any(pieces for _, pieces in parts)
        return CapturedFlashInfer(
            [self._capture_part(rows, part, pieces) for part, pieces in parts], self._last_of_fa3 if has_fa3 else None
        )

    def _try_out(self, kernels: tuple[str, str]) -> None:
        """Run steps of one token, to compile the kernels of decodes and prompts, and to test what graphs need."""
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
        all_pieces = [int(kernel == "fa3") for kernel in kernels]
        if kernels == ("fa2", "fa3"):
            all_pieces.append(2)
        for pieces in all_pieces:
            part = self._capture_part(rows, slice(0, 1), pieces)
            part.plan_again(rows)
            part.attention.run(q, cache, cache, torch.empty_like(q))
        torch.cuda.synchronize(shape.device)

    def _num_pieces(self, num_tokens: int, may_be_left_out: bool) -> int:
        """Return in how many pieces "fa3" attends the history of a captured step's prompts; 0 for "fa2" instead."""
        device = self._shape.device
        if self._kernel is not None:
            return int(self._kernel == "fa3")
        reaches = self._last_of_fa3 is None or (may_be_left_out and num_tokens >= _LEAST_LEFT_OUT)
        if not reaches or not is_hopper(device) or num_tokens <= _FA3_TILE:
            return 0
        return best_pieces(-(-num_tokens // _FA3_TILE) * self._shape.num_heads, num_multiprocessors(device))

    def _capture_part(self, rows: AttentionRows, part: slice, pieces: int) -> PlannedPart:
        num_rows, most_pages = rows.block_table[part].shape
        num_pages, num_tokens = num_rows * most_pages, sum(rows.query_lens[part])
        if pieces < 2:
            # A plan writes what each step writes there before it.
            assert rows.last_block_lens is not None
            kernel, last_lens = "fa3" if pieces else "fa2", rows.last_block_lens[part]
            call = self._captured_call(kernel, num_rows, num_tokens, num_pages, last_lens)
            return CapturedPart(call, rows, part, self._shape.block_size, reads_lengths=pieces == 0)
        num_rows += 1  # padding
        history = self._captured_call("fa3", pieces * num_rows, pieces * num_tokens, num_pages, is_causal=False)
        own = self._captured_call("fa3", num_rows, num_tokens, num_pages)
        return SplitPart(history, own, rows, part, self._shape.block_size, pieces)

    def _captured_call(
        self,
        kernel: str,
        num_rows: int,
        num_tokens: int,
        num_pages: int,
        last_lens: Tensor | None = None,
        *,
        is_causal: bool = True,
    ) -> CapturedCall:
        """Return a call whose plan is at fixed addresses.

        Args:
            last_lens: [requests] int32; where the plan writes the tokens in each last page; None: memory of its own.
        """
        workspace = self._graph_workspace
        sizes = {
            "qo_indptr_buf": num_rows + 1,
            "paged_kv_indptr_buf": num_rows + 1,
            "paged_kv_indices_buf": num_pages,
            "paged_kv_last_page_len_buf": num_rows,
        }
        with torch.inference_mode(False):  # else only inference mode could plan again
            buffers = {
                name: torch.zeros(size, dtype=torch.int32, device=workspace.device) for name, size in sizes.items()
            }
            if last_lens is not None:
                buffers["paged_kv_last_page_len_buf"] = last_lens
            wrapper = _wrapper(workspace, kernel, use_cuda_graph=True, **buffers)
            # A wrapper has 8 MiB for its plan, on the device and in pinned memory; there are dozens of graphs.
            num_bytes = plan_bytes(self._shape, num_rows, num_tokens)
            wrapper.reset_workspace_buffer(
                workspace, torch.empty(num_bytes, dtype=torch.uint8, device=workspace.device)
            )
            sent_pages = torch.empty(num_pages, dtype=torch.int32, pin_memory=workspace.is_cuda)
        if kernel == "fa3":
            self._prompts.lend_offsets(wrapper)
        attention = PagedAttention(self._shape, wrapper, is_causal=is_causal)
        return CapturedCall(attention, (sent_pages, buffers["paged_kv_indices_buf"]))


def best_pieces(num_programs: int, num_multiprocessors: int) -> int:
    """Return into how many pieces to cut the history of prompts whose queries make so many programs of "fa3".

    The estimate is of the waves of programs and of what pieces cost: a second call, and copies of queries and results.
    On an H200, 362 query tokens of 16 heads of 256 channels after 8,192 tokens take 253 us by "fa2", 282 by "fa3".
    """

    def waves(pieces: int) -> float:
        costs = 0.0 if pieces == 1 else _CALL_COST + _PIECE_COST * num_programs * pieces
        return -(-num_programs * pieces // num_multiprocessors) / pieces + costs

    return min(range(1, _MOST_PIECES + 1), key=waves)


def last_block_of_fa3(shape: AttentionShape, release: Version | None) -> int | None:
    """Return the last block that "fa3" reads, None if it reads all; an unknown release counts as old."""
    reads_all = release is not None and release >= _FA3_READS_ALL
    if reads_all or shape.num_blocks * shape.block_bytes_apart <= _FA3_BYTES:
        return None
    return _FA3_BYTES // shape.block_bytes_apart - 1


def parts_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes of FlashInfer fa2's partial results inside a graph: float32 query tiles and their sums.

    There are as many as the requests have tiles, with a ragged one each, or as FlashInfer launches blocks, if that is
    more; outside of a graph never more than the latter. Source: FlashInfer 0.5.3, scheduler.cuh.
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
