"""Progress while weights load."""

import io
import sys

import pytest

from megatron_mamba_cache.models.checkpoints import loading_progress as module
from megatron_mamba_cache.models.checkpoints.loading_progress import loading_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(count: int) -> None:
    with loading_progress(count) as advance:
        for _ in range(count):
            advance()


def test_loading_shows_one_progress_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(7)
    assert "7/7" in terminal.getvalue() and terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize(("every", "lines"), [(5.0, 0), (0.0, 3)])
def test_slow_loading_prints_progress_lines_without_a_terminal(
    every: float, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", every)
    load(3)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"loading weights: {done} of 3 tensors" for done in range(1, lines + 1)]
