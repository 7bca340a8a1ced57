"""Size limits for a request body and for all bodies of an API key."""

import gzip
from collections.abc import Iterator

from tests.server.front_end import BLUE, RED, FrontEnd, front_end, request_bytes, status_of, wait_until

KIB = 2**10
TWO_BODIES = {"max_body_bytes": 64 * KIB, "max_buffered_bytes": 2 * 2 * 64 * KIB, "body_timeout_s": 20.0}


def unfinished(size: int, path: str = "/v1/completions", key: str = RED) -> bytes:
    """Return a request whose body lacks its last ten bytes."""
    return request_bytes(b"x" * (size - 10), path, key, declared_size=size)


def bytes_of(server: FrontEnd, key: str) -> int:
    owner = server.server.settings.keys.owner_of(f"Bearer {key}")
    assert owner is not None
    return server.server.bodies.num_bytes(owner)


def test_body_is_not_read_when_the_key_or_route_is_unknown() -> None:
    with front_end(**TWO_BODIES) as server:
        sent = [unfinished(64 * KIB, "/health", "none"), unfinished(64 * KIB, "/v1/completions", "none")]
        sent += [unfinished(64 * KIB, path) for path in ("/metrics", "/docs", "/nothing")]
        connections = [server.connection(one) for one in sent for _ in range(4)]
        assert {status_of(connection) for connection in connections[:4]} == {405}
        assert {status_of(connection) for connection in connections[4:8]} == {401}
        assert {status_of(connection) for connection in connections[8:]} <= {404, 405}
        assert bytes_of(server, RED) == bytes_of(server, BLUE) == 0


def test_api_key_cannot_use_another_keys_body_memory() -> None:
    with front_end(**TWO_BODIES) as server:
        open_bodies = [server.connection(unfinished(64 * KIB)) for _ in range(2)]
        wait_until(lambda: bytes_of(server, RED) == 2 * (64 * KIB - 10))
        with server.client(RED) as red, server.client(BLUE) as blue:
            body = {"prompt": "x" * 10_000, "max_tokens": 0}  # refused after the body was read
            refused = red.post("/v1/completions", json=body)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert blue.post("/v1/completions", json=body).status_code == 400
            for connection in open_bodies:
                connection.close()
            wait_until(lambda: bytes_of(server, RED) == 0)
            assert red.post("/v1/completions", json=body).status_code == 400


def test_body_memory_is_released_when_its_request_is_answered() -> None:
    with front_end(**TWO_BODIES) as server, server.client() as http:
        for _ in range(10):
            assert http.post("/v1/completions", json={"prompt": "x" * 60_000, "max_tokens": 0}).status_code == 400
        assert bytes_of(server, RED) == 0


def test_error_for_a_compressed_body_names_its_encoding() -> None:
    with front_end() as server, server.client() as http:
        content = gzip.compress(b'{"prompt": "x", "max_tokens": 1}')
        refused = http.post("/v1/completions", content=content, headers={"Content-Encoding": "gzip"})
        assert refused.status_code == 415 and "Content-Encoding is gzip" in refused.json()["error"]["message"]
        as_it_is = {"Content-Encoding": "Identity", "Content-Type": "application/json"}
        plain = gzip.decompress(content).replace(b"1", b"0.5")  # refused after the body was read
        assert http.post("/v1/completions", content=plain, headers=as_it_is).status_code == 400


def test_body_that_arrives_too_slowly_gets_a_408() -> None:
    with front_end(body_timeout_s=0.2) as server:
        assert status_of(server.connection(unfinished(1000))) == 408
        assert bytes_of(server, RED) == 0


def test_body_without_a_content_length_is_limited_in_size() -> None:
    def chunks(count: int) -> Iterator[bytes]:
        yield b'{"prompt": "'
        yield from [b"x" * KIB] * count
        yield b'", "max_tokens": 0}'

    with front_end(**TWO_BODIES) as server, server.client() as http:
        assert http.post("/v1/completions", content=chunks(60)).status_code == 400
        assert http.post("/v1/completions", content=chunks(65)).status_code == 413
        assert bytes_of(server, RED) == 0
