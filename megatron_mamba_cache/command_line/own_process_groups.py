"""Leave torch.distributed as it was found."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Destroy the process groups that the block started; keep earlier ones."""
    were_there = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not were_there:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
