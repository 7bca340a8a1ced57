"""Functions that run on a rank: errors of a command that runs on several processes."""

from argparse import Namespace

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.launch import Launch
from megatron_mamba_cache.command_line.processes import SeveralProcesses
from megatron_mamba_cache.command_line.ready_model import ready_model
from tests.distributed.rank_process import has_devices


def error_of_the_random_model(kind: str) -> str:
    """Return the error of a random model that cannot be split between the processes."""
    size = dist.get_world_size()
    sizes = {f"{one}_model_parallel_size": size if one == kind else 1 for one in ("tensor", "pipeline", "expert")}
    try:
        SeveralProcesses(Launch(dist.get_rank(), size, dist.get_rank()), Namespace(**sizes), "cpu")
        ready_model(None, None, "cpu")
    except UsageError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return "none"


def error_of_one_process() -> str:
    """Return the error that ends this process if only the second one finds a mistake."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = {f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")}
    try:
        together = SeveralProcesses(
            Launch(rank, size, rank), Namespace(**sizes), "cuda" if has_devices(size) else "cpu"
        )
        together.make(lambda: _build(rank))
    except UsageError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return "none"


def _build(rank: int) -> None:
    if rank == 1:
        raise UsageError("this process cannot")
