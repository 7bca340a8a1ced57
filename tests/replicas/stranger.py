"""Act as a process on another host: connect, send messages, print the answers.

    python stranger.py ADDRESS KEYS MESSAGE...

KEYS are the server's public key, and a public and a secret key of its own, with spaces between, or nothing at all.
Messages are in hexadecimal digits. It needs pyzmq alone.
"""

import socket
import sys

import zmq

UNHEARD_MS = 1500


def main(address: str, keys: str, *messages: str) -> None:
    """Send the messages; print "refused", "silence" or "answered"."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError as error:
        print("refused", type(error).__name__)
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        options = (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY)
        for option, key in zip(options, keys.split(), strict=False):
            stranger.setsockopt(option, key.encode())
        stranger.connect(address)
        for message in messages:
            stranger.send(bytes.fromhex(message))
        print("answered" if stranger.poll(UNHEARD_MS) else "silence")


if __name__ == "__main__":
    main(*sys.argv[1:])
