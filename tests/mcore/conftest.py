"""Settings under which engines are compared with the fp64 oracle."""

from collections.abc import Iterator

import pytest

from tests.mcore.engine_runs import UsualForm
from tests.usual_settings import usual


@pytest.fixture(autouse=True, scope="module")
def usual_settings() -> Iterator[None]:
    """See `usual`."""
    with usual():
        yield


@pytest.fixture(params=["replay", pytest.param("window", marks=pytest.mark.long)])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each form of draft states, as GPUs take one or the other."""
    monkeypatch.setattr(UsualForm, "draft_states", request.param)
