"""The plain copies that benchmarks compare with move the bytes that they say, within their memory."""

from collections.abc import Iterator

import pytest
import torch

from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def graph_timing(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    yield pytest.importorskip("graph_timing")


def test_copies_walk_over_all_of_the_memory(graph_timing: object) -> None:
    memory = torch.arange(16 * 256, dtype=torch.int32).to(torch.uint8)
    source = memory.view(2, 8, 256)[0] + 3
    memory.view(2, 8, 256)[0] = source
    copies = graph_timing.memcpys(memory, 512, 4)
    for number, copy in enumerate(copies):
        assert not torch.equal(memory.view(2, 4, 512)[1, number], source.view(4, 512)[number])
        copy()
        assert torch.equal(memory.view(2, 4, 512)[1, number], source.view(4, 512)[number])


def test_copies_larger_than_a_piece_are_cut(graph_timing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_timing, "PIECE_BYTES", 512)
    memory = torch.zeros(4096, dtype=torch.uint8)
    memory[:2048] = 1
    (copy,) = graph_timing.memcpys(memory, 1024, 1)
    copy()
    assert memory.sum() == 2048 + 1024


def test_memory_too_small_for_a_copy_is_refused(graph_timing: object) -> None:
    with pytest.raises(ValueError, match="at least 1024 bytes"):
        graph_timing.memcpys(torch.zeros(512, dtype=torch.uint8), 512, 1)
