"""A server is ready and accepts requests only after its engine has warmed up."""

import threading

import httpx
import pytest

from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from tests.server.front_end import is_listening, listening, wait_until
from tests.server.running_server import made_server


def test_server_is_ready_only_after_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, allowed, warmup = threading.Event(), threading.Event(), MambaCacheEngine.warmup
    ready = threading.Event()

    def waiting_warmup(engine: MambaCacheEngine) -> None:
        begun.set()
        assert allowed.wait(20)
        warmup(engine)

    monkeypatch.setattr(MambaCacheEngine, "warmup", waiting_warmup)
    server = made_server("--random-model")
    with listening(server, on_ready=ready.set) as found, httpx.Client(base_url=found.url, timeout=60) as http:
        body = {"prompt": "abc", "max_tokens": 1}
        wait_until(lambda: is_listening(found.url))
        assert begun.wait(20)
        health = http.get("/health")
        assert health.status_code == 503 and health.json() == {"status": "starting"}
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_ready"
        assert not ready.wait(0.2)
        allowed.set()
        assert ready.wait(60)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
