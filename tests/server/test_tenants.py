"""API keys over HTTP: only health routes work without a key, and keys share no prefixes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.front_end import wait_until
from tests.server.running_server import BLUE, MODEL, RED, RunningServer, bearer, running_server

PROMPT = "class Harbour:\n" + "    boats = []\n" * 30
PATHS = (
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/dashboard"),
    ("POST", "/admin/flush"),
    ("GET", "/admin/weights"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/%68ealth/x"),
)


def ask(server: RunningServer, key: str, **settings: Any) -> dict[str, Any]:
    with server.client(key) as http:
        reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "temperature": 0} | settings)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(server: RunningServer, key: str, **settings: Any) -> int:
    return ask(server, key, **settings)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": RED}], ids=["none", "wrong", "bare"])
def test_only_health_routes_need_no_api_key(server: RunningServer, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        assert http.get("/health").status_code == 200
        for method, path in PATHS:
            reply = http.request(method, path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key" and "www-authenticate" in reply.headers


def test_api_key_reuses_only_its_own_cached_prefixes(server: RunningServer) -> None:
    assert cached(server, RED) == 0 < cached(server, RED)
    assert cached(server, BLUE) == 0 < cached(server, BLUE)


def test_requests_with_different_salts_share_no_prefixes(server: RunningServer) -> None:
    assert cached(server, RED) == 0 == cached(server, RED, cache_salt="mine")
    assert cached(server, RED, cache_salt="mine") == cached(server, RED) > 0
    assert cached(server, BLUE, cache_salt="mine") == 0


def test_no_cached_block_is_shared_by_two_api_keys(server: RunningServer) -> None:
    def keys(engine: Any) -> set[int]:
        kv = engine.context.cache.kv
        return {kv.key_of(block) for block in range(kv.num_blocks)} - {None}

    def new_blocks(key: str) -> set[int]:
        before = server.between_steps(keys)
        token_ids.add(tuple(ask(server, key, return_token_ids=True)["choices"][0]["prompt_token_ids"]))
        return server.between_steps(keys) - before

    token_ids: set[tuple[int, ...]] = set()
    red, blue = new_blocks(RED), new_blocks(BLUE)
    assert len(token_ids) == 1 and len(red) == len(blue) >= 2 and not red & blue
    assert new_blocks(RED) == set()


def test_request_does_not_wait_for_the_same_prefix_of_another_key(server: RunningServer) -> None:
    """A deferred request takes longer, which would reveal the other key's prompt."""

    def deferred(engine: Any) -> int:
        return engine.context.counters.admissions_deferred

    def together(number: int, *keys: str) -> int:
        """Send one prompt with each key, all in one step; return the number of deferred requests."""

        held = threading.Event()

        def hold_up(_engine: Any) -> None:
            held.set()
            wait_until(lambda: server.backend._commands.qsize() >= len(keys), 60)  # all are sent to the engine

        before = server.between_steps(deferred)
        with ThreadPoolExecutor() as pool:
            held_up = pool.submit(server.between_steps, hold_up)
            assert held.wait(60)
            replies = [pool.submit(ask, server, key, prompt=f"# {number}\n{PROMPT}") for key in keys]
            assert held_up.result() is None and all(reply.result() for reply in replies)
        return server.between_steps(deferred) - before

    assert together(1, RED, RED) > 0 == together(2, RED, BLUE)


def test_only_an_admin_key_can_read_metrics_and_flush_the_cache() -> None:
    flags = ("--random-model", "--api-key", RED, "--admin-api-key", "boss")
    with running_server(*flags) as server, server.client(RED) as user, server.client("boss") as admin:
        for path in ("/metrics", "/dashboard", "/admin/weights"):
            assert [user.get(path).status_code, admin.get(path).status_code] == [403, 200], path
        assert user.get("/v1/models").status_code == 200
