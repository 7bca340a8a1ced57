"""Failing steps in a server: retries, and an error for each client once the cache is broken."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.server.engine_thread import MOST_FAILED_STEPS
from tests.server.front_end import wait_until
from tests.server.running_server import RunningServer, running_server

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def fail_steps(server: RunningServer, error: Exception, count: int, after: int = 0) -> None:
    """Make `count` steps raise `error`, after `after` successful steps."""

    def plant(engine: Any) -> None:
        sample, left = engine.context.runner._sample, [*[False] * after, *[True] * count]

        def failing_sample(*arguments: Any, **settings: Any) -> Any:
            if left and left.pop(0):
                raise error
            return sample(*arguments, **settings)

        engine.context.runner._sample = failing_sample

    server.between_steps(plant)


def test_failed_step_is_retried_without_losing_tokens() -> None:
    with running_server("--random-model") as server, server.client() as http:
        expected = http.post("/v1/completions", json=BODY).json()["choices"]
        fail_steps(server, RuntimeError("planted"), 1)
        assert http.post("/v1/completions", json=BODY).json()["choices"] == expected
        assert server.between_steps(lambda engine: engine.context.counters.steps_aborted) == 1
        server.assert_nothing_held()


def test_retry_of_a_failed_step_does_not_change_log_probs() -> None:
    body = BODY | {"logprobs": 3, "n": 2}
    with running_server("--random-model") as server, server.client() as http:
        expected = http.post("/v1/completions", json=body).json()["choices"]
        fail_steps(server, RuntimeError("planted"), 1, after=5)
        found = http.post("/v1/completions", json=body).json()["choices"]
        assert server.between_steps(lambda engine: engine.context.counters.steps_aborted) == 1
        for choice, other in zip(found, expected, strict=True):
            scores, others = choice.pop("logprobs"), other.pop("logprobs")
            assert choice == other and scores["tokens"] == others["tokens"]
            assert [list(best) for best in scores["top_logprobs"]] == [list(best) for best in others["top_logprobs"]]
        server.assert_nothing_held()


def test_request_that_always_fails_gets_500_while_others_continue() -> None:
    with running_server("--random-model") as server, server.client() as http:
        fail_steps(server, RuntimeError("planted"), 4)
        reply = http.post("/v1/completions", json=BODY)
        assert reply.status_code == 500 and "planted" in reply.json()["error"]["message"]
        assert http.post("/v1/completions", json=BODY).status_code == 200
        server.assert_nothing_held()


@pytest.mark.parametrize(
    ("error", "count"), [(CacheIntegrityError("planted"), 1), (RuntimeError("planted"), 10 * MOST_FAILED_STEPS)]
)
def test_every_request_gets_an_error_when_the_engine_is_broken(error: Exception, count: int) -> None:
    with running_server("--random-model") as server, server.client() as http:
        fail_steps(server, error, count)
        statuses = [http.post("/v1/completions", json=BODY).status_code for _ in range(MOST_FAILED_STEPS)]
        assert statuses[0] == 500 and statuses[-1] == 503
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert health.status_code == 503 and "planted" in health.json()["reason"]
        assert http.get("/metrics").status_code == 200


def test_failed_engine_stays_failed_despite_a_pending_flush() -> None:
    with running_server("--random-model") as server, server.client() as http, ThreadPoolExecutor() as pool:
        in_step, waiting = threading.Event(), threading.Event()

        def plant(engine: Any) -> None:
            def failing_sample(*_: Any, **__: Any) -> Any:
                in_step.set()
                waiting.wait(20)
                raise CacheIntegrityError("planted")

            engine.context.runner._sample = failing_sample

        server.between_steps(plant)
        request = pool.submit(http.post, "/v1/completions", json=BODY)
        assert in_step.wait(20)
        flush = pool.submit(http.post, "/admin/flush")
        wait_until(lambda: server.backend._commands.qsize())
        waiting.set()
        assert request.result().status_code == 500
        assert flush.result().status_code == 503 and "planted" in flush.result().json()["error"]["message"]
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=BODY, timeout=10).status_code == 503
