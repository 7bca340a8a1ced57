"""The host-tier benchmark restores sessions of a tiny model while requests decode."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.command_line.command_runs import REPOSITORY


def test_sessions_are_restored_and_offloaded_during_decoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    import_module("host_tier").main(
        ["--shape", "tiny", "--rounds", "1", "--cold-rounds", "2", "--json", str(tmp_path / "found.json")]
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["returns"]["from_host_ms"] and found["returns"]["on_card_ms"]
    assert found["restores"]["under_way"] and found["writes"]["under_way"]
    assert len(found["cold"]) == 2 and min(found["cold"]) > 0
    assert "Without hits: " in capsys.readouterr().out
