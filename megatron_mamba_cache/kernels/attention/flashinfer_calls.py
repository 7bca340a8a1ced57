"""FlashInfer calls, each for some of a step's requests; eager, or captured in a CUDA graph."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .interface import AttentionRows, AttentionShape, PlannedAttention
from .kv_values import UNSCALED, KVScales

ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PageLists:
    """Query lengths and KV pages of requests in FlashInfer's format; int32 tensors on the host.

    Args:
        cu_query: [requests + 1]; index of the first packed query token of each request.
        cu_pages: [requests + 1]; index in `pages` of each request's first page.
        pages: Ids of all requests' KV blocks, in the order of requests and positions.
        last_page_lens: [requests]; number of tokens in each request's last page.
    """

    cu_query: Tensor
    cu_pages: Tensor
    pages: Tensor
    last_page_lens: Tensor

    def has_pages_of(self, other: "PageLists") -> bool:
        """Return True if query lengths and pages equal those of `other`; `last_page_lens` may differ."""
        return all(
            mine.equal(theirs)
            for mine, theirs in (
                (self.cu_query, other.cu_query),
                (self.cu_pages, other.cu_pages),
                (self.pages, other.pages),
            )
        )


def page_lists(rows: AttentionRows, block_size: int, part: slice = ALL_ROWS, *, keep_all: bool = False) -> PageLists:
    """Return the page lists of the requests in `part`; skip requests without query tokens unless `keep_all` is set."""
    query_lens, kv_lens = np.array(rows.query_lens[part], np.int32), np.array(rows.kv_lens[part], np.int32)
    table = rows.host_block_table[part]
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


class PagedAttention:
    """FlashInfer wrapper that computes attention over the paged KV cache: causal, or unmasked if not `is_causal`."""

    def __init__(self, shape: AttentionShape, wrapper: Any, *, is_causal: bool = True) -> None:
        self._shape = shape
        self._wrapper = wrapper
        self._is_causal = is_causal

    def plan_pages(self, pages: PageLists) -> None:
        """Plan on the host which thread block processes which pages."""
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
            causal=self._is_causal,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        scales: KVScales = UNSCALED,
        lse: Tensor | None = None,
    ) -> None:
        """Write attention for the planned tokens to `out` and, if given, log2 of their softmax sums to `lse`.

        FlashInfer multiplies the softmax scale by the key scale, and the result by the value scale; the latter takes
        another launch unless the scale is 1.0.
        """
        options: dict[str, Any] = {} if lse is None else {"lse": lse, "return_lse": True}
        if self._shape.has_fp8_kv:
            options |= {"k_scale": scales.key, "v_scale": scales.value}
        self._wrapper.run(q.contiguous(), (k_cache, v_cache), out=out, **options)

    @property
    def offsets(self) -> Tensor | None:
        """The 64 MiB buffer of token offsets that "fa3" writes in each run; None for FlashInfer 0.6 and later."""
        return getattr(self._wrapper, "_vector_sparse_indices_buffer", None)

    def share_offsets(self, wrapper: Any) -> None:
        """Make another "fa3" wrapper use the same buffer of token offsets; the two must not run concurrently."""
        if self.offsets is not None:
            wrapper._vector_sparse_indices_buffer = self.offsets


class CapturedCall:
    """FlashInfer call inside a CUDA graph; its plan and page numbers are stored at fixed addresses.

    Args:
        pages: Two buffers for page numbers, [maximum number of pages] each: in pinned host memory and on the device.
    """

    def __init__(self, attention: PagedAttention, pages: tuple[Tensor, Tensor]) -> None:
        self.attention = attention
        self._sent_pages, self._pages = pages
        self._was_sent = torch.cuda.Event() if self._pages.is_cuda else None

    def plan(self, pages: PageLists) -> None:
        """Plan the next replay on the host; the first plan must be the largest."""
        if self._was_sent is not None:
            self._was_sent.synchronize()  # the previous plan's copy may still read the pinned buffer
        # If FlashInfer copied the page numbers itself, it would synchronize and so wait for all queued work.
        sent = slice(len(pages.pages))
        self._sent_pages[sent] = pages.pages
        self._pages[sent].copy_(self._sent_pages[sent], non_blocking=True)
        self.attention.plan_pages(replace(pages, pages=self._pages[sent]))
        if self._was_sent is not None:
            self._was_sent.record()


class CapturedPart:
    """Attention for either the decode requests or the prompts of a captured step, computed by one FlashInfer call.

    Graphs of all sizes share the call's workspace.

    Args:
        rows: Requests with the maximum lengths for the graph.
        part: Requests in `rows` for which the call computes attention.
        reads_lengths: True if the kernel reads the last-page lengths from a buffer that each step writes. A new plan is
            then needed only when the pages change.
    """

    is_planned = True

    def __init__(
        self, call: CapturedCall, rows: AttentionRows, part: slice, block_size: int, *, reads_lengths: bool
    ) -> None:
        self.attention = call.attention
        self.tokens = tokens_of(rows, part)
        self._call = call
        self._part = part
        self._block_size = block_size
        self._reads_lengths = reads_lengths
        self._planned: PageLists | None = None
        self.plan_again(rows)

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; `rows` must have exact lengths and as many requests as captured."""
        pages, planned = page_lists(rows, self._block_size, self._part, keep_all=True), self._planned
        if planned is not None and self._reads_lengths and pages.has_pages_of(planned):
            return
        self._planned = None  # if planning fails, the next call must plan again
        self._call.plan(pages)
        self._planned = pages


class PlannedPart(Protocol):
    """Protocol for attention over either the decode requests or the prompts of a captured step."""

    @property
    def is_planned(self) -> bool:
        """True if `plan_again` must be called before each replay; if False, it does nothing."""

    @property
    def attention(self) -> "PartAttention":
        """The call that computes attention for these requests."""

    @property
    def tokens(self) -> slice:
        """Slice of the packed query tokens that belong to these requests."""

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; `rows` must have exact lengths and as many requests as captured."""


class PartAttention(Protocol):
    """Protocol for a planned attention call over some of the requests in a step."""

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scales: KVScales = UNSCALED) -> None:
        """Compute attention in one layer for the planned tokens; write the result to `out`."""


@dataclass(frozen=True, slots=True)
class CapturedFlashInfer:
    """`CapturedAttention` of FlashInfer; its parts are the decode requests and the prompts of a captured step."""

    parts: Sequence[PlannedPart]
    last_block: int | None = None

    @property
    def is_planned(self) -> bool:
        """True if a part needs a plan on the host before each replay, which assigns work to thread blocks."""
        return any(part.is_planned for part in self.parts)

    def begin(self) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        calls = [(part.attention, part.tokens) for part in self.parts]

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
            return attend_parts(calls, q, k_cache, v_cache, torch.empty_like(q), scales)

        return attend

    def plan_again(self, rows: AttentionRows) -> None:
        """Plan the next replay on the host; `rows` must have exact lengths and as many requests as captured."""
        for part in self.parts:
            part.plan_again(rows)


def tokens_of(rows: AttentionRows, part: slice) -> slice:
    """Return the slice of packed query tokens that belong to the requests in `part`."""
    first = sum(rows.query_lens[: part.start or 0])
    return slice(first, first + sum(rows.query_lens[part]))


def attend_parts(
    parts: Sequence[tuple[PartAttention, slice]],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Run each attention call on its slice of tokens, write the results to `out`, and return `out`."""
    for attention, tokens in parts:
        attention.run(q[tokens], k_cache, v_cache, out[tokens], scales)
    return out
