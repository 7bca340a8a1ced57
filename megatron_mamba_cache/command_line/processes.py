"""Coordinate the processes of a command: start, failures, steps, and combined results."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from typing_extensions import override

from ..mcore.model_ranks import expert_peers_of_process, initialize_several_processes
from .flag_sources import UsageError
from .launch import Launch, deal_lines
from .prompts import PromptLine
from .results import RunResult, together

Made = TypeVar("Made")


class Replicas:
    """The model replicas of a command; this base class is for one model in a single process."""

    def make(self, build: Callable[[], Made]) -> Made:
        """Run `build` on each process and return its result; if it fails on one process, all fail."""
        return build()

    def share(self, lines: Sequence[PromptLine]) -> list[PromptLine]:
        """Return the lines assigned to the replica of this process."""
        return list(lines)

    def any_continues(self, has_requests: bool) -> bool:
        """Return True if this process must run a step, for its own requests or for ranks that share its experts."""
        return has_requests

    def gather(self, result: RunResult) -> RunResult:
        """Combine the results of all replicas, in the order of the lines."""
        return result


class SeveralProcesses(Replicas):
    """Model replicas on several processes; raises `UsageError` if a process does not have its own CUDA device."""

    def __init__(self, launch: Launch, arguments: Namespace, device: str) -> None:
        if device == "cuda":
            if launch.local_rank >= torch.cuda.device_count():
                raise UsageError(
                    f"the process with local rank {launch.local_rank} needs its own CUDA device, but this machine has "
                    f"{torch.cuda.device_count()}; start fewer processes, or use --device cpu"
                )
            torch.cuda.set_device(launch.local_rank)
        initialize_several_processes(
            arguments.tensor_model_parallel_size,
            arguments.pipeline_model_parallel_size,
            arguments.expert_model_parallel_size,
        )
        self._num_replicas = launch.num_replicas(arguments)
        self._peers = expert_peers_of_process()

    @override
    def make(self, build: Callable[[], Made]) -> Made:
        """Run `build` on each process; if any raises `UsageError`, all raise the error of the first that failed."""
        found, message = None, None
        try:
            found = build()
        except UsageError as error:
            message = str(error)
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        for text in messages:
            if text is not None:
                raise UsageError(text)
        return found  # type: ignore[return-value]

    @override
    def share(self, lines: Sequence[PromptLine]) -> list[PromptLine]:
        return deal_lines(lines, self._num_replicas)[parallel_state.get_data_parallel_rank()]

    @override
    def any_continues(self, has_requests: bool) -> bool:
        return bool(self._peers.greatest([has_requests])[0])  # on the host, because the device may be busy

    @override
    def gather(self, result: RunResult) -> RunResult:
        found: list[RunResult | None] = [None] * dist.get_world_size()
        of_model = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
        dist.all_gather_object(found, result if dist.get_rank() == min(of_model) else None)
        return together([one for one in found if one is not None])


@contextlib.contextmanager
def speaking_for_all(launch: Launch) -> Iterator[None]:
    """Context manager: suppress the output of all processes but the first."""
    if launch.is_first:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Context manager: destroy the process groups that its body creates, but not existing groups."""
    were_there = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not were_there:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextlib.contextmanager
def joined_processes(launch: Launch, arguments: Namespace, device: str) -> Iterator[Replicas]:
    """Context manager: connect the processes of a launch, of which only the first prints."""
    with own_process_groups(), speaking_for_all(launch):
        yield Replicas() if launch.num_processes == 1 else SeveralProcesses(launch, arguments, device)
