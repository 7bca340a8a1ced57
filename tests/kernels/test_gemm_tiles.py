"""Properties of the row tiles for a grouped GEMM, for kernel and reference."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.kernels.experts import gemm_tiles
from megatron_mamba_cache.kernels.experts.gemm_tiles import MOST_ROWS, ROW_STEP, tile_rows, tile_rows_ref
from tests.kernels.kernel_stand_ins import launches_expected

COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, 70), st.integers(200, 700)), min_size=1, max_size=9)


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)


@given(counts=COUNTS, num_elsewhere=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_gemm_tiles_cover_each_row_once_and_are_as_few_as_possible(counts: list[int], num_elsewhere: int) -> None:
    starts = starts_of(counts)
    tiles = tile_rows_ref(starts, int(starts[-1]) + num_elsewhere)
    found = tiles[1 : 1 + int(tiles[0, 0]), :3].tolist()
    for expert, (begin, end) in enumerate(pairwise(starts.tolist())):
        own = sorted((first, last) for of, first, last in found if of == expert)
        assert [row for first, last in own for row in range(first, last)] == list(range(begin, end))
        assert len(own) == -(-(end - begin) // MOST_ROWS)
        assert all(last - first == own[0][1] - own[0][0] for first, last in own[:-1])
        assert all((last - first) % ROW_STEP == 0 for first, last in own[:-1])
    assert found == sorted(found)


@pytest.mark.parametrize("counts", [[0], [1], [0, 224, 225, 0, 33], [700, 32, 32, 64, 0, 448, 31]])
def test_gemm_tile_kernel_equals_its_reference(counts: list[int], device: str) -> None:
    starts = starts_of(counts).to(device)
    num_rows = int(starts[-1]) + 5
    with launches_expected(gemm_tiles, "_tiles_kernel", of_kernel=True, device=device):
        tiles = tile_rows(starts, num_rows).cpu()
    expected = tile_rows_ref(starts.cpu(), num_rows)
    num_tiles = int(expected[0, 0])
    assert tiles.shape == expected.shape and int(tiles[0, 0]) == num_tiles
    assert tiles[1 : 1 + num_tiles, :3].equal(expected[1 : 1 + num_tiles, :3])
