"""Attention backend that uses FlashInfer's paged prefill kernels for decode, verify and prefill requests.

A step makes one call for its decode requests and one for its prompts. The kernel "fa2" splits a request's KV over
several multiprocessors, so that requests with few query tokens use the whole GPU. But all requests in a call share one
tile size: a prompt in the decode call would make the tiles eight times too large and would disable the split. The
kernel "fa3" is 1.6 times as fast as "fa2" for prompts, but each of its programs reads the whole KV for 128 query tokens
and one head. If that leaves multiprocessors idle, CUDA graphs split the prompts' history into pieces (`split_prompts`).
With an FP8 KV cache, prompts also use "fa2", because "fa3" does not support 16-bit queries with FP8 keys and values.
On Hopper, requests that decode with up to 32 queries per KV head then use `fp8_decode`: "fa2" converts codes slowly.

In FlashInfer releases before 0.6, "fa3" has 32-bit offsets in units of 16 bytes. For KV blocks beyond 64 GiB it
therefore silently reads wrong data; "fa2" does not. If the cache has such blocks, graphs of up to 1,024 prompt tokens
use "fa2". Larger graphs use "fa3"; if `may_be_left_out` allows it, steps with prompts in such blocks run eagerly.

FlashInfer compiles its kernels for a model's shape at first use and caches them on disk. The backend compiles them when
it is built, and logs it. Graphs depend on undocumented behavior of FlashInfer, which the backend also tests when it is
built. If the installed release is incompatible, the constructor raises, and `choose_attention` tries the next backend.
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
    PartAttention,
    PlannedPart,
    attend_parts,
    page_lists,
    tokens_of,
)
from .flashinfer_compiler import scripts_in_path
from .fp8_decode import SlotAttention, SlotPart, has_few_queries, runs_on_hopper
from .interface import AttentionRows, AttentionShape, PlannedAttention, half_precision_refusal, is_installed
from .kv_values import UNSCALED, KVScales
from .split_prompts import SplitPart, best_pieces

OLDEST = Version("0.5.3")
"""Oldest FlashInfer release that is tested."""

_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20
_ALIGNMENT = 16
_PLAN_GRAIN = 64 * 2**10
_MOST_SHORT_QUERIES = 16  # maximum number of query tokens for a request in the decode call
_FA3_TILE = 128  # number of query tokens per "fa3" program
_LEAST_LEFT_OUT = 1025  # minimum prompt tokens to skip a graph; with fewer, eager mode is much slower
_FA3_BYTES = 2**32 * 16  # bytes that "fa3" can address before 0.6; see FlashInfer 0.5.3, hopper/block_sparse_gather.cuh
_FA3_READS_ALL = Version("0.6")


class FlashInferAttention:
    """Backend that calls FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`; a step is planned once for all layers.

    Args:
        kernel: "fa2" or "fa3" for all requests; None: choose as described above.

    Raises:
        ValueError: If "fa3" is given for an FP8 KV cache.
    """

    name = setting = "flashinfer"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""
        if not is_installed("flashinfer"):
            return "flashinfer is not installed; install the extra `gpu`"
        found = _release()
        if found is not None and found < OLDEST:
            return f"flashinfer {found} is older than {OLDEST}; install the extra `gpu` for a newer release"
        return half_precision_refusal(shape, _HEAD_DIMS)

    def __init__(self, shape: AttentionShape, kernel: str | None = None) -> None:
        if kernel == "fa3" and shape.has_fp8_kv:
            raise ValueError("fa3 does not read an FP8 KV cache with 16-bit queries; use fa2")
        self._shape = shape
        self._kernel = kernel
        self._has_slots = kernel is None and shape.has_fp8_kv and runs_on_hopper(shape)
        self._has_fa3 = is_hopper(shape.device) and not shape.has_fp8_kv
        workspace_bytes = max(_WORKSPACE_BYTES, parts_bytes(shape, num_rows=1, num_tokens=_FA3_TILE))
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=shape.device)
        self._graph_workspace = self._workspace  # replaced when a graph needs a larger one
        self._last_of_fa3 = last_block_of_fa3(shape, _release())
        message = "FlashInfer compiles attention kernels for this model, once per machine"
        with progress(message), scripts_in_path():
            prompt_kernel = kernel or ("fa3" if self._has_fa3 else "fa2")
            self._decoding = PagedAttention(shape, _wrapper(self._workspace, kernel or "fa2"))
            self._prompts = PagedAttention(shape, _wrapper(self._workspace, prompt_kernel))
            self._far_prompts = self._prompts
            if prompt_kernel == "fa3" and self._last_of_fa3 is not None:
                self._far_prompts = PagedAttention(shape, _wrapper(self._workspace, "fa2"))
            self._try_out((kernel or "fa2", prompt_kernel))

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step on the host and return its attention function; `rows.kv_lens` must be exact, not upper bounds."""
        num_decode = rows.num_decode_requests
        if not self._has_slots and max(rows.query_lens[num_decode:], default=0) <= _MOST_SHORT_QUERIES:
            calls = [(self._decoding, ALL_ROWS)]
        else:
            calls = [(self._decoding, slice(num_decode)), (self._prompts, slice(num_decode, None))]
        used = [(*call, tokens) for call in calls if (tokens := tokens_of(rows, call[1])).start < tokens.stop]
        parts = [(self._planned(attention, rows, part), tokens) for attention, part, tokens in used]
        num_tokens = sum(rows.query_lens)

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
            out = torch.empty_like(q)
            out[num_tokens:] = 0
            return attend_parts(parts, q, k_cache, v_cache, out, scales)

        return attend

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> CapturedFlashInfer:
        """Return the attention to capture in a CUDA graph; capture the largest first: all share its workspace."""
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

    def _planned(self, attention: PagedAttention, rows: AttentionRows, part: slice) -> PartAttention:
        if self._has_slots and has_few_queries(self._shape, rows, part):
            return SlotAttention(self._shape, rows, part.stop)
        pages, last = page_lists(rows, self._shape.block_size, part), self._last_of_fa3
        if attention is self._prompts and last is not None and pages.pages.max() > last:
            attention = self._far_prompts
        attention.plan_pages(pages)
        return attention

    def _try_out(self, kernels: tuple[str, str]) -> None:
        """Run one-token steps to compile the decode and prompt kernels and to test the calls that graphs need."""
        shape = self._shape
        one = torch.ones(1, dtype=torch.int32, device=shape.device)
        table = torch.zeros(1, 1, dtype=torch.int32)
        rows = AttentionRows(
            torch.cat((one - 1, one)), one, table.to(shape.device), (1,), (1,), table.numpy(), last_block_lens=one
        )
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        cache = torch.zeros(1, shape.block_size, shape.num_kv_heads, shape.head_dim, **options).to(shape.kv_dtype)
        q = torch.zeros(1, shape.num_heads, shape.head_dim, **options)
        for attention in (self._decoding, self._prompts):
            attention.plan_pages(page_lists(rows, shape.block_size))
            attention.run(q, cache, cache, torch.empty_like(q))
        all_pieces = [int(kernel == "fa3") for kernel in kernels]
        if kernels == ("fa2", "fa3"):
            all_pieces.append(2)
        for pieces in all_pieces:
            part = self._capture_part(rows, ALL_ROWS, pieces)
            part.plan_again(rows)
            part.attention.run(q, cache, cache, torch.empty_like(q))
        torch.cuda.synchronize(shape.device)

    def _num_pieces(self, num_tokens: int, may_be_left_out: bool) -> int:
        """Return the number of pieces into which a graph splits the prompts' history for "fa3"; 0: use "fa2"."""
        device = self._shape.device
        if self._kernel is not None:
            return int(self._kernel == "fa3")
        reaches = self._last_of_fa3 is None or (may_be_left_out and num_tokens >= _LEAST_LEFT_OUT)
        if not reaches or not self._has_fa3 or num_tokens <= _FA3_TILE:
            return 0
        return best_pieces(-(-num_tokens // _FA3_TILE) * self._shape.num_heads, num_multiprocessors(device))

    def _capture_part(self, rows: AttentionRows, part: slice, pieces: int) -> PlannedPart:
        if self._has_slots and has_few_queries(self._shape, rows, part):
            return SlotPart(self._shape, rows, part.stop)
        num_rows, most_pages = rows.block_table[part].shape
        num_pages, num_tokens = num_rows * most_pages, sum(rows.query_lens[part])
        if pieces < 2:
            # Planning overwrites `last_block_lens`, but with the same values that the step has written there.
            assert rows.last_block_lens is not None
            kernel, last_lens = "fa3" if pieces else "fa2", rows.last_block_lens[part]
            call = self._captured_call(kernel, num_rows, num_tokens, num_pages, last_lens)
            return CapturedPart(call, rows, part, self._shape.block_size, reads_lengths=pieces == 0)
        num_rows += 1  # one extra request for the padding tokens
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
        """Build a call whose plan is stored at fixed addresses, as CUDA graphs require.

        Args:
            last_lens: [requests] int32 buffer for the number of tokens in each last page; None: allocate a buffer.
        """
        workspace = self._graph_workspace
        sizes = {
            "qo_indptr_buf": num_rows + 1,
            "paged_kv_indptr_buf": num_rows + 1,
            "paged_kv_indices_buf": num_pages,
            "paged_kv_last_page_len_buf": num_rows,
        }
        with torch.inference_mode(False):  # a plan outside of inference mode could not write tensors made inside
            buffers = {
                name: torch.zeros(size, dtype=torch.int32, device=workspace.device) for name, size in sizes.items()
            }
            if last_lens is not None:
                buffers["paged_kv_last_page_len_buf"] = last_lens
            wrapper = _wrapper(workspace, kernel, use_cuda_graph=True, **buffers)
            # By default, a wrapper reserves 8 MiB on device and host for its plan: too much for dozens of graphs.
            num_bytes = plan_bytes(self._shape, num_rows, num_tokens)
            wrapper.reset_workspace_buffer(
                workspace, torch.empty(num_bytes, dtype=torch.uint8, device=workspace.device)
            )
            sent_pages = torch.empty(num_pages, dtype=torch.int32, pin_memory=workspace.is_cuda)
        if kernel == "fa3":
            self._prompts.share_offsets(wrapper)
        attention = PagedAttention(self._shape, wrapper, is_causal=is_causal)
        return CapturedCall(attention, (sent_pages, buffers["paged_kv_indices_buf"]))


def last_block_of_fa3(shape: AttentionShape, release: Version | None) -> int | None:
    """Return the highest KV block id that "fa3" can address, or None if all; an unknown `release` counts as old."""
    reads_all = release is not None and release >= _FA3_READS_ALL
    if reads_all or shape.num_blocks * shape.block_stride_bytes <= _FA3_BYTES:
        return None
    return _FA3_BYTES // shape.block_stride_bytes - 1


def parts_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return the bytes that "fa2" needs for partial results in a graph: an fp32 output and softmax sum per query.

    In a graph, the number of tiles is the larger of two numbers: the tiles needed by all requests, with one partly
    filled tile each; and the thread blocks that FlashInfer launches. In eager mode, it is at most the number of thread
    blocks. Source: FlashInfer 0.5.3, scheduler.cuh.
    """
    tile, num_tiles = _query_tiles(shape, num_rows, num_tokens)
    return shape.num_heads * num_tiles * tile * (shape.head_dim + 1) * 4 + 2 * _ALIGNMENT


def plan_bytes(shape: AttentionShape, num_rows: int, num_tokens: int) -> int:
    """Return an upper bound for the size of FlashInfer's plan in a graph, in bytes.

    "fa2" needs 13 bytes per query tile, 4 bytes per request and 4 bytes per query token. "fa3" needs 28 bytes per head
    for each tile of 128 query tokens, and 4 bytes per multiprocessor. Source: FlashInfer 0.5.3, scheduler.cuh.
    """
    fa2 = 13 * _query_tiles(shape, num_rows, num_tokens)[1] + 4 * (num_rows + num_tokens)
    fa3 = 28 * shape.num_heads * (-(-num_tokens // _FA3_TILE) + num_rows) + 4 * num_multiprocessors(shape.device)
    return (max(fa2, fa3) // _PLAN_GRAIN + 2) * _PLAN_GRAIN


def _query_tiles(shape: AttentionShape, num_rows: int, num_tokens: int) -> tuple[int, int]:
    """Return the "fa2" tile size, in (query token, head) pairs of one KV head, and the maximum number of tiles."""
    group = shape.num_heads // shape.num_kv_heads
    longest = (num_tokens - num_rows + 1) * group
    tile = 128 if longest > 64 and shape.head_dim < 256 else 64 if longest > 16 else 16
    blocks_on_gpu = 2 * num_multiprocessors(shape.device)
    return tile, max(-(-num_tokens * group // tile) + num_rows - 1, blocks_on_gpu // shape.num_kv_heads)


def _wrapper(workspace: Tensor, kernel: str, **settings: Any) -> Any:
    build = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    setattr(import_module(build.__module__), "max", largest)  # noqa: B010 (shadows the built-in in that module)
    return build(workspace, "NHD", backend=kernel, **settings)


def largest(*values: Any, **options: Any) -> Any:
    """Behave as the built-in `max`, but call `Tensor.max` if the only argument is a tensor.

    Replaces `max` in FlashInfer's planning module, where the built-in would take 3 µs per tensor element.
    """
    if len(values) == 1 and isinstance(values[0], Tensor) and not options:
        return values[0].max()
    return max(*values, **options)


def _release() -> Version | None:
    """Return the installed FlashInfer release; None if unknown, as for builds from source."""
    try:
        found = Version(version("flashinfer-python"))
    except (PackageNotFoundError, InvalidVersion):
        return None
    return found if any(found.release) else None
