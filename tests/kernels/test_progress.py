"""Log lines for slow operations."""

import logging
import time

import pytest

from megatron_mamba_cache.kernels import progress as progress_module
from megatron_mamba_cache.kernels.progress import ProgressLine, progress


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 10
    while text not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the captured log; a line is written almost without delay."""
    monkeypatch.setattr(progress_module, "_SILENT_S", 0.01)
    caplog.set_level(logging.WARNING)
    return caplog


def test_slow_operation_is_logged(log: pytest.LogCaptureFixture) -> None:
    with progress("compiling"):
        wait_for("compiling ...", log)
    assert messages(log) == ["compiling ...", "... done after 0 s"]


def test_fast_operation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), progress("compiling"):
        pass
    assert not caplog.records


def test_only_the_outermost_slow_operation_is_logged(log: pytest.LogCaptureFixture) -> None:
    with progress("all"):
        with progress("part"):
            wait_for("all ...", log)
        time.sleep(0.05)
    assert messages(log) == ["all ...", "... done after 0 s"]


def test_progress_is_logged_after_an_operation_that_failed_or_ended_twice(log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError), progress("failing"):
        raise OSError
    line = ProgressLine("twice")
    line.end()
    line.end()
    with progress("next"):
        wait_for("next ...", log)
    assert messages(log) == ["next ...", "... done after 0 s"]
