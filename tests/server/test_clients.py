"""Other projects' clients run unchanged against the server: each in a process of its own, which checks what it gets.

They run with --run-clients, each where it is installed: in the environment of CLIENTS_PYTHON (default: this one), and
for Node in NODE_PATH. The scripts in clients/ run alone as well, against any server.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.types import Message, Receive, Scope, Send

from tests.oracle import HybridOracle
from tests.server.front_end import is_listening, listening, wait_until
from tests.server.running_server import KEYS, RED, RunningServer, made_server

pytestmark = pytest.mark.clients

SCRIPTS = Path(__file__).with_name("clients")
PYTHON = os.environ.get("CLIENTS_PYTHON", sys.executable)
# By what each script imports or runs.
CLIENTS = {
    "with_openai.py": "openai",
    "with_openai.mjs": "openai",
    "with_litellm.py": "litellm",
    "with_langchain_openai.py": "langchain_openai",
    "with_llm.py": "llm",
    "with_guidellm.py": "guidellm",
    "with_lm_eval.py": "lm_eval",
    "with_anthropic.py": "anthropic",
    "with_instructor.py": "instructor",
    "with_langchain_agents.py": "langchain_openai",
    "with_openai_agents.py": "openai",
}
_ALONE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Spoiled:
    """An application whose replies are false for every client but a plain one: other text, a token more."""

    app: Any

    @property
    def num_open(self) -> int:
        """What a drain asks for."""
        return self.app.num_open

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


@pytest.fixture(scope="module")
def spoiled_url() -> Iterator[str]:
    """Run a server whose replies are spoiled."""
    server = made_server(*KEYS)
    server.app = Spoiled(server.app)  # type: ignore[assignment]
    with listening(server) as found:
        wait_until(lambda: is_listening(found.url), 60)
        yield found.url


@pytest.mark.parametrize("script", CLIENTS)
def test_a_client_runs_unchanged(script: str, server: RunningServer) -> None:
    done = run_script(script, server.url)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: " in done.stdout
    if script == "with_lm_eval.py":
        assert_log_likelihoods(server, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("script", CLIENTS)
def test_its_script_fails_where_replies_are_false(script: str, spoiled_url: str) -> None:
    done = run_script(script, spoiled_url)
    assert done.returncode != 0, done.stdout
    assert "not so: " in done.stderr or "spoiled" in done.stderr, done.stderr  # what does not parse raises in a client


def run_script(script: str, url: str) -> "subprocess.CompletedProcess[str]":
    """Run a client's script against a server, or skip the test where the client is not installed."""
    command = _command(script, CLIENTS[script])
    words = [*command, str(SCRIPTS / script), url, RED]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ALONE
    return subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)


def assert_log_likelihoods(server: RunningServer, scored: list[list]) -> None:
    """Assert that lm_eval's log-likelihoods of choices, and whether they are greedy, are those of the oracle."""
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


def _command(script: str, package: str) -> list[str]:
    if script.endswith(".mjs"):
        node = shutil.which("node")
        if node is None:
            pytest.skip("node is not installed")
        if _fails([node, "-e", f"require.resolve('{package}')"]):
            pytest.skip(f"node does not find {package}; name its node_modules in NODE_PATH")
        return [node]
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if _fails([PYTHON, "-c", found]):
        pytest.skip(f"{PYTHON} does not have {package}; name an environment's python in CLIENTS_PYTHON")
    return [PYTHON]


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


def _spoiled(body: bytes) -> bytes:
    body = re.sub(rb'"(text|content)":"', rb'"\1":"spoiled', body)
    return re.sub(rb'"completion_tokens":(\d+)', lambda found: b'"completion_tokens":1' + found[1], body)


def _model_of(engine: object) -> object:
    return engine.controller.inference_wrapped_model.model  # type: ignore[attr-defined]
