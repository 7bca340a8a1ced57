"""Host memory for cached states and KV blocks, in the device's slab layout, and its copies to and from disk."""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheCapacityError
from ..policy.eviction_rules import EvictionRule
from ..policy.pools import CachePools
from ..policy.slabs import SlabSpace
from ..policy.tiers.copies import CopyOrder, Lane
from ..recurrences.slab_shape import SlabShape, UnitBytes
from .cache_directory import CacheDirectory
from .copy_lanes import PART_BYTES, CopyLanes, DeviceCopies, MeasuredTimes, UnitSizes, Work
from .entry_files import BrokenEntryError, EntryForm, read_entry, remove_entries, write_entry

_PINNED_AT_ONCE = 1024 * PART_BYTES
"""Maximum number of bytes pinned in one call; drivers refuse to pin several hundred GiB in one call."""


class HostMemory:
    """One rank's memory and bookkeeping for the host tier. Both are kept while an engine is suspended.

    Args:
        num_slabs: Number of slabs, equal on all ranks of the model.
        slab: Layout of the device's slabs.
        unit: Sizes in bytes of this rank's shard of a state and of a block.
        rule: Eviction rule for states in host memory.
        device: Device of the rank's states. For a CUDA device, the host memory is pinned, and is on the device's NUMA
            node if that node is known.

    Raises:
        CacheCapacityError: If the memory cannot be allocated or pinned.
    """

    def __init__(
        self,
        num_slabs: int,
        slab: SlabShape,
        unit: UnitBytes,
        rule: EvictionRule,
        *,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.slab_bytes = slab.slab_bytes(unit)
        self.block_bytes = self.slab_bytes // slab.blocks_per_slab
        self.slot_bytes = self.slab_bytes // slab.slots_per_slab
        self.times = MeasuredTimes()
        self.bytes = _allocated(num_slabs * self.slab_bytes, device)
        if device.type == "cuda":
            weakref.finalize(self, _unpin, self.bytes)
        space = SlabSpace(num_slabs, slab.blocks_per_slab, slab.slots_per_slab)
        self.pools = CachePools.over(space, rule, block_size=block_size)

    def copies(self, device: Tensor, directory: Callable[[], CacheDirectory] | None) -> CopyLanes:
        """Start the threads that copy between device memory, this host memory and the disk; return the copy engine.

        Args:
            device: [bytes] uint8, device memory with the same slab layout.
            directory: Function that returns the directory of the disk tier; None without a disk tier.
        """
        sizes = UnitSizes(self.block_bytes, self.slot_bytes)
        by_device = DeviceCopies(device, self.bytes, sizes)
        if directory is None:
            return CopyLanes(by_device.works(), (by_device.note_launched,), sizes, self.times)
        by_disk = DiskCopies(self.bytes, sizes, directory)
        notes = by_device.note_launched, by_disk.note_started
        return CopyLanes(by_device.works() | by_disk.works(), notes, sizes, self.times)

    def flush(self) -> None:
        """Drop all states and blocks from the host tier; the caller ensures that no copy is in progress."""
        self.pools.slots.flush()
        self.pools.kv.flush()


def _allocated(num_bytes: int, device: torch.device) -> Tensor:
    try:
        memory = _pages(num_bytes)
        if device.type == "cuda":
            _pin(memory, device)
    except (RuntimeError, MemoryError, OSError) as error:
        raise CacheCapacityError(
            f"cannot allocate {num_bytes / 2**30:.3g} GiB of host memory: {error}; lower --host-cache-gb"
        ) from error
    return memory


def _pages(num_bytes: int) -> Tensor:
    """Allocate zeroed memory, [bytes] uint8, in huge pages if the host supports them."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Pin memory piece by piece, on the device's NUMA node if its CPUs are known."""
    allowed = os.sched_getaffinity(0)
    near = _cpus_near(device) & allowed
    try:
        if near:
            os.sched_setaffinity(0, near)  # Linux allocates a page on the NUMA node of the CPU that first touches it
        for piece in memory.split(_PINNED_AT_ONCE):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
    finally:
        os.sched_setaffinity(0, allowed)


def _unpin(memory: Tensor) -> None:
    for piece in memory.split(_PINNED_AT_ONCE):
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _cpus_near(device: torch.device) -> set[int]:
    """Return the CPUs of the device's NUMA node; an empty set if they are not known."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        text = Path(f"/sys/bus/pci/devices/{address}/local_cpulist").read_text(encoding="ascii")
        return {cpu for part in text.strip().split(",") if part for cpu in _range_of(part)}
    except (AttributeError, OSError, ValueError):
        return set()


def _range_of(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


class DiskCopies:
    """Writes entries from host memory to disk, reads them back, and removes their files.

    Args:
        host: [bytes] uint8, the memory of the host tier.
        directory: Function that returns the directory of the disk tier, which changes with the weights.
    """

    def __init__(self, host: Tensor, sizes: UnitSizes, directory: Callable[[], CacheDirectory]) -> None:
        self._host = memoryview(host.numpy().data)
        self._sizes = sizes
        self._directory = directory
        self._homes: dict[int, tuple[Path, EntryForm]] = {}

    def works(self) -> dict[Lane, Work]:
        """Return the functions that copy to and from disk, keyed by lane."""
        return {Lane.TO_DISK: self._write_or_remove, Lane.FROM_DISK: self._read}

    def note_started(self, order: CopyOrder) -> None:
        """Record the current generation's directory for a copy, because a flush may happen before the copy runs."""
        if order.files:
            directory = self._directory()
            self._homes[order.number] = directory.entries, directory.form

    def _write_or_remove(self, order: CopyOrder) -> None:
        folder, form = self._homes.pop(order.number)
        if not order.states:
            remove_entries(folder, order.files)
            return
        blocks = (self._block(block, form) for _, block in order.blocks)
        write_entry(folder, order.files[0], form, self._state(order.states[0][1], form), blocks)

    def _read(self, order: CopyOrder) -> None:
        folder, form = self._homes.pop(order.number)
        blocks = {index: self._block(block, form) for index, block in order.blocks}
        for name in order.files:
            state = self._state(order.states[0][1], form) if name is order.files[-1] else None
            try:
                read_entry(folder, name, form, state, blocks)
            except BrokenEntryError:
                remove_entries(folder, [name])
                raise

    def _state(self, slot: int, form: EntryForm) -> memoryview:
        first = slot * self._sizes.state
        return self._host[first : first + form.state_bytes]

    def _block(self, block: int, form: EntryForm) -> memoryview:
        first = block * self._sizes.block
        return self._host[first : first + form.block_bytes]
