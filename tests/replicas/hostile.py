"""Generate random messages and mutated valid messages, from a seed."""

import random
import socket
from contextlib import suppress
from typing import Any

import msgpack
import zmq
from megatron.core.inference.headers import Headers

from megatron_mamba_cache.replicas.front_end import CANCEL, CANCELS, FLUSH, FLUSHES, PROGRESS, STATE, WATCH
from megatron_mamba_cache.replicas.wire import FENCED, PROBE, WELCOME, Hello, pack_hello

SAMPLING = {"num_tokens_to_generate": 4, "top_k": 1, "spec": {"tenant": "red", "seed": 7}}
VALID: list[bytes] = [
    *(msgpack.packb([header.value]) for header in (Headers.CONNECT, Headers.PAUSE_ACK, Headers.STOP_ACK)),
    *(msgpack.packb([Headers.SUBMIT_REQUEST.value, 0, prompt, SAMPLING]) for prompt in ([1, 2, 3], "1 2")),
    msgpack.packb([Headers.SUBMIT_REQUEST.value, 1, [1], {CANCELS: True}]),
    msgpack.packb([Headers.SUBMIT_REQUEST.value, 2, [], {FLUSHES: ["2"]}]),
    msgpack.packb([Headers.ENGINE_REPLY.value, [{"requests": [{"request_id": 0, "generated_tokens": [9]}]}]]),
    msgpack.packb([PROGRESS, [[0, {"start": 0, "tokens": [9]}]]]),
    msgpack.packb([STATE, {"num_running": 3}]),
    msgpack.packb([CANCEL, 0]),
    msgpack.packb([WATCH]),
    msgpack.packb(["keys", {"salt": ["model", "0", 0, 4], "flushed": True, "published": b"x" * 32, "dropped": b""}]),
    pack_hello(Hello("replica-0", proof="0" * 64)),
    PROBE,
    WELCOME,
    FENCED,
]
COMMANDS = {Headers.PAUSE, Headers.UNPAUSE, Headers.SUSPEND, Headers.RESUME, Headers.STOP}
"""Legal signals of a client; a mutation that equals one is not sent."""

_DEEP = 2000
_LINGER_MS = 1000
_SOCKET_TYPES = [zmq.DEALER] * 4 + [zmq.ROUTER] * 2 + [zmq.XSUB, zmq.PUSH]  # coordinators refuse the last two


def some_message(rng: random.Random) -> bytes:
    """Return a random or nested message, or a valid message with changed, truncated or repeated values."""
    while True:
        message = _random_message(rng)
        if not _is_command(message):
            return message


def _random_message(rng: random.Random) -> bytes:
    valid = rng.choice(VALID)
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return valid[: rng.randrange(len(valid))]
    if kind == 2:
        return b"\x91" * rng.randrange(_DEEP) + valid
    if kind == 3:
        body: list[Any] = msgpack.unpackb(valid, strict_map_key=False)
        return msgpack.packb([*body, *body] if rng.random() < 0.5 else [*body[:-1], _value(rng)])
    if kind == 4:
        return valid + rng.randbytes(rng.randrange(20_000))
    if kind == 5:
        sampling = SAMPLING | {rng.choice([*SAMPLING, "_x", "stop_words", "return_log_probs"]): _value(rng)}
        return msgpack.packb([Headers.SUBMIT_REQUEST.value, _value(rng), _value(rng), sampling])
    changed = bytearray(valid)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _value(rng: random.Random) -> Any:
    nested: Any = []
    for _ in range(rng.randrange(300)):
        nested = [nested]
    return rng.choice([None, True, -1, 2**63, 0.5, "x" * rng.randrange(5000), b"\xff", [], [1, 2], {}, {"a": nested}])


def _is_command(message: bytes) -> bool:
    try:
        kind = msgpack.unpackb(message, raw=False)[0]
    except Exception:
        return False
    return kind == FLUSH or kind in [header.value for header in COMMANDS]


class Attacker:
    """Sends hostile messages over short-lived ZMQ sockets and over plain TCP connections."""

    def __init__(self, address: str, rng: random.Random) -> None:
        self._address = address
        self._rng = rng
        self._context = zmq.Context()
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(self._rng.choice(_SOCKET_TYPES))
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if self._rng.random() < 0.5:
            # Its own: libzmq never frees what a connection under an identity in use had sent before it left.
            self._socket.setsockopt(zmq.IDENTITY, self._rng.choice([b"a", b"client"]) + self._rng.randbytes(8))
        if self._socket.type == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_RAW, 0)
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, b"it")
        self._socket.connect(self._address)

    def send(self) -> None:
        """Send one message, mostly of one frame."""
        if self._rng.random() < 0.02:
            self._socket.close()
            self._open()
        if self._rng.random() < 0.02:
            self._send_raw()
            return
        frames = [some_message(self._rng) for _ in range(self._rng.choice([1, 1, 1, 1, 2, 50]))]
        with suppress(zmq.ZMQError):  # the other side has closed the connection, or will not have it
            self._socket.send_multipart([b"it", *frames] if self._socket.type == zmq.ROUTER else frames)

    def _send_raw(self) -> None:
        """Send bytes that are not ZMTP, or the header of a frame that never arrives, and disconnect."""
        host, port = self._address.removeprefix("tcp://").rsplit(":", 1)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        huge = (
            greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x02" + (2**62).to_bytes(8, "big")
        )
        with suppress(OSError), socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(self._rng.choice([self._rng.randbytes(300), greeting[:20], greeting, huge]))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
