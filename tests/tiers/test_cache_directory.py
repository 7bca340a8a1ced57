"""Generations of a directory survive crashes, and unknown files are kept."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mamba_cache.errors import CacheError
from megatron_mamba_cache.tiers.cache_directory import CacheDirectory
from megatron_mamba_cache.tiers.entry_files import EntryForm, file_name
from tests.tiers.written_entries import FORM, NAME, written

OTHER = EntryForm(bytes(32), FORM.state_bytes, FORM.block_bytes)


def opened(base: Path, form: EntryForm = FORM, part: str = "0-of-1") -> CacheDirectory:
    """Return a directory, open at its current generation."""
    directory = CacheDirectory(base, form, part)
    directory.open(directory.generation)
    return directory


def test_server_finds_entries_written_by_an_earlier_server(tmp_path: Path) -> None:
    first = opened(tmp_path / "cache")
    written(first.entries, form=FORM)
    second = CacheDirectory(tmp_path / "cache", FORM, "0-of-1")
    assert second.open(second.generation) == [NAME]


def test_later_servers_find_no_entries_from_before_a_flush(tmp_path: Path) -> None:
    first = opened(tmp_path)
    written(first.entries)
    old = first.entries
    assert first.open(first.next_generation()) == []
    assert not old.exists()
    second = CacheDirectory(tmp_path, FORM, "0-of-1")
    assert second.generation == first.generation == 1 and second.open(second.generation) == []


def test_two_servers_never_reuse_an_old_generation(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.open(first.next_generation())
    assert second.generation == 0
    second.open(second.next_generation())
    assert second.generation == 2
    first.open(first.next_generation())
    assert first.generation == 3 == CacheDirectory(tmp_path, FORM, "0-of-1").generation


def test_directories_and_files_are_readable_only_by_their_owner(tmp_path: Path) -> None:
    directory = opened(tmp_path / "a" / "cache")
    written(directory.entries)
    made = [tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_unknown_files_are_not_removed(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.txt"
    mine.write_text("mine")
    (tmp_path / "photos").mkdir()
    directory = opened(tmp_path)
    directory.open(directory.next_generation())
    directory.remove_unused(0)
    assert mine.read_text() == "mine" and (tmp_path / "photos").is_dir()


def test_other_weights_and_shards_use_separate_directories(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    written(directory.entries)
    assert opened(tmp_path, OTHER).shared_entries() == []
    assert opened(tmp_path, part="1-of-2").shared_entries() == []
    assert opened(tmp_path).shared_entries() == [NAME]


def test_modification_time_changes_when_an_entry_is_added_or_removed(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    for change in (lambda: written(directory.entries), lambda: (directory.entries / file_name(NAME)).unlink()):
        os.utime(directory.entries, (1, 1))
        assert directory.changed_at() == 10**9
        change()
        assert (directory.changed_at() or 0) > 10**9
    directory.entries.rmdir()
    assert directory.changed_at() is None


def test_unused_directories_are_removed_when_the_disk_limit_is_exceeded(tmp_path: Path) -> None:
    old, used = opened(tmp_path), opened(tmp_path, OTHER)
    written(old.entries)
    written(used.entries, form=OTHER)
    old.close()
    third = opened(tmp_path, EntryForm(bytes(31) + b"3", 8, 8))
    third.remove_unused(10**9)
    assert old.shared_entries() == [NAME]
    third.remove_unused(FORM.size_of(NAME))
    assert not old.entries.exists() and used.shared_entries() == [NAME]


def test_lost_generation_file_is_recovered_from_entries(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.open(directory.next_generation())
    written(directory.entries)
    (directory.entries.parent.parent / "generation").write_text("")
    later = CacheDirectory(tmp_path, FORM, "0-of-1")
    assert later.generation == 1 and later.open(later.generation) == [NAME]
    assert later.open(later.next_generation()) == [] and later.generation == 2


def test_unreadable_generation_file_raises_an_error_with_its_path(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    shutil.rmtree(tmp_path / FORM.identity.hex())
    with pytest.raises(CacheError, match="cannot use --disk-cache-dir"):
        directory.known_generation()


def test_flush_by_another_server_is_known_before_the_directory_is_opened(tmp_path: Path) -> None:
    late, other = CacheDirectory(tmp_path, FORM, "0-of-1"), opened(tmp_path)
    other.open(other.next_generation())
    assert late.generation == 0 and late.known_generation() == 1


def test_truncated_generation_file_counts_as_missing(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    (tmp_path / FORM.identity.hex() / "generation").write_text("")
    assert CacheDirectory(tmp_path, FORM, "0-of-1").generation == 0
    written(directory.entries)
    assert (directory.entries / file_name(NAME)).exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda base: base.write_text("a file"),
        lambda base: (base.mkdir(), (base / FORM.identity.hex()).write_text("a file")),
    ],
)
def test_unusable_directory_raises_a_cache_error(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    base = tmp_path / "cache"
    spoil(base)
    with pytest.raises(CacheError, match=f"cannot use --disk-cache-dir {base}: ") as raised:
        opened(base)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory_raises_a_cache_error(tmp_path: Path) -> None:
    base = tmp_path / "cache"
    base.mkdir(0o500)
    with pytest.raises(CacheError, match="Permission denied"):
        opened(base)
