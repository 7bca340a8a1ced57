"""A replica's link passes only engine messages and detects a lost coordinator."""

import asyncio
import re

import msgpack
import pytest
import zmq
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges
from megatron_mamba_cache.policy.identifiers import BlockKey
from megatron_mamba_cache.replicas import replica_link
from megatron_mamba_cache.replicas.front_end import PROGRESS
from megatron_mamba_cache.replicas.prompt_keys import KeySalt
from megatron_mamba_cache.replicas.replica_link import ReplicaFencedError
from megatron_mamba_cache.replicas.wire import FENCED, PROBE, WELCOME, KeyReport, hello_of, report_of, unsent_of
from tests.replicas.replica_line import HELLO, MAX_BYTES, Line


def test_replica_link_sends_its_hello_first_with_a_unique_identity(line: Line) -> None:
    kind, body = msgpack.unpackb(line.hello)
    assert (kind, hello_of(body), line.identity) == ("hello", HELLO, b"a/1")


def test_replica_link_forwards_only_messages_for_the_engine(line: Line) -> None:
    line.say(WELCOME, PROBE, b"request")
    assert line.link.recv() == b"request"
    with pytest.raises(zmq.Again):
        line.link.recv(zmq.NOBLOCK)
    asyncio.run(line.link.wait_for_welcome(0.0))


def test_fenced_replica_must_restart(line: Line) -> None:
    line.say(FENCED)
    with pytest.raises(ReplicaFencedError, match="restart this replica"):
        line.link.drain()


def test_replica_link_times_out_without_a_welcome(line: Line) -> None:
    with pytest.raises(ConnectionError, match=r"no coordinator has accepted this replica at tcp://127\.0\.0\.1:\d+"):
        asyncio.run(line.link.wait_for_welcome(0.05))


def test_replica_link_raises_an_error_when_probes_stop_arriving(line: Line) -> None:
    silence_s = replica_link.COORDINATOR_SILENCE_S + 1
    line.link._last_heard -= silence_s  # as in a long step, in which nothing reads
    line.say(PROBE)
    line.link.drain()
    line.link._last_heard -= silence_s
    with pytest.raises(ReplicaFencedError, match="nothing was received from the coordinator"):
        line.link.drain()


def test_cache_reports_arrive_in_order(line: Line) -> None:
    changes = BoundaryChanges((BlockKey(2**255 + 1), BlockKey(1)), (BlockKey(7),), were_flushed=True)
    salt = KeySalt("model", "1", 2, 16)
    line.link.report_keys(changes, salt)
    line.link.report_keys(BoundaryChanges(), None)
    kind, body = line.heard()
    assert (kind, report_of(body)) == ("keys", KeyReport(changes, salt))
    assert report_of(line.heard()[1]) == KeyReport(BoundaryChanges())


def test_large_cache_report_is_split_without_loss(line: Line) -> None:
    dropped, published = (tuple(BlockKey(key) for key in range(first, first + 150)) for first in (1, 1001))
    salt = KeySalt("model", "1", 2, 16)
    line.link.report_keys(BoundaryChanges(published, dropped, were_flushed=True), salt)
    reports = []
    while line.router.poll(300):
        message = line.router.recv_multipart()[1]
        assert len(message) <= MAX_BYTES
        reports.append(report_of(msgpack.unpackb(message)[1]))
    assert len(reports) == 4
    assert [(report.salt, report.changes.were_flushed) for report in reports] == [(salt, True), *[(None, False)] * 3]
    parts = [[*report.changes.dropped, *report.changes.published] for report in reports]
    assert [key for part in parts for key in part] == [*dropped, *published]


def test_large_message_is_split_and_only_oversized_requests_fail(line: Line) -> None:
    records = [{"requests": [{"request_id": number, "prompt": "x" * size}]} for number, size in SIZES]
    line.link.send(msgpack.packb([Headers.ENGINE_REPLY.value, records]))
    assert [line.heard() for _ in range(2)] == [[Headers.ENGINE_REPLY.value, [record]] for record in records[:2]]
    assert_unsent(line, 9)
    line.link.send(msgpack.packb([PROGRESS, [[number, {"tokens": [1] * size}] for number, size in SIZES]]))
    assert [line.heard()[1][0][0] for _ in range(2)] == [3, 5]
    assert_unsent(line, 9)
    line.link.send(b"x" * (MAX_BYTES - 64))  # what encryption leaves of the limit goes as it is
    assert line.router.recv_multipart()[1] == b"x" * (MAX_BYTES - 64)
    with pytest.raises(ValueError, match="a message of kind 'state' exceeds max_message_bytes=3936"):
        line.link.send(msgpack.packb(["state", {"cache": "x" * MAX_BYTES}]))


SIZES = [(3, 3000), (5, 3000), (9, 5000)]


def assert_unsent(line: Line, request_id: int) -> None:
    kind, *body = line.heard()
    unsent = unsent_of(body)
    assert (kind, unsent.request_id) == ("unsent", request_id)
    assert re.fullmatch(r"its reply has 5\d\d\d bytes, above max_message_bytes=3936; ask for .*", unsent.reason)
