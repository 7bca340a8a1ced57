"""History for the dashboard: periodic samples, bounded, and quantiles within five percent."""

import random

import pytest

from megatron_mamba_cache.metrics import CacheCounters, CacheSnapshot
from megatron_mamba_cache.server.backend import BackendState
from megatron_mamba_cache.server.dashboard import History
from megatron_mamba_cache.server.metrics import Durations
from tests.server.front_end import BLUE, RED, front_end, scripted_server


def state(generated: int, skipped: int = 0, running: int = 0) -> BackendState:
    counters = CacheCounters(prompt_tokens_skipped=skipped, prefill_tokens_computed=2 * skipped)
    return BackendState(is_ready=True, cache=CacheSnapshot(counters), num_running=running, generated_tokens=generated)


def named(body: dict[str, object]) -> list[dict[str, float]]:
    return [dict(zip(body["fields"], values, strict=True)) for values in body["samples"]]  # type: ignore[arg-type,call-overload]


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def history(now: list[float]) -> History:
    server = scripted_server()
    return History(server.backend, server.gate, server.metrics, lambda: now[0])


def test_sample_contains_counter_increases_since_the_previous_sample(history: History, now: list[float]) -> None:
    for at, generated, skipped in ((105.0, 50, 7), (110.5, 80, 7)):
        now[0] = at
        history._backend.state = state(generated, skipped, running=3)  # type: ignore[misc]
        history._metrics.responses.labels("429").inc(2)
        history._metrics.responses.labels("404").inc()
        history._metrics.responses.labels("503").inc()
        history.sample()
    first, second = named(history.body())
    assert (first["seconds"], first["generated_tokens"], first["prompt_tokens_skipped"]) == (5.0, 50, 7)
    assert (second["seconds"], second["generated_tokens"], second["prompt_tokens_skipped"]) == (5.5, 30, 0)
    assert first["prompt_tokens_computed"] == 14 and second["running"] == 3
    assert (second["refused"], second["client_errors"], second["left"], second["server_errors"]) == (2, 1, 0, 1)


def test_percentiles_are_reported_per_sample_and_for_the_last_minute(history: History) -> None:
    for seconds in (0.1, 0.2, 0.4):
        history._metrics.note_first_token(seconds)
        history._metrics.note_gap(seconds, 2)
        history.sample()
    history.sample()
    found = named(history.body())
    assert found[1]["first_token_p50"] == pytest.approx(0.2, rel=0.05)
    assert found[2]["inter_token_p99"] == pytest.approx(0.2, rel=0.05)
    assert found[3]["first_token_p50"] is None
    minute = history.body()["last_minute"]
    assert minute["first_token"]["p50"] == pytest.approx(0.2, rel=0.05)
    assert minute["inter_token"]["p99"] == pytest.approx(0.2, rel=0.05)
    for _ in range(12):
        history.sample()
    assert history.body()["last_minute"]["first_token"] == {"p50": None, "p95": None, "p99": None}


def test_history_is_bounded_and_returns_only_new_samples(history: History) -> None:
    for _ in range(800):
        history.sample()
    times = [sample["time"] for sample in named(history.body())]
    assert len(times) == 720 and times == sorted(times)
    assert all(sample["time"] > times[-2] for sample in named(history.body(times[-2])))


def test_quantile_estimates_are_within_five_percent() -> None:
    rng = random.Random(5)
    times = sorted(rng.lognormvariate(-4, 2) for _ in range(5000))
    parts = [Durations(), Durations()]
    for one in times:
        parts[rng.randrange(2)].add(one)
    whole = Durations.together(parts)
    for share in (0.5, 0.95, 0.99, 1.0):
        assert whole.quantile(share) == pytest.approx(times[int(share * 5000) - 1], rel=0.05)
    assert len(whole._counts) < 500 and Durations().quantile(0.5) is None
    whole.add(0.0)


def test_history_route_returns_samples_and_requires_an_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mamba_cache.server.dashboard.INTERVAL_S", 0.02)
    with front_end() as server, server.client() as http:
        assert http.get("/dashboard/history", headers={"Authorization": "Bearer nobody"}).status_code == 401
        body = http.get("/dashboard/history").json()
        while len(body["samples"]) < 3:
            body = http.get("/dashboard/history").json()
        assert body["model"] == "scripted" and len(body["fields"]) == len(body["samples"][0])
        latest = named(body)[-1]["time"]
        newer = named(http.get("/dashboard/history", params={"after": latest}).json())
        assert all(sample["time"] > latest for sample in newer)
        assert http.get("/dashboard/history?after=soon").status_code == 400
    with front_end(keys=(RED, BLUE)) as server, server.client() as http:
        assert http.get("/dashboard/history", headers={"Origin": "https://evil.example"}).status_code == 403
