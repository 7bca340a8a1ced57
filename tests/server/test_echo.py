"""Echoed prompts with log-probs as evaluation clients use them, streamed or not."""

import json
from typing import Any

import httpx
import pytest
import torch

from tests.server.prompt_log_probs import PROMPT, TOLERANCE, expected_log_probs, token_ids
from tests.server.running_server import RunningServer


def choices(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Send a request; return its choices, assembled from the events if it is streamed."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5} | body
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()["choices"]
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        (new,) = event["choices"]
        known = found.setdefault(new["index"], {"index": new["index"], "text": "", "logprobs": None})
        known["text"] += new["text"]
        known["finish_reason"] = new["finish_reason"]
        if new["logprobs"] is not None:
            known["logprobs"] = known["logprobs"] or {name: [] for name in new["logprobs"]}
            for name, values in new["logprobs"].items():
                known["logprobs"][name] += values
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echoed_log_probs_match_a_forward_pass_without_cache(
    server: RunningServer, stream: bool, as_ids: bool, max_tokens: int
) -> None:
    tokens = token_ids(server, PROMPT)
    with server.client() as http:
        for _ in range(2):  # the prefix is cached in the second run
            prompt = tokens if as_ids else PROMPT
            (choice,) = choices(http, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream)
            (plain,) = choices(http, max_tokens=max(max_tokens, 1), logprobs=2)
    reply = plain["text"] if max_tokens else ""
    assert choice["text"] == PROMPT + reply and choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert all(len(values) == len(tokens) + max_tokens for values in found.values())
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    after = expected_log_probs(server, tokens)
    values = found["token_logprobs"][1 : len(tokens)]
    assert values == pytest.approx(
        after[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), abs=TOLERANCE
    )
    best = [max(named.values()) for named in found["top_logprobs"][1 : len(tokens)]]
    assert best == pytest.approx(after[:-1].max(-1).values.tolist(), abs=TOLERANCE)
    is_best = (after[:-1].argmax(-1) == torch.tensor(tokens[1:])).tolist()
    assert [value == most for value, most in zip(values, best, strict=True)] == is_best  # is_greedy in lm_eval
    generated = found["token_logprobs"][len(tokens) :]
    assert generated == pytest.approx(plain["logprobs"]["token_logprobs"][:max_tokens], abs=TOLERANCE)
    assert "".join(found["tokens"]).replace("\ufffd", "") == (PROMPT + reply).replace("é", "")
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_prepends_the_prompt_to_the_text(server: RunningServer, stream: bool) -> None:
    with server.client() as http:
        (plain,) = choices(http)
        for prompt in (PROMPT, token_ids(server, PROMPT)):
            (choice,) = choices(http, prompt=prompt, echo=True, stream=stream)
            assert choice["text"] == PROMPT + plain["text"] and choice["logprobs"] is None
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "echo": True, "return_token_ids": True}
        whole = http.post("/v1/completions", json=body).json()
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"] == 5
    assert whole["choices"][0]["prompt_token_ids"] == token_ids(server, PROMPT)


def test_every_choice_echoes_its_own_prompt(server: RunningServer) -> None:
    with server.client() as http:
        found = choices(http, prompt=["def a", "class B:"], n=2, echo=True, logprobs=1, temperature=1, seed=3)
    prompts = ["def a", "def a", "class B:", "class B:"]
    for choice, prompt in zip(found, prompts, strict=True):
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"]["token_logprobs"].count(None) == 1


def test_zero_max_tokens_generates_no_tokens(server: RunningServer) -> None:
    with server.client() as http:
        reply = http.post("/v1/completions", json={"prompt": [PROMPT * 9, "x"], "max_tokens": 0}).json()
        assert [choice["text"] for choice in reply["choices"]] == ["", ""]
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == 0
        again = http.post("/v1/completions", json={"prompt": PROMPT * 9, "max_tokens": 1}).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # its prefix was published


def test_completion_alternatives_include_the_sampled_token(server: RunningServer) -> None:
    with server.client() as http:
        found = [choices(http, temperature=2, seed=seed, logprobs=1, max_tokens=12)[0] for seed in range(3)]
    sizes = set()
    for choice in found:
        log_probs = choice["logprobs"]
        entries = zip(log_probs["tokens"], log_probs["token_logprobs"], log_probs["top_logprobs"], strict=True)
        for token, value, best in entries:
            assert token in best and value <= max(best.values()) and len(best) <= 2
            sizes.add(len(best))
    assert sizes == {1, 2}
