"""The processes of a torchrun launch, read from the environment without importing torch or megatron."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .flag_sources import UsageError
from .prompts import PromptLine

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process within a torchrun launch; the defaults describe a single process."""

    rank: int = 0
    num_processes: int = 1
    local_rank: int = 0  # rank among the processes on the same machine
    num_on_machine: int | None = None  # processes on the same machine; None if unknown

    @staticmethod
    def of_environment(environment: Mapping[str, str] = os.environ) -> "Launch":
        """Read torchrun's environment variables; raise `UsageError` if one is not a number."""
        names: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not all(name in environment for name in names):
            return Launch()
        if "LOCAL_WORLD_SIZE" in environment:
            names = (*names, "LOCAL_WORLD_SIZE")
        try:
            return Launch(*(int(environment[name]) for name in names))
        except ValueError as error:
            found = ", ".join(f"{name}={environment[name]}" for name in names)
            raise UsageError(
                f"the environment variables {found} must be integers; unset them or start with torchrun"
            ) from error

    @property
    def is_first(self) -> bool:
        """True for rank 0, which prints."""
        return self.rank == 0

    @property
    def is_on_several_machines(self) -> bool:
        """True when the launch spans several machines."""
        return self.num_on_machine is not None and self.num_on_machine < self.num_processes

    def num_replicas(self, arguments: Namespace) -> int:
        """Return the number of model replicas; raise `UsageError` if the processes cannot be divided evenly."""
        tensor, pipeline, expert = (getattr(arguments, name) for name in _SIZES)
        for name in _SIZES:
            if getattr(arguments, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
        of_model = tensor * pipeline
        sizes = f"--tensor-model-parallel-size {tensor} times --pipeline-model-parallel-size {pipeline}"
        if self.num_processes % (of_model * expert):
            sizes += f" times --expert-model-parallel-size {expert}" if expert > 1 else ""
            raise UsageError(
                f"{sizes} needs a multiple of {of_model * expert} processes, found {self.num_processes}; start them "
                f"with torchrun --nproc-per-node {of_model * expert}"
            )
        return self.num_processes // of_model


def deal_lines(lines: Sequence[PromptLine], num_replicas: int) -> list[list[PromptLine]]:
    """Distribute lines among replicas round-robin, keeping the lines of each session together."""
    shares: list[list[PromptLine]] = [[] for _ in range(num_replicas)]
    replica_of: dict[str | int | PromptLine, int] = {}
    for line in lines:
        dealt = line if line.session is None else line.session
        shares[replica_of.setdefault(dealt, len(replica_of) % num_replicas)].append(line)
    return shares
