"""The disk tier on the ranks of a model: its directory, and the index of the entries that lookups can find."""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config import CacheConfig
from ..policy.tiers.copies import EntryName
from ..policy.tiers.disk_index import DiskIndex
from ..ranks.group import Ranks, on_all_ranks
from ..recurrences.model_shape import HybridModelShape
from ..tiers.cache_directory import CacheDirectory
from ..tiers.entry_files import EntryForm, remove_entries

_FORMAT = 1
_USUAL_GB = 100.0
_LOOK_INTERVAL_S = 1.0
_LOOKS_AFTER_A_CHANGE = 3
"""Number of listings after the directory's timestamp changes; timestamps may have a resolution of only 2 s."""


class DiskBelow:
    """The disk tier's directory for the model's current weights, reopened after each flush.

    The directory is identified by a hash of the weights on all ranks, the model, dtypes, dimensions and rank layout.

    Args:
        weights: Function that returns a digest of this rank's weights.

    Raises:
        CacheError: If the directory cannot be used, on any of the ranks.
        ValueError: If the directory is configured on some ranks only, or its size limit is too low for one entry.
    """

    def __init__(
        self, config: CacheConfig, shape: HybridModelShape, ranks: Ranks, weights: Callable[[], bytes]
    ) -> None:
        self._config = config
        self._shape = shape
        self._ranks = ranks
        self._weights = weights
        self._directory: CacheDirectory | None = None
        self._watch: _Watch | None = None
        units = ranks.gather(shape.unit_bytes(config))
        form = EntryForm(b"", max(unit.state for unit in units), max(unit.block for unit in units))
        limit_gb = _USUAL_GB if config.disk_cache_gb is None else config.disk_cache_gb
        (limit,) = ranks.least([int(limit_gb * 2**30)])
        least = form.entry_bytes + form.block_bytes
        if limit < least:
            raise ValueError(
                f"disk_cache_gb is {limit_gb:g} GiB, but one entry takes {least} bytes: set --disk-cache-gb to "
                f"{(least + 2**20) / 2**30:.6f} or more"
            )
        self._limit = limit
        self.index = DiskIndex(form.block_bytes, form.entry_bytes, limit)

    @property
    def directory(self) -> CacheDirectory:
        """Directory of this rank; available after `open`."""
        assert self._directory is not None
        return self._directory

    def open(self, least: int = 0, *, is_flush: bool = False) -> int:
        """Open the directory for the current weights; return its generation, which is the same on all ranks.

        Args:
            least: Lower bound for the generation.
            is_flush: True if entries written before must never be found again.
        """
        form = self._form()
        if self._directory is None or self._directory.form != form:
            if is_flush and self._directory is not None:  # a flush also discards the entries of the previous weights
                before = self._directory
                on_all_ranks(self._ranks, lambda: before.open(before.next_generation()))
            self.close()
            base, part = Path(self._config.disk_cache_dir or ""), f"{self._ranks.index}-of-{self._ranks.num_ranks}"
            self._directory = on_all_ranks(self._ranks, lambda: CacheDirectory(base, form, part))
            self._directory.remove_unused(self._limit)
        directory = self._directory
        known = on_all_ranks(self._ranks, directory.next_generation if is_flush else directory.known_generation)
        generation: int = max(least, *self._ranks.gather(known))
        self._stop_watching()
        found = self._ranks.gather(on_all_ranks(self._ranks, lambda: directory.open(generation)))
        self.index.clear()
        everywhere = set(found[0]).intersection(*found[1:])
        for name in found[0]:
            if name in everywhere:
                self.index.add(name)
        remove_entries(directory.entries, self.index.trim())
        if self._ranks.num_ranks == 1:
            self._watch = _Watch(directory)
        return generation

    def note_shared(self) -> None:
        """Index entries written by other servers. With several ranks, do nothing, because ranks could disagree."""
        for name in () if self._watch is None else self._watch.take():
            if name.key not in self.index:
                self.index.add(name)

    def disable(self) -> None:
        """Close the directory and the index, so that no entries are found or written."""
        self.close()
        self.index.close()

    def close(self) -> None:
        """Close the directory and stop watching it."""
        self._stop_watching()
        if self._directory is not None:
            self._directory.close()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _form(self) -> EntryForm:
        config, shape = self._config, self._shape
        unit, states = shape.unit_bytes(config), shape.cached_layout(config)
        mine = (self._ranks.index, unit, states, shape.layer_types, self._weights().hex())
        model = shape.cache_fingerprint(config)
        settings = (_FORMAT, self._ranks.num_ranks, model, config.block_size_tokens, shape.params_dtype)
        identity = hashlib.sha256(repr((settings, self._ranks.gather(mine))).encode()).digest()
        return EntryForm(identity, unit.state, unit.block)


class _Watch:
    """Thread that lists the directory after it changes, so that steps need not read from the disk."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._found: deque[Sequence[EntryName]] = deque(maxlen=1)  # latest listing, until it is taken
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared cache directory", daemon=True)
        self._thread.start()

    def take(self) -> Sequence[EntryName]:
        """Return the latest listing of entries; empty if there is none, or if it was returned before."""
        try:
            return self._found.popleft()
        except IndexError:
            return ()

    def close(self) -> None:
        """Stop the thread."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        seen, num_looks = None, 0
        while not self._ends.wait(_LOOK_INTERVAL_S):
            changed = self._directory.changed_at()  # read before listing, so that later changes are seen
            num_looks = num_looks + 1 if changed == seen else 1
            seen = changed
            if num_looks <= _LOOKS_AFTER_A_CHANGE:
                self._found.append(self._directory.shared_entries())
