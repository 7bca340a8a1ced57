"""Packed batches, pools filled with NaN, and bitwise comparisons for kernel tests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, DecodeBatch, PrefillBatch


@dataclass(frozen=True, slots=True)
class RowSpec:
    """A prefill request of `length` tokens, starting at `start`; `boundaries` maps positions to slots."""

    length: int
    start: int = 0
    initial: int = PAD_SLOT
    final: int = PAD_SLOT
    boundaries: dict[int, int] = field(default_factory=dict)


def pack_rows(specs: Sequence[RowSpec], chunk_size: int, device: str, num_padding: int = 0) -> PrefillBatch:
    """Split the requests at absolute multiples of `chunk_size`; append empty padding requests and chunks."""
    cu_seqlens = [0, *accumulate(spec.length for spec in specs)]
    cu_chunks, chunk_requests, chunk_slots, cu_request_chunks = [0], [], [], [0]
    for row, spec in enumerate(specs):
        position, end = spec.start, spec.start + spec.length
        while position < end:
            position = min((position // chunk_size + 1) * chunk_size, end)
            cu_chunks.append(cu_seqlens[row] + position - spec.start)
            chunk_requests.append(row)
            chunk_slots.append(spec.boundaries.get(position, PAD_SLOT))
        cu_request_chunks.append(len(chunk_requests))
    padding = [PAD_SLOT] * num_padding
    columns = (
        cu_seqlens + cu_seqlens[-1:] * num_padding,
        [spec.initial for spec in specs] + padding,
        [spec.final for spec in specs] + padding,
        cu_chunks + cu_chunks[-1:] * num_padding,
        chunk_requests + [0] * num_padding,
        chunk_slots + padding,
        cu_request_chunks + cu_request_chunks[-1:] * num_padding,
        sorted(range(len(specs) + num_padding), key=lambda row: -specs[row].length if row < len(specs) else 0),
        [spec.start for spec in specs] + [0] * num_padding,
    )
    tensors = (torch.tensor(column, dtype=torch.int32, device=device) for column in columns)
    return PrefillBatch(*tensors, block_size=chunk_size)


def scan_specs(chunk: int) -> list[RowSpec]:
    """Return requests that start and end at, before and after chunk ends; their initial slots are 1 and 11 of 13."""
    return [
        RowSpec(chunk - 1, final=0),
        RowSpec(chunk, initial=1, start=chunk, final=1),
        RowSpec(chunk + 1, final=2, boundaries={chunk: 3}),
        RowSpec(0, start=5, initial=11, final=4),
        RowSpec(1, start=13, initial=11, final=5),
        RowSpec(3 * chunk + 2, start=5, initial=11, final=6, boundaries={chunk: 7, 2 * chunk: 8, 3 * chunk: 9}),
        RowSpec(2, start=4),
        RowSpec(2 * chunk, start=2 * chunk, initial=11, boundaries={4 * chunk: 10}),
    ]


@dataclass(frozen=True, slots=True)
class VerifySpec:
    """A decode request of `length` tokens with a draft window of slots; padding if it has no columns."""

    length: int
    columns: tuple[int, ...] = ()
    accepted: int = 1
    computed: int = 0

    @property
    def source(self) -> int:
        """Slot of the request's initial state."""
        return self.columns[self.accepted - 1]


def pack_verify(specs: Sequence[VerifySpec], device: str, *, num_spare: int = 0) -> DecodeBatch:
    """Pack decode requests; the table of slots and `max_len` are `num_spare` larger than needed."""
    max_len = max((spec.length for spec in specs), default=1) + num_spare
    width = max([max_len, *(len(spec.columns) + num_spare for spec in specs)])
    table = [[*spec.columns, *[PAD_SLOT] * (width - len(spec.columns))] for spec in specs]
    cu_tokens = [0, *accumulate(spec.length for spec in specs)]
    cu_tokens, columns, accepted, computed = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (cu_tokens, table, [spec.accepted for spec in specs], [spec.computed for spec in specs])
    )
    return DecodeBatch(cu_tokens, columns.view(len(specs), width), accepted, max_len, computed)


def random_verify_specs(seed: int, num_slots: int) -> list[VerifySpec]:
    """Return decode requests with up to eight drafts and random slots; some are padding, some slots unused."""
    draw = random.Random(seed)
    free = draw.sample(range(num_slots), num_slots)
    specs = []
    for _ in range(draw.randint(1, 5)):
        if draw.random() < 0.2:
            specs.append(VerifySpec(draw.randint(0, 3)))
            continue
        length, accepted = draw.randint(1, 9), draw.randint(1, 9)
        num_columns = max(length, accepted) + draw.randint(0, 2)
        specs.append(VerifySpec(length, tuple(free.pop() for _ in range(num_columns)), accepted))
    return specs


def one_token_rows(slots: Sequence[int], device: str) -> DecodeBatch:
    """Return decode requests of one token each; those with PAD_SLOT are padding."""
    return pack_verify([VerifySpec(1, () if slot == PAD_SLOT else (slot,)) for slot in slots], device)


def row_slices(specs: Sequence[RowSpec | VerifySpec]) -> list[slice]:
    """Return the slice of packed tokens for each request."""
    cu_seqlens = [0, *accumulate(spec.length for spec in specs)]
    return [slice(a, b) for a, b in pairwise(cu_seqlens)]


def written_slots(specs: Sequence[RowSpec]) -> set[int]:
    """Return all slots that the requests write."""
    slots = {spec.final for spec in specs}
    for spec in specs:
        slots.update(spec.boundaries.values())
    return slots - {PAD_SLOT}


def poisoned_pool(shape: Sequence[int], dtype: torch.dtype, device: str, filled: Sequence[int] = ()) -> Tensor:
    """Return a pool with random states in the `filled` slots, and NaN elsewhere."""
    pool = torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    for slot in filled:
        pool[slot] = torch.randn(shape[1:], device=device).to(dtype)
    return pool


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same bytes; NaN equals itself, and -0 differs from 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_untouched(before: Tensor, after: Tensor, written: set[int]) -> None:
    """Check that all slots outside `written` are bitwise unchanged."""
    for slot in range(before.shape[0]):
        assert slot in written or same_bits(before[slot], after[slot]), f"slot {slot} changed"
