"""The front end of several replicas, with a plain socket as the coordinator."""

import asyncio
from contextlib import ExitStack
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot
from megatron_mamba_cache.policy.request_rules import RequestRules
from megatron_mamba_cache.replicas.front_end import STATES
from megatron_mamba_cache.server.coordinator_backend import CoordinatorBackend

CACHE = CacheSnapshot(CacheCounters(), {}, {}).as_dict()


def states(*versions: str) -> bytes:
    """Return a coordinator's report with one replica for each weights version."""
    reported = {"cache": CACHE, "num_running": 0, "num_waiting": 0, "is_paused": False}
    return msgpack.packb([STATES, {str(n): reported | {"weights_version": name} for n, name in enumerate(versions)}])


def test_flushed_weights_version_is_reported_before_replicas_confirm_it() -> None:
    async def run(contexts: ExitStack) -> None:
        context = zmq.asyncio.Context()
        contexts.callback(context.destroy, linger=0)
        coordinator = context.socket(zmq.ROUTER)
        port = coordinator.bind_to_random_port("tcp://127.0.0.1")
        backend = CoordinatorBackend(f"tcp://127.0.0.1:{port}", RequestRules(CacheConfig(), 100, 100), frozenset())
        await backend.start()
        contexts.callback(backend._context.destroy, linger=0)
        identity, _ = await coordinator.recv_multipart()

        async def version_after(*versions: str) -> str:
            """Report the versions of the replicas; return the version that the backend shows."""
            before = backend.state
            await coordinator.send_multipart([identity, states(*versions)])
            while backend.state is before:
                await asyncio.sleep(0.001)
            return backend.state.weights_version

        assert await version_after("1", "1") == "1"
        await backend.flush("2")
        reported: list[Any] = [backend.state.weights_version]
        reported += [await version_after(*versions) for versions in (("1", "1"), ("2", "1"), ("2", "2"))]
        assert reported == ["2"] * 4
        assert await version_after("3", "3") == "3"  # another front end has flushed
        backend._task.cancel()

    with ExitStack() as contexts:
        asyncio.run(asyncio.wait_for(run(contexts), 30))
