"""Attention for short prompts after long cached histories: FlashInfer's "fa3", with the history split into pieces.

A program of "fa3" reads all keys for 128 query tokens and one head, so a few hundred query tokens occupy only part of
the GPU. Here each prompt's history (its cached tokens) is split into pieces of whole KV blocks. Each piece is passed to
FlashInfer as a separate request, without a mask and with a copy of the prompt's queries. A second call computes causal
attention to the prompt's own blocks, which begin with the block of its first new token. A kernel then merges the
results by their log-sum-exps.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping, side_stream
from ..reference import compute_dtype
from .flashinfer_calls import CapturedCall, PageLists, page_lists, tokens_of
from .interface import AttentionRows
from .kv_values import UNSCALED, KVScales

_WIDTH = 1024
_MOST_PIECES = 8
_CALL_COST, _PIECE_COST = 0.1, 0.0008  # costs of a second call and per program; unit: a wave over 8,192 tokens


class SplitPart:
    """Attention for the prompts in a captured step, with their histories split into pieces.

    Args:
        history: Unmasked call for the pieces.
        own: Causal call for the prompts' own blocks.
        rows: Requests with the maximum lengths for the graph.
        part: Slice of `rows` that are prompts.
    """

    is_planned = True

    def __init__(
        self,
        history: CapturedCall,
        own: CapturedCall,
        rows: AttentionRows,
        part: slice,
        block_size: int,
        num_pieces: int,
    ) -> None:
        self.attention = self
        self.tokens = tokens_of(rows, part)
        self._history, self._own = history, own
        self._part = part
        self._block_size = block_size
        self._num_pieces = num_pieces
        self._num_tokens = self.tokens.stop - self.tokens.start
        self.plan_again(rows)

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; `rows` must have exact lengths and as many requests as captured."""
        pages = page_lists(rows, self._block_size, self._part, keep_all=True)
        history, own = split_history(pages, self._block_size, self._num_pieces, self._num_tokens)
        self._history.plan(history)
        self._own.plan(own)

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scales: KVScales = UNSCALED) -> None:
        """Compute attention in one layer for the planned tokens; write the result to `out`; `scales` are not used."""
        parts = q.new_empty(self._num_pieces + 1, *q.shape)
        lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
        second = self._second_stream(q.device)
        if second is not None:
            second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second):
            self._own.attention.run(q, k_cache, v_cache, parts[-1], lse=lse[-1])
        copies = q.expand(self._num_pieces, *q.shape).flatten(0, 1)
        self._history.attention.run(copies, k_cache, v_cache, parts[:-1].flatten(0, 1), lse=lse[:-1].flatten(0, 1))
        if second is not None:
            torch.cuda.current_stream().wait_stream(second)
        merge_parts(parts, lse, out)

    def _second_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return a stream that computes the prompts' own blocks concurrently with the pieces; None if impossible."""
        shares_memory = self._history.attention.offsets is not None
        if shares_memory or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        return side_stream(device)


def best_pieces(num_programs: int, num_multiprocessors: int) -> int:
    """Return the number of history pieces with the lowest estimated time, given the "fa3" programs per piece.

    The estimate adds up the waves of programs, the second call, and the copies of queries and results.
    """

    def waves(pieces: int) -> float:
        costs = 0.0 if pieces == 1 else _CALL_COST + _PIECE_COST * num_programs * pieces
        return -(-num_programs * pieces // num_multiprocessors) / pieces + costs

    return min(range(1, _MOST_PIECES + 1), key=waves)


def split_history(pages: PageLists, block_size: int, num_pieces: int, num_tokens: int) -> tuple[PageLists, PageLists]:
    """Return the page lists for the pieces of the histories, ordered by piece, and for the prompts' own blocks.

    There is one copy of the queries per piece. Each copy ends with a request for the padding tokens, which has no keys;
    its result is 0 and its log-sum-exp -inf.

    Args:
        pages: Pages of the prompts.
        num_tokens: Number of query tokens in one copy, including padding.
    """
    first_pages, last_pages = pages.cu_pages[:-1].numpy(), pages.cu_pages[1:].numpy()
    full = np.maximum(last_pages - first_pages - 1, 0)
    kv_lens = full * block_size + pages.last_page_lens.numpy()
    history = np.maximum(kv_lens - pages.cu_query.diff().numpy(), 0) // block_size
    cuts = first_pages + history * np.arange(num_pieces + 1)[:, None] // num_pieces
    query = np.append(pages.cu_query[1:].numpy(), num_tokens)
    copies = np.arange(num_pieces)[:, None] * num_tokens + query
    full_pages = np.full((num_pieces, len(history)), block_size)
    return (
        _requests(pages, copies.ravel(), cuts[:-1], cuts[1:], full_pages),
        _requests(pages, query, cuts[-1:], last_pages[None], pages.last_page_lens.numpy()[None]),
    )


def _requests(
    pages: PageLists,
    query_ends: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
    last_page_lens: npt.NDArray[np.int64],
) -> PageLists:
    """Return the page lists of requests that each read a slice of `pages`; end each copy with an empty request.

    Args:
        query_ends: [copies * (requests + 1)]; end of each request's queries.
        starts, stops: [copies, requests]; slice of pages for each request.
        last_page_lens: [copies, requests]; number of tokens in the last page of each slice.
    """
    starts, stops, last_page_lens = (np.pad(of, ((0, 0), (0, 1))).ravel() for of in (starts, stops, last_page_lens))
    lengths = stops - starts
    ends = np.cumsum(lengths)
    chosen = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return PageLists(
        cu_query=_int32(np.append(0, query_ends)),
        cu_pages=_int32(np.append(0, ends)),
        pages=pages.pages[torch.from_numpy(chosen)],
        last_page_lens=_int32(np.where(lengths > 0, last_page_lens, 0)),
    )


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


@triton.jit
def _merge_kernel(
    parts,
    lse,
    out,
    part_stride,
    lse_stride,
    CHANNELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    head = token * (CHANNELS // HEAD_DIM) + channel // HEAD_DIM
    most = tl.full((WIDTH,), float("-inf"), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        most = tl.maximum(most, tl.load(lse + part * lse_stride + head, mask=inside, other=float("-inf")))
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros((WIDTH,), tl.float32)
    merged = tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        weight = tl.exp2(tl.load(lse + part * lse_stride + head, mask=inside, other=float("-inf")) - most)
        values = tl.load(parts + part * part_stride + token * CHANNELS + channel, mask=inside, other=0)
        merged += weight * values.to(tl.float32)
        total += weight
    merged = merged / tl.where(total == 0, 1.0, total)
    tl.store(out + token * CHANNELS + channel, merged.to(out.dtype.element_ty), mask=inside)


def merge_parts(parts: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Merge attention results over disjoint sets of keys into `out`, and return it.

    Args:
        parts: [parts, tokens, heads, dim], contiguous; the results to merge.
        lse: [parts, tokens, heads] fp32, contiguous; log2 of each part's softmax sum, -inf if it has no keys.
        out: [tokens, heads, dim], contiguous; zeros if no part has keys. Computed in fp32, rounded once.

    Raises:
        ValueError: If shapes, strides or dtypes disagree.

    Reference: `merge_parts_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if parts.shape[1:] != out.shape or lse.shape != parts.shape[:3] or parts.dtype != out.dtype:
        raise ValueError(
            "parts must have shape [parts, tokens, heads, dim], lse [parts, tokens, heads] and out [tokens, heads, "
            f"dim] in the dtype of parts; found parts {tuple(parts.shape)} {parts.dtype}, lse {tuple(lse.shape)} and "
            f"out {tuple(out.shape)} {out.dtype}"
        )
    if not (parts.is_contiguous() and lse.is_contiguous() and out.is_contiguous()):
        raise ValueError(
            f"all tensors must be contiguous, found strides parts {parts.stride()}, lse {lse.stride()}, out "
            f"{out.stride()}"
        )
    if out.numel() == 0 or not launches_kernel(parts) or not is_computed_in_fp32(parts):
        return out.copy_(merge_parts_ref(parts, lse))
    channels = out.shape[1] * out.shape[2]
    _merge_kernel[(len(out), triton.cdiv(channels, _WIDTH))](
        parts=parts,
        lse=lse,
        out=out,
        part_stride=parts.stride(0),
        lse_stride=lse.stride(0),
        CHANNELS=channels,
        HEAD_DIM=out.shape[2],
        NUM_PARTS=len(parts),
        WIDTH=_WIDTH,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(parts.device),
    )
    return out


def merge_parts_ref(parts: Tensor, lse: Tensor) -> Tensor:
    """Torch reference for `merge_parts`."""
    dtype = compute_dtype(parts)
    most = lse.amax(0).to(dtype)
    weights = torch.exp2(lse.to(dtype) - torch.where(most == -torch.inf, 0, most))
    total = weights.sum(0)
    merged = (weights[..., None] * parts.to(dtype)).sum(0) / torch.where(total == 0, 1, total)[..., None]
    return merged.to(parts.dtype)
