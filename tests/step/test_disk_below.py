"""The thread that watches a shared cache directory: when it lists the directory, and what it finds."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_mamba_cache.policy.tiers.copies import EntryName
from megatron_mamba_cache.step import disk_below
from megatron_mamba_cache.step.disk_below import _LOOKS_AFTER_A_CHANGE, _Watch

INTERVAL_S = 0.005
WAIT_S = 10.0


class Directory:
    """Fake directory with entries and a change time; `late` entries appear after a listing, with the same timestamp."""

    def __init__(self) -> None:
        self.names: list[EntryName] = []
        self.late: list[EntryName] = []
        self.time = 1
        self.num_looks = self.num_lists = 0
        self.lock = threading.Lock()

    def changed_at(self) -> int | None:
        with self.lock:
            self.num_looks += 1
            return self.time

    def shared_entries(self) -> list[EntryName]:
        with self.lock:
            self.num_lists += 1
            found = list(self.names)
            self.names += self.late
            self.late = []
            return found

    def add(self, name: EntryName, *late: EntryName) -> None:
        with self.lock:
            self.names.append(name)
            self.late += late
            self.time += 1


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
def watch(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watch]:
    monkeypatch.setattr(disk_below, "_LOOK_INTERVAL_S", INTERVAL_S)
    watch = _Watch(directory)
    yield watch
    watch.close()


def entry(key: int) -> EntryName:
    return EntryName(key, 0, 1, 1)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(INTERVAL_S / 5)


def test_unchanged_cache_directory_is_listed_only_a_few_times(watch: _Watch, directory: Directory) -> None:
    wait_until(lambda: directory.num_looks > 4 * _LOOKS_AFTER_A_CHANGE)
    assert directory.num_lists == _LOOKS_AFTER_A_CHANGE


def test_new_disk_entries_are_reported_once(watch: _Watch, directory: Directory) -> None:
    wait_until(lambda: directory.num_looks > _LOOKS_AFTER_A_CHANGE)
    watch.take()
    directory.add(entry(1))
    wait_until(lambda: directory.num_lists > _LOOKS_AFTER_A_CHANGE)
    wait_until(lambda: directory.num_lists == 2 * _LOOKS_AFTER_A_CHANGE and watch._found)
    assert list(watch.take()) == [entry(1)]
    assert not watch.take()


def test_disk_entry_written_within_the_same_timestamp_is_found(watch: _Watch, directory: Directory) -> None:
    directory.add(entry(1), entry(2))
    wait_until(lambda: entry(2) in watch.take())


def test_no_disk_entry_written_during_a_listing_is_lost(watch: _Watch, directory: Directory) -> None:
    found: set[EntryName] = set()
    for key in range(1, 200):
        directory.add(entry(key))
        found.update(watch.take())
    wait_until(lambda: found.update(watch.take()) or len(found) == 199)
