"""Processes without imports: each is a fork of one that has imported everything."""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

REPOSITORY = Path(__file__).parents[1]
PRELOADED = [
    "tests.distributed.rank_process",
    "tests.models.tensor_parallel_worker",
    "tests.replicas.replica_process",
]


@cache
def fork_server() -> ForkServerContext:
    """Return the context that starts such processes; they compute on the CPU, as gloo sends no device tensors.

    They compute on the CPU wherever they run: gloo sends no tensor of a device.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    environment = {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    with patch.dict(os.environ, {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}):
        forkserver.ensure_running()
    return context


def write_output_to(log: Path) -> None:
    """Write this process's output to a file from now on."""
    with log.open("w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
