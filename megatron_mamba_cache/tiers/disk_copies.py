"""Copies between a rank's host memory and its part of a cache directory."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ..policy.tiers.copies import CopyOrder, Lane
from .cache_directory import CacheDirectory
from .copy_lanes import PlaceBytes, Work
from .entry_files import BrokenEntryError, EntryForm, read_entry, remove_entries, write_entry


class DiskCopies:
    """Writes and reads entries from and into host memory, [bytes] uint8.

    Args:
        directory: Returns the one in use: new weights have another.
    """

    def __init__(self, host: Tensor, sizes: PlaceBytes, directory: Callable[[], CacheDirectory]) -> None:
        self._host = memoryview(host.numpy().data)
        self._sizes = sizes
        self._directory = directory
        self._places: dict[int, tuple[Path, EntryForm]] = {}

    def works(self) -> dict[Lane, Work]:
        """Return what makes the copies of the two lanes."""
        return {Lane.TO_DISK: self._write_or_remove, Lane.FROM_DISK: self._read}

    def note_started(self, order: CopyOrder) -> None:
        """Let a copy use the entries of the present generation, whatever is flushed before it is made."""
        if order.files:
            directory = self._directory()
            self._places[order.number] = directory.entries, directory.form

    def _write_or_remove(self, order: CopyOrder) -> None:
        folder, form = self._places.pop(order.number)
        if not order.states:
            remove_entries(folder, order.files)
            return
        blocks = (self._block(place, form) for _, place in order.blocks)
        write_entry(folder, order.files[0], form, self._state(order.states[0][1], form), blocks)

    def _read(self, order: CopyOrder) -> None:
        folder, form = self._places.pop(order.number)
        blocks = {index: self._block(place, form) for index, place in order.blocks}
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

    def _block(self, place: int, form: EntryForm) -> memoryview:
        first = place * self._sizes.block
        return self._host[first : first + form.block_bytes]
