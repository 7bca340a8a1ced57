"""Start Megatron's process groups: for one process, so that a script needs no launcher, or for torchrun's."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker


def initialize_single_process() -> None:
    """Initialize torch.distributed and Megatron's model-parallel state for one rank, unless they are already."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)


def initialize_several_processes(tensor_size: int, pipeline_size: int, expert_size: int) -> None:
    """Initialize both for the processes that torchrun has started; each has chosen its CUDA device, where there is one.

    Args:
        tensor_size, pipeline_size, expert_size: Ranks that share a model's layers, its depth and its experts; the
            remaining processes form replicas.
    """
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        expert_model_parallel_size=expert_size,
    )
    initialize_rng_tracker(inference_rng_tracker=True)
