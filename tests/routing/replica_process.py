"""One replica in a process of its own: a tiny engine that listens to a coordinator until it is stopped.

Run by `fleet.py` as `python -m tests.routing.replica_process '{"address": ..., ...}'`. Writes one line of JSON once it
takes part, with the coordinator's address and the replica's name, and another one when it has been stopped.
"""

import asyncio
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.mcore.replica_engine import ReplicaEngine
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from megatron_mamba_cache.routing.settings import RoutingSettings
from tests.mcore.engine_runs import cache_config, tiny_sizes

SIZES = tiny_sizes()


def build(kv_blocks: int = 200, cached_states: int = 100) -> ReplicaEngine:
    """Build the engine that all replicas have; requests of up to 512 tokens, blocks of 16."""
    config = cache_config(SIZES, kv_blocks=kv_blocks, cached_states=cached_states, max_tokens=256)
    return build_engine(random_hybrid_model(SIZES), config)


async def serve(options: dict[str, Any]) -> None:
    """Take part until the engine ends."""
    engine = build()
    if options.get("block_step_s"):
        _block_a_step(engine, options["block_step_s"])
    if options.get("fail_steps"):
        _fail_steps(engine, options["fail_steps"])
    address = await engine.start_listening_to_data_parallel_coordinator(
        coordinator_address=options.get("address"), routing=RoutingSettings(**options.get("routing", {}))
    )
    print(json.dumps({"address": address, "replica": engine._replica_name}), flush=True)
    await engine.engine_loop_task
    print(json.dumps({"steps_aborted": engine.context.counters.steps_aborted}), flush=True)


def _block_a_step(engine: ReplicaEngine, seconds: float) -> None:
    """Let the first step hold the process up, as compiling a kernel does."""
    forward = engine.async_forward
    pending = [seconds]

    async def slow_forward() -> Any:
        time.sleep(pending.pop() if pending else 0)
        return await forward()

    engine.async_forward = slow_forward


def _fail_steps(engine: ReplicaEngine, every: int) -> None:
    """Let every so many-th step raise after its forward."""
    sample = engine.controller._sample
    calls = iter(range(1, 10**9))

    def failing_sample(logits: torch.Tensor) -> Any:
        if next(calls) % every == 0:
            raise RuntimeError("planted")
        return sample(logits)

    engine.controller._sample = failing_sample


def main(options: dict[str, Any]) -> None:
    """Join the launch's world, if it has one, and serve."""
    torch.set_num_threads(1)
    if "world" in options:
        rank, size, file = options["world"]
        store = dist.FileStore(file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.get("tensor_parallel", 1))
    asyncio.run(serve(options))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
