"""Copies between tiers that end late, fail or leave incomplete data, as chosen by a random seed."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from megatron_mamba_cache.policy.tiers.copies import CopyOrder, CopyStatus, Lane
from megatron_mamba_cache.tiers.cache_directory import CacheDirectory
from megatron_mamba_cache.tiers.copy_lanes import DeviceCopies, UnitSizes, Work
from megatron_mamba_cache.tiers.entry_files import BrokenEntryError
from megatron_mamba_cache.tiers.host_memory import DiskCopies, HostMemory

_FAILING_SHARE = 0.15
_LATE_SHARE = 0.5


class UnreliableCopies:
    """`Copies` that run the real copy functions, some of them late or with a failure; a failed copy leaves noise.

    The order of events depends only on the seed.

    Args:
        before: Functions called with each order that is started.
    """

    def __init__(
        self,
        works: dict[Lane, Work],
        before: Sequence[Callable[[CopyOrder], None]],
        device: torch.Tensor,
        host: torch.Tensor,
        sizes: UnitSizes,
    ) -> None:
        self.rng = random.Random(0)
        self._before = before
        self.seen: Counter[str] = Counter()
        self._works = works
        self._targets = {Lane.TO_HOST: host, Lane.TO_DEVICE: device, Lane.FROM_DISK: host}
        self._sizes = sizes
        self._orders: dict[int, CopyOrder] = {}
        self._polls_left: dict[int, int] = {}
        self._failing: set[int] = set()
        self._ended: dict[int, CopyStatus] = {}

    def start(self, orders: Sequence[CopyOrder]) -> None:
        for order in orders:
            self._orders[order.number] = order
            self._polls_left[order.number] = self.rng.randrange(1, 6) if self.rng.random() < _LATE_SHARE else 0
            if self.rng.random() < _FAILING_SHARE:
                self._failing.add(order.number)
            self._tear(order)  # launched work on the device, for which the copy must wait
            for note in self._before:
                note(order)

    def status(self, number: int) -> CopyStatus:
        if self._polls_left[number]:
            self._polls_left[number] -= 1
            self.seen["copies_late"] += 1
            return CopyStatus.UNDER_WAY
        if number not in self._ended:  # another rank may not have ended it
            self._ended[number] = self._end(number)
        return self._ended[number]

    def wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._polls_left[number] = 0

    def forget(self, number: int) -> None:
        del self._orders[number], self._polls_left[number], self._ended[number]
        self._failing.discard(number)

    def close(self) -> None:
        """Assert that no copy is in flight."""
        assert not self._orders

    def _end(self, number: int) -> CopyStatus:
        order = self._orders[number]
        if number in self._failing:
            self.seen["copies_failed"] += 1
            self._tear(order)
            return CopyStatus.FAILED
        try:
            self._works[order.lane](order)
        except (OSError, BrokenEntryError):
            self.seen["files_failed"] += 1
            return CopyStatus.FAILED
        return CopyStatus.DONE

    def _tear(self, order: CopyOrder) -> None:
        """Fill the target of a copy with noise."""
        if order.lane in self._targets:
            for piece in self._sizes.pieces(order):  # ranges of the target memory
                noise = self.rng.randrange(256)
                self._targets[order.lane][piece.target : piece.target + piece.num_bytes] = noise


class _Seen:
    def __init__(self) -> None:
        self.made: list[UnreliableCopies] = []

    @property
    def seen(self) -> Counter[str]:
        """Number of copies by outcome, over all instances."""
        return sum((copies.seen for copies in self.made), Counter())


@contextmanager
def unreliable_copies(seed: int) -> Iterator[_Seen]:
    """Context manager: tiers that are created in its body use unreliable copies."""
    found, rng = _Seen(), random.Random(seed)

    def copies(
        self: HostMemory, device: torch.Tensor, directory: Callable[[], CacheDirectory] | None
    ) -> UnreliableCopies:
        sizes = UnitSizes(self.block_bytes, self.slot_bytes)
        by_device = DeviceCopies(device, self.bytes, sizes)
        works, before = by_device.works(), [by_device.note_launched]
        if directory is not None:
            by_disk = DiskCopies(self.bytes, sizes, directory)
            works |= by_disk.works()
            before.append(by_disk.note_started)
        made = UnreliableCopies(works, before, device, self.bytes, sizes)
        made.rng = random.Random(rng.random())
        found.made.append(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "copies", copies)
        yield found
