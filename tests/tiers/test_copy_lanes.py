"""Each lane copies in order, and a copy that raises counts as failed."""

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.policy.eviction_rules import LeastRecentlyUsed
from megatron_mamba_cache.policy.tiers.copies import CopyOrder, CopyStatus, Lane
from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes
from megatron_mamba_cache.tiers import copy_lanes, host_memory
from megatron_mamba_cache.tiers.copy_lanes import CopyLanes, DeviceCopies, Piece, UnitSizes
from megatron_mamba_cache.tiers.host_memory import HostMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = UnitSizes(block=24, state=40)


def order(number: int, lane: Lane, blocks: object = (), states: object = ()) -> CopyOrder:
    return CopyOrder(number, lane, tuple(blocks), tuple(states))  # type: ignore[arg-type]


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=(lambda p: p[0], lambda p: p[1]))


@given(pairs, pairs)
def test_byte_ranges_cover_all_units_and_merge_consecutive_units(
    blocks: list[tuple[int, int]], states: list[tuple[int, int]]
) -> None:
    found = list(SIZES.pieces(order(0, Lane.TO_HOST, blocks, states)))
    copied = [(piece.source + offset, piece.target + offset) for piece in found for offset in range(piece.num_bytes)]
    wanted = [
        (source * size + offset, target * size + offset)
        for size, listed in ((SIZES.block, blocks), (SIZES.state, states))
        for source, target in listed
        for offset in range(size)
    ]
    assert copied == wanted
    assert len(found) == num_runs(blocks) + num_runs(states)


def num_runs(pairs: list[tuple[int, int]]) -> int:
    """Return the number of runs of pairs that are consecutive on both sides."""
    return len(pairs) - sum(after == (before[0] + 1, before[1] + 1) for before, after in pairwise(pairs))


@settings(deadline=None, max_examples=20)
@given(pairs, pairs, st.sampled_from([1, 3, 7, 24, 400, 1000]))
def test_bytes_are_unchanged_after_a_copy_to_the_host_and_back(
    blocks: list[tuple[int, int]], states: list[tuple[int, int]], part_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_lanes, "PART_BYTES", part_bytes)
        copy_to_the_host_and_back(blocks, states)


def copy_to_the_host_and_back(blocks: list[tuple[int, int]], states: list[tuple[int, int]]) -> None:
    """Copy units, clear the device's, copy them back, and compare."""
    device = torch.randint(256, (400,), dtype=torch.uint8).to(DEVICE)
    host, before = torch.zeros(400, dtype=torch.uint8), device.clone()
    sizes = UnitSizes(block=8, state=40)
    copies = DeviceCopies(device, host, sizes)
    lanes = CopyLanes(copies.works(), (copies.note_launched,))
    states = [(source, target) for source, target in states if source > 2 and target > 2]  # blocks come first
    lanes.start([order(0, Lane.TO_HOST, blocks, states)])
    lanes.wait([0])
    device.zero_()
    back = [[(target, source) for source, target in pairs] for pairs in (blocks, states)]
    lanes.start([order(1, Lane.TO_DEVICE, *back)])
    lanes.wait([1])
    for size, pairs in ((8, blocks), (40, states)):
        for source, _ in pairs:
            assert torch.equal(device[source * size : (source + 1) * size], before[source * size : (source + 1) * size])
    lanes.close()


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 20))
def test_copy_parts_do_not_cross_the_end_of_a_pinned_range(target: int, num_bytes: int, pinned: int) -> None:
    parts = list(Piece(5, target, num_bytes).cut(pinned - target % pinned, pinned))
    copied = [(part.source + offset, part.target + offset) for part in parts for offset in range(part.num_bytes)]
    assert copied == [(5 + offset, target + offset) for offset in range(num_bytes)]
    assert all(part.target // pinned == (part.target + part.num_bytes - 1) // pinned for part in parts)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_copy_over_several_pinned_ranges_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PINNED_AT_ONCE", 2**16)
    monkeypatch.setattr(copy_lanes, "PART_BYTES", 2**12)
    slab = SlabShape(blocks_per_slab=3, slots_per_slab=2)
    unit = UnitBytes(state=45_000, block=30_000, token_row=16, state_row=16)
    memory = HostMemory(4, slab, unit, LeastRecentlyUsed(), block_size=16, device=torch.device(DEVICE))
    device = torch.randint(256, (memory.bytes.numel(),), dtype=torch.uint8, device=DEVICE)
    lanes = memory.copies(device, None)
    blocks = [(pair, pair) for pair in range(12)]
    lanes.start([order(0, Lane.TO_HOST, blocks)])
    lanes.wait([0])
    assert lanes.status(0) is CopyStatus.DONE and torch.equal(memory.bytes, device.cpu())
    lanes.start([order(1, Lane.TO_DEVICE, [(source, 11 - source) for source, _ in blocks])])
    lanes.wait([1])
    assert lanes.status(1) is CopyStatus.DONE
    assert torch.equal(device.view(12, -1).flip(0).flatten().cpu(), memory.bytes)
    lanes.close()


def test_each_lane_copies_in_order_independently_of_the_other() -> None:
    made: list[int] = []
    allowed = threading.Event()

    def slow(reports: CopyOrder) -> None:
        assert allowed.wait(20)
        made.append(reports.number)

    lanes = CopyLanes({Lane.TO_HOST: slow, Lane.TO_DEVICE: lambda reports: made.append(reports.number)})
    lanes.start([order(0, Lane.TO_HOST), order(1, Lane.TO_HOST), order(2, Lane.TO_DEVICE)])
    lanes.wait([2])
    assert made == [2] and lanes.status(0) is lanes.status(1) is CopyStatus.UNDER_WAY
    allowed.set()
    lanes.wait([0, 1])
    assert made == [2, 0, 1] and lanes.status(1) is CopyStatus.DONE
    lanes.forget(1)
    with pytest.raises(KeyError):
        lanes.status(1)
    lanes.close()


@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("lost"), MemoryError()])
def test_copies_continue_after_a_failed_copy(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def work(reports: CopyOrder) -> None:
        if reports.number == 0:
            raise error

    lanes = CopyLanes({Lane.TO_DISK: work})
    lanes.start([order(0, Lane.TO_DISK), order(1, Lane.TO_DISK)])
    lanes.wait([0, 1])
    assert lanes.status(0) is CopyStatus.FAILED and lanes.status(1) is CopyStatus.DONE
    assert "a copy host to disk has failed" in caplog.text
    lanes.close()


def test_hook_runs_immediately_before_its_copy_starts() -> None:
    noted: list[Callable[[], None] | int] = []
    lanes = CopyLanes({Lane.TO_HOST: lambda reports: None}, (lambda reports: noted.append(reports.number),))
    lanes.start([order(4, Lane.TO_HOST)])
    assert noted == [4]
    lanes.close()
