"""A rank that waits for a dead rank gets an error, and loses no message from the coordinator."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import zmq

from megatron_mamba_cache.replicas.rank_sockets import PeerSocket
from megatron_mamba_cache.replicas.replica_link import ReplicaFencedError
from megatron_mamba_cache.replicas.wire import FENCED, PROBE
from tests.replicas.replica_line import Line


@pytest.fixture
def peer(line: Line) -> Iterator[tuple[zmq.Socket, PeerSocket]]:
    """Yield another rank's socket and this rank's reader."""
    theirs, ours = line.context.socket(zmq.PAIR), line.context.socket(zmq.PAIR)
    theirs.bind("inproc://peers")
    ours.connect("inproc://peers")
    watched = PeerSocket(ours, line.link)
    yield theirs, watched
    theirs.close(linger=0)
    watched.close()


@pytest.mark.parametrize(
    "wait",
    [PeerSocket.recv, PeerSocket.recv_multipart, lambda socket: socket.recv(zmq.NOBLOCK)],
    ids=["one part", "all parts", "without waiting"],
)
def test_waiting_for_a_dead_rank_raises_an_error(
    wait: Callable[[PeerSocket], Any],
    line: Line,
    peer: tuple[zmq.Socket, PeerSocket],
) -> None:
    line.say(PROBE, FENCED)
    with pytest.raises(ReplicaFencedError, match="one of its processes has ended"):
        while True:
            with suppress(zmq.Again):  # the second message may arrive later than the first
                wait(peer[1])


def test_messages_from_ranks_and_coordinator_arrive_in_order(
    line: Line,
    peer: tuple[zmq.Socket, PeerSocket],
) -> None:
    theirs, watched = peer
    line.say(b"first request", PROBE, b"second request")
    with pytest.raises(zmq.Again):
        watched.recv(zmq.NOBLOCK)
    theirs.send(b"a word")
    theirs.send_multipart([b"two", b"words"])
    assert watched.recv() == b"a word" and watched.recv_multipart() == [b"two", b"words"]
    line.say(b"third request")
    line.link.check()
    heard = [line.link.recv(zmq.NOBLOCK) for _ in range(3)]
    assert heard == [b"first request", b"second request", b"third request"]
    with pytest.raises(zmq.Again):
        line.link.recv(zmq.NOBLOCK)
