"""Signals to a replica: they end it until warmup is over and are ignored later."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from megatron_mamba_cache.replicas.settings import RoutingSettings
from megatron_mamba_cache.server.replica import ReplicaThread, serve_replica

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class WatchedEngine:
    """Engine that records the effect of signals during warmup, join and run."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: dict[str, list[Any]] = {}
        self._fails = fails

    def _note(self, phase: str) -> None:
        self.seen[phase] = [signal.getsignal(number) for number in NUMBERS]

    def warmup(self) -> None:
        self._note("warmup")
        if self._fails:
            raise MemoryError("too little")

    async def start_listening_to_data_parallel_coordinator(self, **_: Any) -> str:
        self._note("joining")
        return "tcp://127.0.0.1:1"

    @property
    def engine_loop_task(self) -> Any:
        return asyncio.sleep(0)


def in_a_thread(engine: Any) -> None:
    replica = ReplicaThread(engine, RoutingSettings())
    assert replica.start() == "tcp://127.0.0.1:1" and replica.join(20)


def alone(engine: Any) -> None:
    serve_replica(engine, RoutingSettings())


@pytest.mark.parametrize("serve", [in_a_thread, alone])
def test_replica_ignores_sigterm_after_warmup(serve: Callable[[Any], None]) -> None:
    engine, ending = WatchedEngine(), signal.getsignal(signal.SIGTERM)
    serve(engine)
    assert engine.seen == {"warmup": [ending, signal.SIG_IGN], "joining": [signal.SIG_IGN] * 2}
    assert signal.getsignal(signal.SIGTERM) is ending


def test_replica_start_raises_when_warmup_fails() -> None:
    ending = [signal.getsignal(number) for number in NUMBERS]
    replica = ReplicaThread(WatchedEngine(fails=True), RoutingSettings())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the engine failed before it joined the coordinator") as found:
        replica.start()
    assert isinstance(found.value.__cause__, MemoryError)
    assert [signal.getsignal(number) for number in NUMBERS] == ending
