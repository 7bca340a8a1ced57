"""Entries are read as they were written, or not at all."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.policy.tiers.copies import EntryName
from megatron_mamba_cache.tiers.entry_files import (
    BrokenEntryError,
    EntryForm,
    entries_in,
    entry_name,
    file_name,
    read_entry,
    remove_entries,
)
from tests.tiers.written_entries import FORM, NAME, written


def read(directory: Path, name: EntryName = NAME, form: EntryForm = FORM) -> list[bytes]:
    """Return an entry's state and blocks."""
    state = bytearray(form.state_bytes)
    first = name.depth - name.num_blocks
    blocks = {first + index: bytearray(form.block_bytes) for index in range(name.num_blocks)}
    read_entry(directory, name, form, memoryview(state), {index: memoryview(block) for index, block in blocks.items()})
    return [bytes(state), *(bytes(blocks[index]) for index in sorted(blocks))]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 50), st.integers(0, 50), st.integers(0, 9))
def test_entry_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, num_blocks: int, before: int, state: int, block: int, seed: int
) -> None:
    directory, form = tmp_path_factory.mktemp("entries"), EntryForm(FORM.identity, state, block)
    name = EntryName(key=5 + seed, anchor=seed, depth=before + num_blocks, num_blocks=num_blocks)
    pieces = written(directory, name, form, seed)
    assert read(directory, name, form) == pieces
    assert entries_in(directory, form, 0) == [name]
    assert (directory / file_name(name)).stat().st_size == form.size_of(name)


def test_partial_read_still_verifies_the_whole_file(tmp_path: Path) -> None:
    pieces = written(tmp_path)
    block = bytearray(FORM.block_bytes)
    read_entry(tmp_path, NAME, FORM, None, {7: memoryview(block)})
    assert bytes(block) == pieces[3]  # blocks 5 to 8 of the text


def test_flipped_byte_anywhere_is_detected(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / file_name(NAME)
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(BrokenEntryError):
            read(tmp_path)
    path.write_bytes(whole)
    read(tmp_path)


@pytest.mark.parametrize("change", [lambda whole: whole[:-1], lambda whole: whole + b"0", lambda whole: b""])
def test_truncated_file_is_detected_and_removed(tmp_path: Path, change: object) -> None:
    written(tmp_path)
    path = tmp_path / file_name(NAME)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(BrokenEntryError):
        read(tmp_path)
    assert entries_in(tmp_path, FORM, 0) == [] and not path.exists()


def test_entry_of_another_identity_or_text_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(BrokenEntryError):
        read(tmp_path, form=EntryForm(bytes(32), FORM.state_bytes, FORM.block_bytes))
    other = EntryName(NAME.key, NAME.anchor + 1, NAME.depth, NAME.num_blocks)
    (tmp_path / file_name(NAME)).rename(tmp_path / file_name(other))
    with pytest.raises(BrokenEntryError):
        read(tmp_path, other)


def test_unknown_and_stale_temporary_files_are_removed_but_folders_are_kept(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("foreign")
    (tmp_path / "old.unfinished").write_text("half")
    os.utime(tmp_path / "old.unfinished", (1, 1))
    (tmp_path / "new.unfinished").write_text("half")
    assert entries_in(tmp_path, FORM, unfinished_before=100) == [NAME]
    assert {path.name for path in tmp_path.iterdir()} == {file_name(NAME), "folder", "new.unfinished"}
    remove_entries(tmp_path, [NAME, NAME])
    assert entries_in(tmp_path, FORM, 0) == []


@pytest.mark.parametrize("call", [1, 3, 6])
def test_write_to_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    write, calls = os.write, []

    def full(file: int, piece: memoryview) -> int:
        calls.append(file)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "no space left")
        return write(file, piece)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space left"):
        written(tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 2**256 - 1), st.integers(0, 2**256 - 1), st.integers(1, 10**8), st.integers(1, 10**8))
def test_file_names_encode_the_entry(key: int, anchor: int, depth: int, num_blocks: int) -> None:
    name = EntryName(key, anchor, max(depth, num_blocks), min(depth, num_blocks))
    assert entry_name(file_name(name)) == name


@pytest.mark.parametrize(
    "text", ["", "x.boundary", file_name(NAME)[1:], file_name(NAME).upper(), "a" + file_name(NAME)]
)
def test_invalid_file_names_do_not_parse(text: str) -> None:
    assert entry_name(text) is None
