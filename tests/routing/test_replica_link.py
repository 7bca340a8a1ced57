"""A replica's link keeps to itself what is not for the engine, and says when nobody is there."""

import asyncio
from collections.abc import Iterator

import msgpack
import pytest
import zmq

from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges
from megatron_mamba_cache.policy.identifiers import BlockKey
from megatron_mamba_cache.policy.routing import ReplicaName
from megatron_mamba_cache.routing import replica_link
from megatron_mamba_cache.routing.replica_link import ReplicaFencedError, ReplicaLink
from megatron_mamba_cache.routing.salts import KeySalt
from megatron_mamba_cache.routing.wire import FENCED, PROBE, WELCOME, Hello, KeyReport, hello_of, report_of

HELLO = Hello(ReplicaName("a"), 1, 2, "experts")


class Line:
    """A link, and the coordinator's end of it."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.link = ReplicaLink(self.context, f"tcp://127.0.0.1:{port}", HELLO)
        self.identity, self.hello = self.router.recv_multipart()

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.router.send_multipart([self.identity, message])
        assert self.link._socket.poll(120_000)

    def heard(self) -> list[object]:
        return msgpack.unpackb(self.router.recv_multipart()[1])


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.link.close()
    made.router.close(linger=0)
    made.context.term()


def test_hello_is_said_first_under_a_name_of_its_own(line: Line) -> None:
    kind, body = msgpack.unpackb(line.hello)
    assert (kind, hello_of(body), line.identity) == ("hello", HELLO, b"a/1")


def test_only_messages_for_the_engine_come_through(line: Line) -> None:
    line.say(WELCOME, PROBE, b"request")
    assert line.link.recv() == b"request"
    with pytest.raises(zmq.Again):
        line.link.recv(zmq.NOBLOCK)
    asyncio.run(line.link.wait_for_welcome(0.0))


def test_a_fenced_replica_is_told_to_restart(line: Line) -> None:
    line.say(FENCED)
    with pytest.raises(ReplicaFencedError, match="restart it"):
        line.link.drain()


def test_nobody_to_welcome_is_an_error_in_time(line: Line) -> None:
    with pytest.raises(ConnectionError, match=r"no coordinator has welcomed this replica at tcp://127\.0\.0\.1:\d+"):
        asyncio.run(line.link.wait_for_welcome(0.05))


def test_a_coordinator_that_has_gone_is_noticed_but_one_that_probes_is_there(line: Line) -> None:
    silence_s = replica_link.COORDINATOR_SILENCE_S + 1
    line.link._last_heard -= silence_s  # as in a long step, in which nobody reads
    line.say(PROBE)
    line.link.drain()
    line.link._last_heard -= silence_s
    with pytest.raises(ReplicaFencedError, match="nothing has come from the coordinator"):
        line.link.drain()


def test_reports_arrive_as_they_were_made(line: Line) -> None:
    changes = BoundaryChanges((BlockKey(2**255 + 1), BlockKey(1)), (BlockKey(7),), were_flushed=True)
    salt = KeySalt("model", "1", 2, 16)
    line.link.report_keys(changes, salt)
    line.link.report_keys(BoundaryChanges(), None)
    kind, body = line.heard()
    assert (kind, report_of(body)) == ("keys", KeyReport(changes, salt))
    assert report_of(line.heard()[1]) == KeyReport(BoundaryChanges())
