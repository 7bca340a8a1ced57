"""Start Megatron's process groups for one process, so that a script needs no launcher."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker


def initialize_single_process() -> None:
    """Initialize torch.distributed and Megatron's model-parallel state for one rank; nothing if they are already."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
