"""Settings under which engines are compared with the fp64 oracle."""

import pytest

from tests.mcore.engine_runs import UsualForm
from tests.usual_settings import set_usual


@pytest.fixture(autouse=True, scope="session")
def usual_settings() -> None:
    """See `set_usual`."""
    set_usual()


@pytest.fixture(params=["replay", pytest.param("window", marks=pytest.mark.long)])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each form of draft states, as GPUs take one or the other."""
    monkeypatch.setattr(UsualForm, "draft_states", request.param)
