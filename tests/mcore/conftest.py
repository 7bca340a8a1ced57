"""Settings of torch under which engines are compared with the fp64 oracle."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def exact_fp32() -> None:
    """Switch TF32 off; one thread is the fastest for models this small."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
