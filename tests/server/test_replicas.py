"""`serve` under torchrun: replicas, a coordinator and one front end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command_line.command_runs import REPOSITORY
from tests.distributed.world import free_port, is_rank
from tests.server.running_server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(is_rank(), reason="starts torchrun itself")]

STARTED_S = 240.0  # generous, because machines that run tests can be very busy
PROMPT = "def add(a, b):\n    return a + b\n" * 8


@contextmanager
def replicas(*flags: str, model: str = "--random-model") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `serve` in two processes; yield torchrun's process and the URL. Model "" is the example model."""
    port = free_port()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    serve = ["-m", "megatron_mamba_cache", "serve", "--device", "cpu", "--port", str(port)]
    settings = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, *launcher, *serve, *filter(None, [model]), *flags],
        cwd=REPOSITORY,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url) or process.poll() is not None, STARTED_S)
        yield process, url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


def streamed(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True} | body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"mamba_cache_{name} "))


def asked(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ranks_of(entry: dict[str, Any] | None) -> dict[str, int]:
    return {} if entry is None else {token: details["rank"] for token, details in entry.items()}


def cached(http: httpx.Client) -> int:
    return asked(http)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "flags", [(), ("--tensor-model-parallel-size", "2")], ids=["two replicas", "one replica of two"]
)
def test_replicas_handle_streams_cancels_flushes_and_stops_like_one_engine(flags: tuple[str, ...]) -> None:
    with running_server("--random-model") as server, server.client() as http:
        sampled = {"seed": 5, "temperature": 1.0, "max_tokens": 12, "n": 2, "logprobs": 1}
        alone, alone_sampled = asked(http), asked(http, **sampled)
        scored = {"echo": True, "logprobs": 2, "max_tokens": 2}
        alone_scored = asked(http, **scored)["choices"][0]["logprobs"]
        alone_ranked = asked(http, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
        changed = {"frequency_penalty": 1.5, "logit_bias": {"97": 2.5}, "min_tokens": 3, "stop_token_ids": [98]}
        alone_changed = asked(http, **changed)["choices"]
    with replicas(*flags) as (process, url), httpx.Client(base_url=url, timeout=120) as http:
        first = asked(http)
        assert first["choices"] == alone["choices"] and first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = asked(http, **sampled)
        assert [choice["text"] for choice in again["choices"]] == [c["text"] for c in alone_sampled["choices"]]
        assert asked(http, **changed)["choices"] == alone_changed != alone["choices"]
        for echo in (asked(http, **scored)["choices"][0], streamed(http, temperature=0, **scored)[0]["choices"][0]):
            values = echo["logprobs"]["token_logprobs"]
            assert echo["text"].startswith(PROMPT) and len(values) > 50
            assert values[1:] == pytest.approx(alone_scored["token_logprobs"][1 : len(values)], abs=1e-3)
        for max_tokens in (1, 3):
            ranked = asked(http, prompt_logprobs=2, max_tokens=max_tokens)["choices"][0]["prompt_logprobs"]
            assert [ranks_of(entry) for entry in ranked] == [ranks_of(entry) for entry in alone_ranked]
        events = streamed(http, max_tokens=12, temperature=0)
        assert len(events) > 6  # streamed during generation
        assert "".join(event["choices"][0]["text"] for event in events) == alone["choices"][0]["text"]
        assert cached(http) > 0
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2000, "ignore_eos": True}, timeout=0.5)
        wait_until(lambda: metric(http, "requests_running") == 0, 20)
        assert metric(http, "generated_tokens_total") < 1500
        version = http.post("/admin/flush", json={"weights_version": "2"}).json()
        assert version == {"weights_version": "2"} and cached(http) == 0 < cached(http)
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        stream = http.stream("POST", "/v1/completions", json=body)
        with httpx.Client(base_url=url, timeout=120) as probe, stream as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            assert probe.get("/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: probe.get("/health").status_code == 503, 1)
            assert probe.post("/v1/completions", json={"prompt": "y"}).headers["Retry-After"]
            assert list(lines)[-1] == "data: [DONE]"
        process.wait(60)
    assert not is_ready(url)


def test_replicas_apply_grammars_like_one_engine() -> None:
    schema = {"type": "array", "items": {"enum": ["a", 10, True]}, "minItems": 2, "maxItems": 4}
    formed = {"guided_json": schema, "max_tokens": 60, "temperature": 1.0, "seed": 3, "n": 3}
    with running_server() as server, server.client() as http:
        alone = [choice["text"] for choice in asked(http, **formed)["choices"]]
    with replicas(model="") as (_, url), httpx.Client(base_url=url, timeout=120) as http:
        found = [choice["text"] for choice in asked(http, **formed)["choices"]]
        refused = http.post("/v1/completions", json={"prompt": "x", "guided_json": {"not": {"const": 1}}})
    assert found == alone and all(2 <= len(json.loads(text)) <= 4 for text in found)
    assert refused.status_code == 400 and "not" in refused.json()["error"]["message"]


def test_replicas_report_tokens_restored_from_a_shared_disk_tier(tmp_path: Path) -> None:
    tiers = ("--cache-gb", "0.1", "--host-cache-gb", "0.2", "--disk-cache-dir", str(tmp_path), "--disk-cache-gb", "0.1")
    turn = PROMPT + "print(add(1, 2))\n"
    with replicas(*tiers) as (_, url), httpx.Client(base_url=url, timeout=120) as http:
        assert asked(http)["usage"]["prompt_tokens_details"]["cached_tokens_from_disk"] == 0
        wait_until(lambda: asked(http) and any(tmp_path.rglob("*.boundary")), 60)
    for streams in (False, True):
        with replicas(*tiers) as (_, url), httpx.Client(base_url=url, timeout=120) as http:
            if streams:
                options = {"stream_options": {"include_usage": True}}
                usage = streamed(http, prompt=turn, max_tokens=2, **options)[-1]["usage"]
            else:
                usage = asked(http, prompt=turn)["usage"]
            details = usage["prompt_tokens_details"]
            assert details["cached_tokens_from_disk"] == details["cached_tokens"] > len(PROMPT) / 2
            assert details["cached_tokens_from_host"] == 0
            wait_until(lambda: metric(http, "prompt_tokens_from_disk_total") > 0, 60)
