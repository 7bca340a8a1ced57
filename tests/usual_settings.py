"""Settings under which tiny models on any device are compared with the fp64 oracle and with transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from megatron_mamba_cache.mcore import model_reading


def set_usual() -> None:
    """Switch TF32 off, take one thread, and reckon with a CPU's speed: drafts of such models never pay on a GPU."""
    torch.set_num_threads(1)  # the fastest for models this small
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model_reading.GPU = model_reading.CPU


@contextmanager
def usual() -> Iterator[None]:
    """Do so in the block; behind it steps are reckoned by the device again."""
    with patch.object(model_reading, "GPU", model_reading.GPU):
        set_usual()
        yield
