"""Disconnects free resources within a step and do not change other requests.

STREAM_SECONDS sets how long the 64 clients run; use 300 for a long test.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.server.running_server import KEYS, RunningServer, bearer, running_server

STREAM_SECONDS = float(os.environ.get("STREAM_SECONDS", "4"))
NUM_CLIENTS = 64
LEAVERS = 3  # every third client disconnects in the middle of its streams
STEP_S = 4.0  # much longer than a step, much shorter than a request

PROMPTS = [f"# file: module_{number}.py\n" + "import time\n" * (5 * number) + "class A" for number in range(16)]
LONG: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "stream": True}


def held_nothing_within(server: RunningServer, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(server.held().values()):
            return True
        time.sleep(0.02)
    return False


def tokens_of(server: RunningServer) -> int:
    return server.backend.state.generated_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_clients_requests(server: RunningServer, stream: bool) -> None:
    body, before = {"prompt": PROMPTS[1], "n": 3, **LONG, "stream": stream}, tokens_of(server)
    with pytest.raises(httpx.ReadTimeout), server.client() as http:
        if not stream:
            http.post("/v1/completions", json=body, timeout=0.7)
        with http.stream("POST", "/v1/completions", json=body) as reply:
            for number, _ in enumerate(reply.iter_lines()):
                if number == 10:
                    assert server.held()["live"] == 3
                    raise httpx.ReadTimeout("enough")
    assert held_nothing_within(server, STEP_S)
    assert tokens_of(server) - before < 3 * 1000


def test_queued_request_is_never_admitted_after_its_client_disconnects() -> None:
    with running_server("--random-model", "--max-running-requests", "1") as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "x", **LONG}) as reply:
            lines = reply.iter_lines()
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json={"prompt": "y", "max_tokens": 900}, timeout=0.3)
            time.sleep(0.3)
            assert server.held()["requests"] == 1
        assert held_nothing_within(server, STEP_S)
        assert server.between_steps(lambda engine: engine.context.counters.requests_admitted) == 1


def test_full_queue_returns_429_until_a_request_leaves() -> None:
    flags = ("--random-model", "--max-running-requests", "1", "--max-queued-requests", "2")
    with running_server(*flags) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 3, **LONG}) as reply:
            lines = reply.iter_lines()
            next(lines)
            refused = [http.post("/v1/completions", json={"prompt": "y"}) for _ in range(3)]
            refused.append(http.post("/v1/completions", json={"prompt": "y", "stream": True}))
        for answer in refused:
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert held_nothing_within(server, STEP_S)
        assert http.post("/v1/completions", json={"prompt": "y", "max_tokens": 2}).status_code == 200


async def stream_client(url: str, number: int, until: float, expected: dict[str, str], seen: Counter[str]) -> None:
    """Stream one request after another; clients that stay connected compare each text with the expected text."""
    rng = random.Random(number)
    leaves = number % LEAVERS == 0
    async with httpx.AsyncClient(base_url=url, headers=bearer(KEYS[1]), timeout=120) as http:
        while time.monotonic() < until:
            prompt = rng.choice(PROMPTS)
            body = {"prompt": prompt, "max_tokens": 200 if leaves else 16, "temperature": 0, "stream": True}
            patience = rng.uniform(0, 3) if leaves else 600.0
            try:
                async with asyncio.timeout(patience):
                    text = await read_stream(http, body, seen)
            except TimeoutError:
                seen["left"] += 1
                continue
            except Exception as error:
                seen[f"error: {type(error).__name__}: {error}"] += 1
                continue
            if not leaves:
                seen["same" if expected.setdefault(prompt, text) == text else f"other text of {prompt!r}"] += 1


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], seen: Counter[str]) -> str:
    parts, is_done = [], False
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        seen[f"status {reply.status_code}"] += 1
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    seen[f"error: {event}"] += 1
                else:
                    parts.append(event["choices"][0]["text"])
    if not is_done:
        seen["error: a stream without an end"] += 1
    return "".join(parts)


def test_abandoned_streams_do_not_affect_other_replies(server: RunningServer) -> None:
    seen: Counter[str] = Counter()
    expected: dict[str, str] = {}

    async def all_clients() -> None:
        until = time.monotonic() + STREAM_SECONDS
        await asyncio.gather(
            *(stream_client(server.url, number, until, expected, seen) for number in range(NUM_CLIENTS))
        )

    asyncio.run(all_clients())
    print(dict(seen), server.backend.state)
    assert seen["same"] and seen["left"] and not any("error" in what or "other" in what for what in seen), seen
    assert held_nothing_within(server, 2 * STEP_S)
