"""Malformed, oversized, mistyped and truncated requests do not affect good requests and leak nothing.

HOSTILE_REQUESTS sets the number of requests; 10,000 take a few minutes.
"""

import gc
import json
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.job import Job
from megatron_mamba_cache.server.orders import Order
from megatron_mamba_cache.server.prompts import Prompt
from megatron_mamba_cache.server.responses import JobResponse
from tests.server.running_server import RED, RunningServer, resident_mib

NUM_REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", "240"))
NUM_CLIENTS = 4
GOOD_SHARE = 0.04
MOST_GROWTH_MIB = 32.0
WARM_UP_SHARE = 0.5  # memory that is allocated once, such as thread stacks, is allocated by then
KEPT_FOR_A_REQUEST = (Job, Order, JobResponse, Prompt, Progress)

GOOD: dict[str, Any] = {"prompt": "class Harbour:\n" + "    boats = []\n" * 30, "max_tokens": 6, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions", "/admin/nothing", "/v1/models", "/v1/completions/x", "/dashboard")
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**70), 1.5, 1e308, "", "x", "1", "\x00", "é" * 50, "\ud800"),
    *([], [[]], [1, 2], ["a"], [[1], [2]], [-1], [5000], [2**65], ["a", 1], [None], [[[]]], [True], [[1] * 5000]),
    *({}, {"a": 1}, {"role": "user"}, [{"role": "user"}], [{"role": "", "content": []}], [{"content": "x"}]),
    [{"role": "user", "content": "x"}],
)
FIELDS = (
    *("prompt", "messages", "model", "max_tokens", "n", "stop", "stream", "seed", "temperature", "top_p", "top_k"),
    *("logprobs", "top_logprobs", "echo", "best_of", "user", "stream_options", "logit_bias", "cache_salt", "tools"),
    *("unknown", "suffix"),
)


def mutated(rng: random.Random) -> bytes:
    """Return a body in which some fields have a wrong type or value."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    return json.dumps(body).encode()


def broken(rng: random.Random) -> bytes:
    """Return bytes that are not a JSON object."""
    whole = json.dumps(GOOD).encode()
    return rng.choice(
        (
            whole[: rng.randrange(len(whole))],
            rng.randbytes(rng.randrange(200)),
            whole.replace(b"0", b"NaN"),
            b"[" * rng.randrange(1, 100_000),
            b'{"a":' * 5000,
            b"9" * 10_000,
            b'{"prompt": ' + b"1" * 5000 + b"}",
            b'"' + b"\\ud800" * 100 + b'"',
            whole + whole,
        )
    )


def oversized(rng: random.Random) -> bytes:
    """Return a body that is too large or has a prompt that is too long."""
    return rng.choice(
        (
            lambda: json.dumps({"prompt": "x y " * 20_000, "max_tokens": 1}).encode(),
            lambda: json.dumps({"prompt": [7] * 6000}).encode(),
            lambda: json.dumps({"prompt": "x", "max_tokens": 10**6}).encode(),
            lambda: json.dumps({"prompt": ["x"] * 129, "n": 128}).encode(),
            lambda: json.dumps({"prompt": "x", "stop": ["s"] * 1000}).encode(),
            lambda: b" " * (5 * 2**20),
        )
    )()


BODIES: tuple[Callable[[random.Random], bytes], ...] = (mutated, mutated, mutated, mutated, broken, broken, oversized)


def cut_off(url: str, rng: random.Random) -> None:
    """Send a truncated request or bytes that are not HTTP."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {RED}\r\ncontent-length: 500\r\n\r\n"
        message = rng.choice(
            (head.encode(), head.encode() + b'{"prompt": "x', rng.randbytes(50), b"GET / HTTP/9\r\n\r\n")
        )
        connection.sendall(message[: rng.randrange(1, len(message) + 1)])


def one_hostile_request(http: httpx.Client, server: RunningServer, rng: random.Random) -> str:
    """Send one hostile request; return the outcome."""
    if rng.random() < 0.1:
        cut_off(server.url, rng)
        return "cut"
    path = rng.choice(PATHS) if rng.random() < 0.3 else "/v1/completions"
    headers = {"content-type": rng.choice(("application/json", "text/plain", "multipart/form-data", "x"))}
    if rng.random() < 0.8:
        headers["content-type"] = "application/json"
    if rng.random() < 0.05:
        headers["authorization"] = rng.choice(("", "Bearer", "Bearer \x01", "Basic !!", "x" * 5000))
    method = rng.choice(("POST", "POST", "POST", "PUT", "GET", "DELETE"))
    reply = http.request(method, path, content=rng.choice(BODIES)(rng), headers=headers)
    return str(reply.status_code)


def client(server: RunningServer, seed: int, count: int, expected: list[int], seen: Counter[str]) -> None:
    """Send hostile requests mixed with good requests, which must get the expected tokens."""
    rng = random.Random(seed)
    with server.client() as http:
        for _ in range(count):
            try:
                if rng.random() < GOOD_SHARE:
                    reply = http.post("/v1/completions", json=GOOD | {"return_token_ids": True})
                    is_same = reply.status_code == 200 and reply.json()["choices"][0]["token_ids"] == expected
                    seen["good" if is_same else f"bad good one: {reply.status_code} {reply.text[:200]}"] += 1
                else:
                    seen[one_hostile_request(http, server, rng)] += 1
            except Exception as error:
                seen[f"error: {type(error).__name__}: {error}"] += 1


def run_clients(server: RunningServer, count: int, expected: list[int], seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    threads = [
        threading.Thread(target=client, args=(server, seed + number, count // NUM_CLIENTS, expected, seen))
        for number in range(NUM_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_hostile_requests_neither_change_other_replies_nor_leak_memory(server: RunningServer) -> None:
    with server.client() as http:
        first = http.post("/v1/completions", json=GOOD | {"return_token_ids": True})
    expected = first.json()["choices"][0]["token_ids"]
    before = server.held()
    seen = run_clients(server, int(NUM_REQUESTS * WARM_UP_SHARE), expected, seed=0)
    settled = resident_mib()
    seen += run_clients(server, int(NUM_REQUESTS * (1 - WARM_UP_SHARE)), expected, seed=100)
    growth = resident_mib() - settled
    gc.collect()
    kept = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, KEPT_FOR_A_REQUEST))
    print(dict(seen), f"memory grew by {growth:.1f} MiB")
    assert seen["good"] and seen["400"] and seen["413"] and seen["401"] and seen["404"] and seen["405"] and seen["200"]
    unexpected = [what for what in seen if what.startswith("5") or "error" in what or "bad" in what]
    assert not unexpected, seen
    server.assert_nothing_held()
    assert server.held() == before
    assert not kept
    assert growth < MOST_GROWTH_MIB
