"""One rank of a world of processes that run the same functions by name, one after another."""

import contextlib
import faulthandler
import importlib
import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import write_output_to
from tests.usual_settings import set_usual

TELL_WHERE = signal.SIGUSR1  # to a rank that does not answer: it writes the stacks of its threads
TIMEOUT = timedelta(minutes=4)  # no claim: ranks may start far apart on a busy machine


def start(rank: int, size: int, meeting: str) -> None:
    """Join the world through a rendezvous of torch.distributed, with a CUDA device per rank if there are enough."""
    set_usual()
    uses_cuda = has_devices(size)
    if uses_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if uses_cuda else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )


def has_devices(size: int) -> bool:
    """True if each of `num_ranks` ranks can have a CUDA device."""
    return torch.cuda.device_count() >= size


def call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Run a function by name."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(*arguments)


def main(rank: int, size: int, port: int, requests: Connection, log: Path) -> None:
    """Answer requests until the other end closes: a name `module:function` and the function's arguments.

    Each answer is whether the function returned, and what it returned or its traceback.

    Args:
        log: Gets all that is printed.
    """
    write_output_to(log)
    faulthandler.register(TELL_WHERE)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start(rank, size, f"tcp://127.0.0.1:{port}")
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = requests.recv()
            try:
                reply = (True, call(name, arguments))
            except BaseException:
                reply = (False, traceback.format_exc())
            requests.send(reply)
    dist.destroy_process_group()
