"""Settings of torch under which engines are compared with the fp64 oracle."""

import pytest
import torch

from tests.mcore.engine_runs import UsualForm


@pytest.fixture(autouse=True, scope="session")
def exact_fp32() -> None:
    """Switch TF32 off; one thread is the fastest for models this small."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(params=["replay", pytest.param("window", marks=pytest.mark.long)])
def either_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each form of draft states, as GPUs take one or the other."""
    monkeypatch.setattr(UsualForm, "draft_states", request.param)
