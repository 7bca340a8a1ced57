"""Attention of few queries per request over FP8 keys and values: decoding, and verification of drafts.

The context of a request is cut into slots by absolute position. A work item is a slot, a KV head and up to 16 or 32
queries: heads that share the KV head, of one or more tokens, are rows of tensor-core tiles. Programs compute each
item's mean value and the log2 of its softmax sum; another launch combines the items of each query. So the bits of a
result depend neither on how many tokens are verified nor on other requests.

Codes become fp16 numbers, exactly (NaN becomes 480). Queries are rounded to fp16 after multiplication with a power of
two per query that prevents overflow, and weights and partial results are rounded to fp16; sums are in fp32. The key
scale is a part of the softmax scale; the value scale multiplies the result.

Safe in CUDA graphs: the launches are those of the maximum lengths, and programs read the lengths.
"""

import math
from itertools import pairwise

import torch
import triton
from torch import Tensor

from ..kernel_launches import has_tested_gluon, is_hopper, resident_programs
from ..overlap import overlapping
from .fp8_decode_hopper import attend_slots_hopper_kernel
from .fp8_slots import attend_slots_kernel, combine_slots_kernel, count_slots_kernel
from .fp8_tiles import ROWS_OF_GROUP, run_of
from .interface import AttentionRows, AttentionShape
from .kv_values import UNSCALED, KVScales, addressed

_TILE = 64
_LEAST_SLOT, _MOST_SLOTS = 512, 128
_MOST_PARTS_BYTES = 2**28
_MOST_QUERIES = 32  # per request and KV head
_TOGETHER = 32
"""Items of a query that are combined at a time."""
_HOPPER_PROGRAMS, _PROGRAMS = 2, 4  # per multiprocessor


class SlotAttention:
    """Attention of a step's leading requests over FP8 keys and values; counts their slots at its first call.

    Args:
        rows: The step's requests; in a graph, with the maximum lengths.
        num_requests: Number of leading requests to attend.
    """

    def __init__(self, shape: AttentionShape, rows: AttentionRows, num_requests: int) -> None:
        self._shape, self._rows, self._num_requests = shape, rows, num_requests
        self._most_rows = max(rows.query_lens[:num_requests]) * (shape.num_heads // shape.num_kv_heads)
        longest = min(max(rows.kv_lens[:num_requests]), rows.block_table.shape[1] * shape.block_size)
        self._slot = slot_len(rows.block_table.shape[1] * shape.block_size)
        self._most_slots = max(triton.cdiv(longest, self._slot), 1)
        self._is_fast = runs_on_hopper(shape)
        self._row_groups = 2 if self._is_fast and self._most_rows > ROWS_OF_GROUP.value else 1
        self._rows_of_item = self._row_groups * ROWS_OF_GROUP.value
        self._num_tiles = triton.cdiv(self._most_rows, self._rows_of_item)
        most_items = self._most_slots * shape.num_kv_heads * self._num_tiles
        request_bytes = most_items * self._rows_of_item * shape.head_dim * 2
        self._per_group = max(1, min(num_requests, _MOST_PARTS_BYTES // request_bytes))
        self._ends: Tensor | None = None

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, scales: KVScales = UNSCALED) -> None:
        """Write attention for the tokens of the leading requests to `out`, [tokens, heads, dim] and contiguous.

        Reference: `paged_attention_ref`.
        """
        if self._ends is None:
            self._ends = self._count_slots()
        q = q.contiguous()
        for first, stop in pairwise((*range(0, self._num_requests, self._per_group), self._num_requests)):
            self._run_group(slice(first, stop), q, (addressed(k_cache), addressed(v_cache)), out, scales)

    def _count_slots(self) -> Tensor:
        ends = torch.empty(self._num_requests, dtype=torch.int32, device=self._rows.kv_lengths.device)
        count_slots_kernel[(triton.cdiv(self._num_requests, self._per_group),)](
            ends=ends,
            cu_query=self._rows.cu_query,
            kv_lengths=self._rows.kv_lengths,
            num_requests=self._num_requests,
            per_group=self._per_group,
            SLOT=self._slot,
            GROUP=_padded(self._per_group),
            enable_fp_fusion=True,
            **overlapping(ends.device),
        )
        return ends

    def _run_group(self, group: slice, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor, scales: KVScales) -> None:
        """Attend some of the requests; long because the kernels have many named arguments."""
        assert self._ends is not None
        shape, rows, device = self._shape, self._rows, q.device
        num_requests, kept = group.stop - group.start, min(self._most_rows, self._rows_of_item)
        num_items = num_requests * self._most_slots * shape.num_kv_heads * self._num_tiles
        parts = torch.empty(num_items * kept, shape.head_dim, dtype=torch.float16, device=device)
        sums = torch.empty(num_items * kept, dtype=torch.float32, device=device)
        queries = shape.num_heads // shape.num_kv_heads
        both = {
            "parts": parts,
            "sums": sums,
            "ends": self._ends[group],
            "cu_query": rows.cu_query[group.start :],
            "kv_lengths": rows.kv_lengths[group],
            "most_rows": self._most_rows,
            "KV_HEADS": shape.num_kv_heads,
            "QUERIES": queries,
            "DIM": shape.head_dim,
            "SLOT": self._slot,
            **overlapping(device),
        }
        is_fast = self._is_fast
        size = 4 if is_fast else 1
        width = max(16, triton.next_power_of_2(shape.head_dim))
        k_cache, v_cache = (cache.view(torch.int32) if is_fast else cache for cache in caches)
        programs = resident_programs(device, _HOPPER_PROGRAMS // self._row_groups if is_fast else _PROGRAMS)
        attend, options = attend_slots_kernel, {"WIDTH": width, "TILE": _TILE}
        if is_fast:
            attend, options = attend_slots_hopper_kernel, {"GROUPS": self._row_groups}
        attend[(min(num_items, programs),)](
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=rows.block_table[group],
            scale=shape.scale * scales.key / math.log(2),
            num_requests=num_requests,
            table_stride=rows.block_table.stride(0),
            block_stride=caches[0].stride(0) // size,
            REQUESTS=_padded(num_requests),
            BLOCK=shape.block_size,
            num_warps=4 * self._row_groups,
            enable_fp_fusion=True,
            **both,
            **options,
        )
        combine_slots_kernel[(num_requests, self._most_rows, shape.num_kv_heads)](
            out=out,
            value_scale=scales.value,
            ROWS=self._rows_of_item,
            WIDTH=width,
            TOGETHER=_TOGETHER,
            num_warps=4,
            enable_fp_fusion=True,
            **both,
        )


def _padded(num_requests: int) -> int:
    """Return a power of two, of which few exist: Triton compiles the kernels for each."""
    return max(32, triton.next_power_of_2(num_requests))


class SlotPart:
    """`PlannedPart` of the decode requests of a captured step; replays read their lengths on the device.

    Args:
        rows: Requests with the maximum lengths for the graph.
    """

    is_planned = False

    def __init__(self, shape: AttentionShape, rows: AttentionRows, num_requests: int) -> None:
        self._arguments = shape, rows, num_requests
        self.tokens = slice(sum(rows.query_lens[:num_requests]))

    @property
    def attention(self) -> SlotAttention:
        """New for each step, which counts its slots once."""
        return SlotAttention(*self._arguments)

    def plan_again(self, rows: AttentionRows) -> None:
        """Do nothing."""


def slot_len(most_tokens: int) -> int:
    """Return the number of tokens of a slot for contexts of up to `most_tokens`; a constant of a cache."""
    return max(_LEAST_SLOT, triton.next_power_of_2(triton.cdiv(most_tokens, _MOST_SLOTS)))


def runs_on_hopper(shape: AttentionShape) -> bool:
    """Return True if the Hopper kernel computes attention for this shape."""
    is_supported = shape.head_dim in (64, 128, 256) and shape.block_size % run_of(shape.head_dim) == 0
    return is_supported and shape.device.type == "cuda" and is_hopper(shape.device) and has_tested_gluon()


def has_few_queries(shape: AttentionShape, rows: AttentionRows, part: slice) -> bool:
    """Return True for decode requests that each have at most 32 queries per KV head; FlashInfer is faster for more."""
    if part.stop is None:
        return False
    return max(rows.query_lens[part], default=0) * (shape.num_heads // shape.num_kv_heads) <= _MOST_QUERIES
