"""Properties of chunk metadata for requests that are split at packed positions."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.recurrences.mamba2.varlen_chunks import compute_varlen_chunk_metadata


def as_lists(lengths: list[int], chunk_size: int, device: str = "cpu") -> tuple[list[int], list[int], list[int]]:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    chunks = compute_varlen_chunk_metadata(starts, chunk_size)
    assert all(column.dtype == torch.int32 and column.device == starts.device for column in chunks)
    cu_chunks, last, rows = chunks
    return cu_chunks.tolist(), last.tolist(), rows.tolist()


def test_varlen_chunks_match_a_worked_example(device: str) -> None:
    assert as_lists([5, 0, 4, 1], 4, device) == ([0, 4, 5, 8, 9, 10], [1, -1, 3, 4], [0, 0, 2, 2, 3])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_varlen_chunks_of_an_empty_batch_are_empty(lengths: list[int], device: str) -> None:
    assert as_lists(lengths, 4, device) == ([0], [-1] * len(lengths), [])


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 9))
def test_varlen_chunks_are_cut_at_request_starts_and_packed_tile_edges(lengths: list[int], chunk_size: int) -> None:
    owner = [row for row, length in enumerate(lengths) for _ in range(length)]
    cuts = [t for t in range(len(owner)) if t % chunk_size == 0 or owner[t] != owner[t - 1]]
    rows = [owner[t] for t in cuts]
    last = [max((c for c, r in enumerate(rows) if r == row), default=-1) for row in range(len(lengths))]
    expected = ([*cuts, len(owner)] if owner else [0], last, rows)
    assert as_lists(lengths, chunk_size) == expected


def test_varlen_chunk_lengths_may_reach_the_int32_limit() -> None:
    starts = torch.tensor([0, 2**30, 2**31 - 1])
    assert compute_varlen_chunk_metadata(starts, 2**30).cu_chunk_seqlens.tolist() == starts.tolist()


@pytest.mark.parametrize(
    ("starts", "chunk_size"),
    [
        (torch.tensor([[0, 4]]), 4),
        (torch.tensor(0), 4),
        (torch.tensor([], dtype=torch.int32), 4),
        (torch.tensor([0.0, 4.0]), 4),
        (torch.tensor([False, True]), 4),
        (torch.tensor([1, 4]), 4),
        (torch.tensor([0, 4, 3]), 4),
        (torch.tensor([0, 2**31]), 2**30),
        (torch.tensor([0, 4]), 0),
        (torch.tensor([0, 4]), 2.0),
    ],
)
def test_varlen_chunks_refuse_invalid_lengths_and_sizes(starts: torch.Tensor, chunk_size: int) -> None:
    with pytest.raises(ValueError):
        compute_varlen_chunk_metadata(starts, chunk_size)
