"""Third-party clients work unmodified with the server, each in a separate process.

These tests run with --run-clients, each in an environment that `client_environments` builds; the output ends with a
table of the clients' releases. The scripts in clients/ also run alone, against any server or a scripted one.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from starlette.types import Message, Receive, Scope, Send

from megatron_mamba_cache.server.app import Server
from tests.oracle import HybridOracle
from tests.server.client_environments import CLIENTS, NotHere, environment_of
from tests.server.front_end import is_listening, listening, wait_until
from tests.server.running_server import KEYS, RED, RunningServer, made_server
from tests.server.scripted_model import scripted_model_server

pytestmark = pytest.mark.clients

_ALONE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Application that changes text and token counts in replies to every client but plain HTTP."""

    app: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)  # attributes that draining uses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""

        async def spoiling_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
                message = message | {"headers": headers}
            elif message["type"] == "http.response.body":
                message = message | {"body": _spoiled(message.get("body", b""))}
            await send(message)

        is_plain = scope["type"] != "http" or (b"user-agent", b"plain HTTP") in scope["headers"]
        await self.app(scope, receive, send if is_plain else spoiling_send)


@contextmanager
def url_of(server: Server, change: Callable[[Any], Any] = lambda app: app) -> Iterator[str]:
    """Context manager: run a server with its application replaced by `change`; yield its URL."""
    server.app = change(server.app)
    with listening(server) as found:
        wait_until(lambda: is_listening(found.url) and httpx.get(f"{found.url}/health").status_code == 200, 60)
        yield found.url


@pytest.fixture(scope="module")
def scripted_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server whose replies are scripted in the conversations."""
    with url_of(scripted_model_server(tmp_path_factory.mktemp("scripted") / "model", *KEYS)) as url:
        yield url


@pytest.fixture(scope="module")
def spoiled_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, str]]:
    """Run a server with spoiled replies, and a scripted server with spoiled replies."""
    scripted = scripted_model_server(tmp_path_factory.mktemp("spoiled") / "model", *KEYS)
    with url_of(made_server(*KEYS), Spoiled) as plain, url_of(scripted, Spoiled) as other:
        yield {False: plain, True: other}


@pytest.mark.parametrize("script", CLIENTS)
def test_third_party_client_works_unmodified(
    script: str, server: RunningServer, scripted_url: str, record_property: Callable[[str, object], None]
) -> None:
    done = run_script(script, scripted_url if CLIENTS[script].is_scripted else server.url)
    record_property("client", (script, environment_of(CLIENTS[script]).versions))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: " in done.stdout
    if script == "with_lm_eval.py":
        assert_log_likelihoods(server, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("script", CLIENTS)
def test_client_script_fails_when_replies_are_wrong(script: str, spoiled_urls: dict[bool, str]) -> None:
    done = run_script(script, spoiled_urls[CLIENTS[script].is_scripted])
    assert done.returncode != 0, done.stdout
    assert "not so: " in done.stderr or "spoiled" in done.stderr, done.stderr  # the client raises if parsing fails


def run_script(script: str, url: str) -> "subprocess.CompletedProcess[str]":
    """Run a client script against a server; skip the test if its environment is unavailable."""
    try:
        where = environment_of(CLIENTS[script])
    except NotHere as error:
        pytest.skip(str(error))
    words = [where.command, str(where.folder / script), url, RED]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ALONE
    return subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)


def assert_log_likelihoods(server: RunningServer, scored: list[list]) -> None:
    """Assert that lm_eval's log-likelihoods and is_greedy flags equal those of the oracle."""
    tokenize = server.server.settings.tokenizer.tokenize
    oracle = server.between_steps(lambda engine: HybridOracle.from_megatron(_model_of(engine)))
    for document, scores in scored:
        for choice, (log_likelihood, is_greedy) in zip(document["choices"], scores, strict=True):
            num_context = len(tokenize(document["text"]))
            tokens = torch.tensor(tokenize(document["text"] + choice))
            log_probs = oracle.logits(tokens.tolist()).log_softmax(-1)[num_context - 1 : -1]
            wanted = log_probs.gather(1, tokens[num_context:, None]).sum().item()
            assert float(log_likelihood) == pytest.approx(wanted, abs=1e-3), (document, choice)
            assert (is_greedy == "True") == bool((log_probs.argmax(1) == tokens[num_context:]).all())


def _spoiled(body: bytes) -> bytes:
    body = re.sub(rb'"(text|content|delta)":"', rb'"\1":"spoiled', body)
    return re.sub(rb'"completion_tokens":(\d+)', lambda found: b'"completion_tokens":1' + found[1], body)


def _model_of(engine: object) -> object:
    return engine.controller.inference_wrapped_model.model  # type: ignore[attr-defined]
