"""Cooperation of the processes of a command: start, failure, steps, and combined results."""

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
    """Models of a command's processes; this class has one, in this process."""

    def make(self, build: Callable[[], Made]) -> Made:
        """Run `build` on each process; if one fails, all do."""
        return build()

    def share(self, lines: Sequence[PromptLine]) -> list[PromptLine]:
        """Return the lines of this process's model."""
        return list(lines)

    def any_continues(self, has_requests: bool) -> bool:
        """Return True if this process must step, for itself or for ranks that share experts."""
        return has_requests

    def gather(self, result: RunResult) -> RunResult:
        """Return the results of all models, in the order of their lines."""
        return result


class SeveralProcesses(Replicas):
    """Processes that hold one model or several; raises `UsageError` if a process has no CUDA device of its own."""

    def __init__(self, launch: Launch, arguments: Namespace, device: str) -> None:
        if device == "cuda":
            if launch.local_rank >= torch.cuda.device_count():
                raise UsageError(
                    f"process {launch.local_rank} of this machine needs a CUDA device of its own, and there are "
                    f"{torch.cuda.device_count()}; start fewer, or use --device cpu"
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
        """Run `build` on each process; if any raises `UsageError`, all raise that of the first one."""
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
        return bool(self._peers.greatest([has_requests])[0])  # on the host: a device may wait for an overlapped step

    @override
    def gather(self, result: RunResult) -> RunResult:
        found: list[RunResult | None] = [None] * dist.get_world_size()
        of_model = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
        dist.all_gather_object(found, result if dist.get_rank() == min(of_model) else None)
        return together([one for one in found if one is not None])


@contextlib.contextmanager
def speaking_for_all(launch: Launch) -> Iterator[None]:
    """Let only the first process print while the block runs."""
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
    """Destroy the process groups that the block started; keep earlier ones."""
    were_there = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not were_there:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


@contextlib.contextmanager
def joined_processes(launch: Launch, arguments: Namespace, device: str) -> Iterator[Replicas]:
    """Join the processes of a launch for the block; only the first one prints."""
    with own_process_groups(), speaking_for_all(launch):
        yield Replicas() if launch.num_processes == 1 else SeveralProcesses(launch, arguments, device)
