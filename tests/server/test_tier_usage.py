"""Usage in every API reports tokens restored from host and disk, and clients accept it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.job_progress import prompt_usage
from tests.server.exported_metrics import families
from tests.server.front_end import FrontEnd, wait_until
from tests.server.running_server import RunningServer, running_server
from tests.server.scripted_agent import TEMPLATES, agent_of

PROMPT = "def add(a, b):\n    return a + b\n" * 30
NEXT_TURN = PROMPT + "print(add(1, 2))\n"
TIERS = ("cached_tokens_from_host", "cached_tokens_from_disk")
ASKED = {"max_tokens": 9}
CHAT = [{"role": "user", "content": "abcdefgh"}]
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": ({**ASKED, "prompt": "abcdefgh"}, "prompt_tokens_details"),
    "/v1/chat/completions": ({**ASKED, "messages": CHAT}, "prompt_tokens_details"),
    "/v1/responses": ({"max_output_tokens": 9, "input": "abcdefgh"}, "input_tokens_details"),
    "/v1/messages": ({**ASKED, "model": "scripted", "messages": CHAT}, ""),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    with agent_of(tmp_path_factory.mktemp("agent") / "hermes", TEMPLATES["hermes"]) as agent:
        yield agent.server


@pytest.mark.parametrize("path", BODIES)
def test_usage_in_every_api_reports_tokens_restored_from_tiers(scripted: FrontEnd, path: str) -> None:
    body, details = BODIES[path]
    progress = Progress((97,), cached_tokens=6, cached_tokens_from_host=3, cached_tokens_from_disk=2, end="length")
    with scripted.client() as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, path, json=body)
        wait_until(lambda: scripted.backend.running)
        scripted.backend.deliver(progress)
        usage = answer.result(60).json()["usage"]
    found = usage[details] if details else usage
    assert [found[name] for name in TIERS] == [3, 2]


def test_anthropics_client_accepts_usage_with_tier_counts(scripted: FrontEnd) -> None:
    progress = Progress((97,), cached_tokens=6, cached_tokens_from_host=3, cached_tokens_from_disk=2, end="length")
    client = anthropic.Anthropic(base_url=scripted.listening.url, api_key="none", max_retries=0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.messages.create, **BODIES["/v1/messages"][0])
        wait_until(lambda: scripted.backend.running)
        scripted.backend.deliver(progress)
        usage = answer.result(60).usage
    assert (usage.cache_read_input_tokens, *(getattr(usage, name) for name in TIERS)) == (6, 3, 2)


def test_usage_counts_a_prompt_with_several_choices_once(scripted: FrontEnd) -> None:
    progress = Progress((97,), cached_tokens=6, cached_tokens_from_host=3, end="length")
    with scripted.client() as http, ThreadPoolExecutor(1) as pool:
        body = {"prompt": ["abcdefgh", "ijklmnop"], "n": 3, "max_tokens": 9}
        answer = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: len(scripted.backend.running) == 6)
        scripted.backend.deliver(progress)
        found = answer.result(60).json()["usage"]["prompt_tokens_details"]
    assert (found["cached_tokens"], *(found[name] for name in TIERS)) == (12, 6, 0)


def test_newly_written_tokens_are_not_reported_as_cached() -> None:
    request = RequestSpec(0, np.arange(8), 9, SamplingSettings())
    latest = Progress(cached_tokens=6, cached_tokens_from_host=4, cached_tokens_from_disk=2, written_tokens=9)
    found = prompt_usage(request, latest)
    assert (found.cached_tokens, found.cached_tokens_from_host, found.cached_tokens_from_disk) == (6, 4, 2)
    assert found.written_tokens == 2


def served(directory: Path) -> Any:
    """Run a server with all tiers; see `running_server`."""
    flags = ("--cache-gb", "0.1", "--host-cache-gb", "0.1", "--disk-cache-dir", directory, "--disk-cache-gb", "0.1")
    return running_server("--random-model", *map(str, flags))


def completed(server: RunningServer, prompt: str = PROMPT) -> Any:
    """Send a completion with OpenAI's client; return its prompt token counts."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    reply = client.completions.create(model="random", prompt=prompt, max_tokens=2, temperature=0)
    return reply.usage.prompt_tokens_details  # type: ignore[union-attr]


def test_restarted_server_reports_tokens_restored_from_disk(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first = completed(server)
        assert (first.cached_tokens, *(getattr(first, name) for name in TIERS)) == (0, 0, 0)
        wait_until(lambda: any(tmp_path.rglob("*.boundary")))  # without a further request
    with served(tmp_path) as server:
        again = completed(server, NEXT_TURN)
        assert again.cached_tokens_from_disk == again.cached_tokens > len(PROMPT) / 2
        assert again.cached_tokens_from_host == 0
        here = completed(server, NEXT_TURN)  # the prefix is now on the device
        assert here.cached_tokens == again.cached_tokens and [getattr(here, name) for name in TIERS] == [0, 0]
        found = {sample.labels["use"]: sample.value for sample in families(server)["mamba_cache_host_bytes"].samples}  # type: ignore[attr-defined]
        assert found["states_cached"] > 0 and found["free"] > 0
        found = {sample.labels["use"]: sample.value for sample in families(server)["mamba_cache_disk_bytes"].samples}  # type: ignore[attr-defined]
        assert set(found) == {"entries", "free"} and min(found.values()) > 0
        copies = families(server)["mamba_cache_tier_copies"].samples  # type: ignore[attr-defined]
        assert {sample.labels["to"] for sample in copies} == {"device", "host", "disk"}
