"""Two engines that step together, as ranks that share experts do, and hear a coordinator's signals in different rounds.

Both run Megatron's loop in this process; sockets play what the coordinator says in each round of it.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zmq
from megatron.core.inference.headers import Headers

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.replicas.engine import ReplicaEngine
from tests.mcore.engine_runs import cache_config, greedy, tiny_hybrid

PATIENCE_S = 60
PROMPT = list(range(20))
Script = dict[int, list[list[Any]]]
"""Signals that an engine receives, by the round of its loop."""


class Meeting:
    """Megatron's all-reduce between engines of one process."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._values: list[int] = []
        self._result: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def all_reduce_max(self, value: int) -> int:
        self._values.append(value)
        result = self._result
        if len(self._values) == self._num_ranks:
            result.set_result(max(self._values))
            self._values, self._result = [], asyncio.get_running_loop().create_future()
        return await result

    def close(self) -> None:
        pass


class ScriptedLink:
    """Stands in for a replica's link; what the engine sends is kept."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._round = 0
        self._due = list(script.get(0, []))
        self.sent: list[list[Any]] = []

    def recv(self, flags: int) -> bytes:
        if self._due:
            kind, *body = self._due.pop(0)
            return msgpack.packb([kind.value, *body])
        self._round += 1
        self._due = list(self._script.get(self._round, []))
        raise zmq.Again

    def send(self, message: bytes) -> None:
        self.sent.append(msgpack.unpackb(message, raw=False))

    def close(self) -> None:
        pass


def peer(script: Script, meeting: Meeting) -> tuple[ReplicaEngine, ScriptedLink, list[bool]]:
    """Return an engine that will hear a script, its link, and whether it was suspended in each idle step of its."""
    subject = tiny_hybrid()
    engine = build_engine(subject.model, cache_config(subject.sizes))
    link, silent = ScriptedLink(script), SimpleNamespace(send=lambda _: None, send_multipart=lambda _: None)
    engine.socket_for_receiving_requests = engine._link = link
    engine.model_parallel_publisher_socket = engine.model_parallel_num_msgs_publisher_socket = silent
    engine.zmq_sockets, engine.zmq_context = [], SimpleNamespace(term=lambda: None)
    engine.is_mp_coordinator, engine.rank = True, 0
    engine.ep_world_size, engine.expert_parallel_zmq_communicator = 2, meeting
    idle_steps: list[bool] = []
    idly = engine.controller.dummy_forward

    def noted() -> None:
        idle_steps.append(engine.is_suspended)
        idly()

    engine.controller.dummy_forward = noted
    return engine, link, idle_steps


def submission(request_id: int) -> list[Any]:
    return [Headers.SUBMIT_REQUEST, request_id, PROMPT, greedy(6).serialize()]


def replies(link: ScriptedLink) -> list[list[int]]:
    """Return the tokens of finished requests."""
    records = [record for kind, *body in link.sent if kind == Headers.ENGINE_REPLY.value for record in body[0]]
    return [record["requests"][0]["generated_tokens"] for record in records]


SUSPEND, RESUME = [[Headers.SUSPEND]], [[Headers.RESUME]]
STOP, STOPPED = [[Headers.STOP]], [[Headers.STOP_ACK]]
END = {30: STOP, 32: STOPPED}
SCRIPTS: dict[str, tuple[Script, Script]] = {
    "one resumes before the other": (
        {0: SUSPEND, 2: [submission(0)], 4: RESUME, **END},
        {0: SUSPEND, 8: RESUME, **END},
    ),
    "one suspends before the other": (
        {0: SUSPEND, 8: RESUME, **END},
        {2: [submission(0)], 4: SUSPEND, 8: RESUME, **END},
    ),
    "one stops before the other": (
        {0: [submission(0)], 30: STOP, 32: STOPPED},
        {30: STOP, 40: STOPPED},
    ),
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_expert_parallel_replicas_start_and_leave_together(case: str) -> None:
    async def scenario() -> None:
        meeting = Meeting(2)
        peers = [peer(script, meeting) for script in SCRIPTS[case]]
        loops = [asyncio.ensure_future(engine.run_engine_with_coordinator()) for engine, *_ in peers]
        await asyncio.wait_for(asyncio.gather(*loops), PATIENCE_S)
        assert [len(reply) for _, link, _ in peers for reply in replies(link)] == [6]
        idle_steps = [step for *_, steps in peers for step in steps]
        assert len(idle_steps) == 6 and not any(idle_steps)  # the other's, one for each token

    asyncio.run(scenario())
