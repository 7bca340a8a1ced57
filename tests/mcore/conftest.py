"""The draft-state modes that engines are tested with."""

import pytest

from tests.mcore.engine_runs import UsualForm


@pytest.fixture(params=["replay", pytest.param("window", marks=pytest.mark.long)])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each draft-state mode, as GPUs use one or the other."""
    monkeypatch.setattr(UsualForm, "draft_states", request.param)
