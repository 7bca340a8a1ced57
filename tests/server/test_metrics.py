"""Metrics in `/metrics`: help texts, queue and token times, process and model."""

import re
import time
from dataclasses import fields

from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot
from megatron_mamba_cache.server.backend import BackendState, Progress
from megatron_mamba_cache.server.metrics import COUNTER_TEXTS
from tests.server.exported_metrics import families
from tests.server.front_end import FrontEnd, front_end, request_bytes, wait_until
from tests.server.running_server import RunningServer
from tests.server.scripted_backend import ScriptedBackend

EVERY_NAME = (
    *("ready", "requests_running", "requests_waiting", "requests_inside", "requests_refused", "generated_tokens"),
    *("http_responses", "replies", "prompt_tokens", "time_to_first_token_seconds", "request_seconds"),
    *("requests_without_hit", "state_slots", "kv_blocks"),
)


def samples(server: FrontEnd | RunningServer, name: str) -> dict[str, float]:
    return {sample.name: sample.value for sample in families(server)[name].samples if not sample.labels}  # type: ignore[attr-defined]


def test_every_cache_counter_has_a_help_text() -> None:
    numbers = {entry.name for entry in fields(CacheCounters) if isinstance(getattr(CacheCounters(), entry.name), int)}
    assert set(COUNTER_TEXTS) == numbers


def test_metric_names_are_stable_and_every_metric_has_a_help_text() -> None:
    cache = CacheSnapshot(CacheCounters(requests_without_hit={"new_prefix": 1}), {"free": 1}, {"free": 2})
    with front_end(backend=ScriptedBackend(BackendState(is_ready=True, cache=cache))) as server:
        found = families(server)
        for name, family in found.items():
            text = family.documentation  # type: ignore[attr-defined]
            assert len(text.split()) >= 3 and "CacheCounters" not in text and "CacheSnapshot" not in text, (name, text)
        names = {*EVERY_NAME, *COUNTER_TEXTS, "queue_seconds", "inter_token_seconds", "model_info"}
        assert {f"mamba_cache_{name}" for name in names} <= set(found)


def test_process_and_model_metrics_are_exported() -> None:
    with front_end() as server, server.client() as http:
        text = http.get("/metrics").text
        assert 'mamba_cache_model_info{model="scripted"} 1.0' in text
        assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)
        assert re.search(r"^process_cpu_seconds_total ", text, re.MULTILINE)


def test_time_between_tokens_excludes_the_first_token() -> None:
    with front_end() as server:
        connection = server.connection(request_bytes({"prompt": "abc", "max_tokens": 9}))
        wait_until(lambda: server.backend.running)
        for tokens in ((97,), (98, 99, 100), (101,)):
            server.backend.deliver(Progress(tokens))
            time.sleep(0.05)
        server.backend.deliver(Progress(end="length"))
        assert connection.recv(65_536)
        found = samples(server, "mamba_cache_inter_token_seconds")
        assert found["mamba_cache_inter_token_seconds_count"] == 4
        assert 0.1 <= found["mamba_cache_inter_token_seconds_sum"] < 5


def test_queue_time_ends_at_the_requests_first_step() -> None:
    with front_end() as server:
        connection = server.connection(request_bytes({"prompt": "abc", "max_tokens": 9}))
        wait_until(lambda: server.backend.running)
        time.sleep(0.5)
        server.backend.deliver(Progress((97,), running_s=0.4, end="length"))
        assert connection.recv(65_536)
        found = samples(server, "mamba_cache_queue_seconds")
        assert found["mamba_cache_queue_seconds_count"] == 1
        waited = samples(server, "mamba_cache_time_to_first_token_seconds")
        to_first_token = waited["mamba_cache_time_to_first_token_seconds_sum"]
        assert 0.1 <= found["mamba_cache_queue_seconds_sum"] <= to_first_token - 0.35


def test_queue_time_excludes_prefill_time(server: RunningServer) -> None:
    def count(name: str, suffix: str) -> float:
        return samples(server, name)[f"{name}_{suffix}"]

    names = ("mamba_cache_queue_seconds", "mamba_cache_time_to_first_token_seconds")
    before = [count(name, "sum") for name in names]
    with server.client() as http:
        body = {"prompt": "def f():\n" * 60, "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
    queued, first = (count(name, "sum") - value for name, value in zip(names, before, strict=True))
    assert 0 < queued < first  # queue time excludes computing the prompt
