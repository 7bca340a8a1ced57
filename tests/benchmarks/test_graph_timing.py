"""Plain copies of the benchmarks copy the requested number of bytes within their memory."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def graph_timing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    yield import_module("measuring.graph_timing")


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.ones(2**20, dtype=torch.uint8)


@pytest.fixture
def counted_bytes(
    graph_timing: ModuleType, memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """Replace the timer: run each launch once and count one microsecond per KiB that it changed."""
    measured = []

    def launch_us(launches: list, expected_us: float) -> float:
        for launch in launches:
            memory.view(2, -1)[1] = 0
            launch()
            changed = int(memory.view(2, -1)[1].count_nonzero())
        measured.append((len(launches), changed))
        return changed / 1024

    monkeypatch.setattr(graph_timing, "launch_us", launch_us)
    return measured


def test_measured_copies_cover_all_of_the_memory(graph_timing: ModuleType) -> None:
    memory = torch.arange(16 * 256, dtype=torch.int32).to(torch.uint8)
    source = memory.view(2, 8, 256)[0] + 3
    memory.view(2, 8, 256)[0] = source
    copies = graph_timing.memcpys(memory, 512, 4)
    for number, copy in enumerate(copies):
        assert not torch.equal(memory.view(2, 4, 512)[1, number], source.view(4, 512)[number])
        copy()
        assert torch.equal(memory.view(2, 4, 512)[1, number], source.view(4, 512)[number])


def test_small_copies_are_measured_at_their_own_size(
    graph_timing: ModuleType, memory: torch.Tensor, counted_bytes: list[tuple[int, int]]
) -> None:
    assert graph_timing.memcpy_us(memory, 64 * 1024) == 64
    assert counted_bytes == [(8, 64 * 1024)]


def test_large_copies_are_scaled_from_the_limit(
    graph_timing: ModuleType,
    memory: torch.Tensor,
    counted_bytes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_timing, "MOST_COPIED", 128 * 1024)
    assert graph_timing.memcpy_us(memory, 3 * 2**20) == 3 * 1024
    assert counted_bytes == [(4, 128 * 1024)]


def test_note_under_the_table_names_the_copy_limit(graph_timing: ModuleType) -> None:
    assert f"{graph_timing.MOST_COPIED >> 20} MiB" in graph_timing.MEMCPY_NOTE


def test_memory_too_small_for_a_copy_is_refused(graph_timing: ModuleType) -> None:
    with pytest.raises(ValueError, match="at least 1024 bytes"):
        graph_timing.memcpys(torch.zeros(512, dtype=torch.uint8), 512, 1)
