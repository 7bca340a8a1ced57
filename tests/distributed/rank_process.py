"""One rank of a world of processes that run the same functions by name, one after another.

Run as `python -m tests.distributed.rank_process RANK SIZE PORT`: reads a request a line from stdin, `module:function`
and arguments as hexadecimal pickle, and writes one line for each, with what the function returned or its traceback.
"""

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TELL_WHERE = signal.SIGUSR1  # to a rank that does not answer: it writes the stacks of its threads
TIMEOUT = timedelta(minutes=4)  # no claim: ranks may start far apart on a busy machine


def start(rank: int, size: int, meeting: str) -> None:
    """Join the world at a meeting point of torch.distributed; on CUDA devices where there is one for each rank."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
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
    """Whether each of so many ranks can have a CUDA device."""
    return torch.cuda.device_count() >= size


def call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Run a function by name."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(*arguments)


def main(rank: int, size: int, port: int) -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no reply
    faulthandler.register(TELL_WHERE)
    start(rank, size, f"tcp://127.0.0.1:{port}")
    for line in sys.stdin:
        name, arguments = line.split()
        try:
            reply = (True, call(name, pickle.loads(bytes.fromhex(arguments))))
        except BaseException:
            reply = (False, traceback.format_exc())
        replies.write(pickle.dumps(reply).hex() + "\n")
        replies.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
