"""`return_routed_experts`: each choice has the experts of its tokens, as an .npy file in base64."""

import io
import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from megatron_mamba_cache import build_engine, models
from megatron_mamba_cache.models import load_tokenizer
from megatron_mamba_cache.server.app import Server, ServerSettings
from megatron_mamba_cache.server.engine_thread import EngineThread
from tests.mcore.engine_runs import Hybrid, cache_config, tiny_hybrid
from tests.oracle import ROUTING_MARGIN
from tests.server.front_end import listening
from tests.server.running_server import RunningServer, wait_until_ready

PROMPT = "the experts of every token of this text"


def decoded(choice: dict[str, Any]) -> npt.NDArray[np.int16]:
    """Return the array in a choice."""
    found: npt.NDArray[np.int16] = np.load(io.BytesIO(b64decode(choice["routed_experts"], validate=True)))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the tokenizer of the model that ships, which has a chat template."""
    directory = Path(models.__file__).with_name("small_python_model")
    return load_tokenizer(str(directory), json.loads((directory / "config.json").read_bytes())["vocab_size"])


@pytest.fixture(scope="module")
def subject(tokenizer: Any) -> Hybrid:
    """Return a model with two MoE layers for the tokenizer."""
    return tiny_hybrid(pattern="MEM*E", vocab_size=tokenizer.vocab_size)


@pytest.fixture(scope="module")
def client(subject: Hybrid, tokenizer: Any) -> Iterator[httpx.Client]:
    """Return a client of a server that records routes."""
    engine = build_engine(subject.model, cache_config(subject.sizes, record_routes=True), tokenizer=tokenizer)
    server = Server(EngineThread(engine, frozenset()), ServerSettings("moe", tokenizer, frozenset()))
    with listening(server) as found, httpx.Client(base_url=found.url, timeout=60) as http:
        wait_until_ready(found.url)
        yield http
    engine.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_return_the_oracles_routes(client: httpx.Client, subject: Hybrid, path: str) -> None:
    text = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = text | {"max_tokens": 6, "n": 2, "return_token_ids": True, "seed": 1}
    for choice in client.post(path, json=body | {"return_routed_experts": True}).json()["choices"]:
        tokens, found = choice["prompt_token_ids"] + choice["token_ids"], decoded(choice)
        expected, gaps = subject.oracle.experts(tokens)
        sure = (gaps >= ROUTING_MARGIN).numpy()[:-1]
        assert found.dtype == np.int16 and found.shape == (len(tokens), 2, 2) and sure.sum() > len(tokens) // 2
        assert np.array_equal(np.sort(found[:-1], -1)[sure], expected.numpy()[:-1][sure]) and (found[-1] == -1).all()
    assert "routed_experts" not in client.post(path, json=body).json()["choices"][0]


def test_streams_refuse_routed_experts(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "return_routed_experts": True, "stream": True}
    error = client.post("/v1/completions", json=body).json()["error"]
    assert "return_routed_experts requires stream to be false" in error["message"]


def test_server_that_does_not_record_routes_names_the_flag(server: RunningServer) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "a", "return_routed_experts": True})
        plain = http.post("/v1/completions", json={"prompt": "a", "return_routed_experts": False, "stream": True})
    assert answer.status_code == 400 and plain.status_code == 200
    error = answer.json()["error"]
    assert "--record-routes" in error["message"] and error["param"] == "return_routed_experts"
