"""Collectives between the ranks of a model, whose groups are those of Megatron's parallel state."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from ..ranks.group import ExpertPeers, NoPeers, OneRank, Ranks


def initialize_single_process() -> None:
    """Initialize torch.distributed and Megatron's parallel state for one rank; keep what is already initialized."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)


def initialize_several_processes(tensor_size: int, pipeline_size: int, expert_size: int) -> None:
    """Initialize torch.distributed and Megatron's parallel state in a process that torchrun started.

    The current CUDA device must be set before the call.

    Args:
        tensor_size, pipeline_size, expert_size: Tensor-, pipeline- and expert-parallel sizes; the remaining processes
            form replicas.
    """
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=pipeline_size,
        expert_model_parallel_size=expert_size,
    )
    initialize_rng_tracker(inference_rng_tracker=True)


class ModelRanks:
    """Implementation of `Ranks` for a model on several ranks."""

    def __init__(self) -> None:
        self._group = parallel_state.get_model_parallel_group()
        self._device = torch.cuda.current_device()
        self.num_ranks = dist.get_world_size(self._group)
        self.num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.is_first_stage, self.is_last_stage = stage == 0, stage == self.num_stages - 1
        key = (stage, parallel_state.get_tensor_model_parallel_rank(), dist.get_rank())
        keys: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(keys, key, group=self._group)
        self._order = sorted(range(self.num_ranks), key=keys.__getitem__)
        ranks = [keys[index] for index in self._order]
        self.index = ranks.index(key)
        self._source = next(rank for at, _, rank in ranks if at == self.num_stages - 1)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, value, group=self._group)
        return [found[index] for index in self._order]

    def least(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        least: list[int] = tensor.tolist()
        return least

    def all_hold(self, holds: bool) -> bool:
        return bool(self.least([int(holds)])[0])

    def from_source(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, self._source, group=self._group)
        return tensor


def ranks_of_process() -> Ranks:
    """Return the collectives of this process's model; `OneRank` if Megatron's parallel state is not initialized.

    Raises:
        ValueError: If context parallelism is in use, which is not supported.
    """
    if not parallel_state.model_parallel_is_initialized():
        return OneRank()
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        raise ValueError(
            f"the context-parallel size is {size}, but a sequence's state cannot be split: set it to 1, and use "
            "tensor, pipeline or expert parallelism instead"
        )
    num_ranks = dist.get_world_size(parallel_state.get_model_parallel_group())
    return OneRank() if num_ranks == 1 else ModelRanks()


class ExpertRanks:
    """Implementation of `ExpertPeers` for several ranks, with Gloo over TCP."""

    def __init__(self) -> None:
        group = parallel_state.get_expert_model_parallel_group()
        self.num_ranks = dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        store, name = dist.distributed_c10d._get_default_store(), f"ranks that share experts: {members}"
        # torch reuses the name of a destroyed group, so members of a new group would find addresses without listeners.
        number = (store.add(name, 1) - 1) // len(members)
        index = members.index(dist.get_rank())
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore(f"{name}, {number}", store), index, len(members), dist.default_pg_timeout
        )

    def greatest(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([tensor], options).wait()
        greatest: list[int] = tensor.tolist()
        return greatest


def expert_peers_of_process() -> ExpertPeers:
    """Return the collectives between this rank's expert-parallel ranks, all of which must call this function."""
    if not parallel_state.model_parallel_is_initialized() or num_expert_ranks() == 1:
        return NoPeers()
    return ExpertRanks()


def num_expert_ranks() -> int:
    """Return the expert-parallel size."""
    size: int = parallel_state.get_expert_model_parallel_world_size()
    return size
