"""Properties of whole-slot copies and clears."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.reference import copy_slots_ref, zero_slots_ref
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from tests.kernels.packed_rows import same_bits

NUM_SLOTS = 6


def make_pools(device: str) -> list[Tensor]:
    conv = torch.randn(2, NUM_SLOTS, 3, 5, device=device).bfloat16()
    ssm = torch.randn(2, NUM_SLOTS, 2, 4, 3, device=device)
    ssm[:, 0] = float("nan")
    return [conv, ssm]


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@given(st.data())
def test_copy_reads_every_source_before_it_writes(data: st.DataObject) -> None:
    dst = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True))
    dst = data.draw(st.permutations(dst + [PAD_SLOT] * data.draw(st.integers(0, 3))))
    src = data.draw(st.lists(st.integers(PAD_SLOT, NUM_SLOTS - 1), min_size=len(dst), max_size=len(dst)))
    pools = make_pools("cpu")
    expected = [pool.clone() for pool in pools]
    for pool, copied in zip(pools, expected, strict=True):
        for s, d in zip(src, dst, strict=True):
            if PAD_SLOT not in (s, d):
                copied[:, d] = pool[:, s]
    copy_slots_ref(pools, int32(src, "cpu"), int32(dst, "cpu"))
    assert all(same_bits(pool, copied) for pool, copied in zip(pools, expected, strict=True))


@pytest.mark.parametrize(
    ("src", "dst"), [([], []), ([PAD_SLOT], [2]), ([2], [PAD_SLOT]), ([PAD_SLOT, 1], [1, PAD_SLOT]), ([0], [0])]
)
def test_padded_pairs_touch_nothing(src: list[int], dst: list[int], device: str) -> None:
    pools = make_pools(device)
    before = [pool.clone() for pool in pools]
    copy_slots_ref(pools, int32(src, device), int32(dst, device))
    assert all(same_bits(a, b) for a, b in zip(before, pools, strict=True))


def test_copy_swaps_and_spreads_slots(device: str) -> None:
    pools = make_pools(device)
    before = [pool.clone() for pool in pools]
    copy_slots_ref(pools, int32([PAD_SLOT, 0, 1, 1, 3], device), int32([3, 1, 0, 4, PAD_SLOT], device))
    for old, new in zip(before, pools, strict=True):
        assert same_bits(new, old[:, [1, 0, 2, 3, 1, 5]])


@pytest.mark.parametrize("slots", [[], [PAD_SLOT], [PAD_SLOT, 4], [0, PAD_SLOT, 5]])
def test_zero_clears_the_named_slots_only(slots: list[int], device: str) -> None:
    pools = make_pools(device)
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[:, [slot for slot in slots if slot != PAD_SLOT]] = 0
    zero_slots_ref(pools, int32(slots, device))
    assert all(same_bits(pool, cleared) for pool, cleared in zip(pools, expected, strict=True))
