"""One replica in its own process: a tiny engine that serves a coordinator until stopped.

`fleet.py` runs `main` there. It says once that it takes part, with the coordinator's address and the replica's name,
and once how it has ended.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import zmq

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from megatron_mamba_cache.replicas.engine import ReplicaEngine
from megatron_mamba_cache.replicas.settings import RoutingSettings
from tests.distributed.rank_models import Layout, parallel
from tests.mcore.engine_runs import cache_config, tiny_sizes

SIZES = tiny_sizes()
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def build(kv_blocks: int = 200, cached_states: int = 100) -> ReplicaEngine:
    """Build the engine of a replica: requests of up to 512 tokens, blocks of 16 tokens; ranks compare each step."""
    bought = {"kv_blocks": kv_blocks, "cached_states": cached_states}
    config = cache_config(SIZES, **bought, max_tokens=256, rank_digest_steps=1)
    return build_engine(random_hybrid_model(SIZES), config)


async def serve(options: dict[str, Any], reports: Connection) -> None:
    """Join the coordinator and serve until the engine ends."""
    engine = build()
    _pace_steps(engine, options.get("step_s", 0.0), options.get("first_step_s", 0.0))
    if options.get("fail_steps"):
        _fail_steps(engine, options["fail_steps"])
    address = await engine.start_listening_to_data_parallel_coordinator(
        coordinator_address=options.get("address"), routing=RoutingSettings(**options.get("routing", {}))
    )
    reports.send({"address": address, "replica": engine._replica_name, "listening": listening(engine)})
    await engine.engine_loop_task
    reports.send({"steps_aborted": engine.context.counters.steps_aborted})


def listening(engine: ReplicaEngine) -> list[str]:
    """Return the addresses on which an engine's own sockets listen; those of torch.distributed are not among them."""
    return [publisher.getsockopt_string(zmq.LAST_ENDPOINT) for publisher in engine.zmq_context.publishers]


def _pace_steps(engine: ReplicaEngine, seconds: float, first: float) -> None:
    """Block the process in each step, and longer in the first, as compiling a kernel does."""
    forward = engine.async_forward
    pending = [first]

    async def slow_forward() -> Any:
        time.sleep(pending.pop() if pending else seconds)
        return await forward()

    engine.async_forward = slow_forward


def _fail_steps(engine: ReplicaEngine, every: int) -> None:
    """Make every n-th step raise an error after its forward pass."""
    sample = engine.context.runner._sample
    calls = iter(range(1, 10**9))

    def failing_sample(*arguments: Any, **settings: Any) -> Any:
        if next(calls) % every == 0:
            raise RuntimeError("planted")
        return sample(*arguments, **settings)

    engine.context.runner._sample = failing_sample


def main(options: dict[str, Any], reports: Connection) -> None:
    """Join the process group, if the launch has several ranks, and serve."""
    torch.set_num_threads(1)
    try:
        with _world(options) if "world" in options else nullcontext():
            asyncio.run(serve(options, reports))
    except SystemExit as end:  # Megatron's, from whatever its loop has raised
        reports.send({"error": str(end.__context__)})
        raise


@contextmanager
def _world(options: dict[str, Any]) -> Iterator[None]:
    rank, size, file = options["world"]
    store = dist.FileStore(file, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    with parallel(Layout(*options.get("layout", (1, 1)))):
        yield
