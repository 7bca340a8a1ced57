"""`prompt_logprobs` in vLLM's format: each prompt token's log-prob and rank, and the best alternatives."""

import json
from typing import Any

import pytest
import torch

from megatron_mamba_cache.policy.request_settings import ScoredToken
from megatron_mamba_cache.server import prompt_scores
from megatron_mamba_cache.server.prompt_scores import PromptScoring
from tests.server.prompt_log_probs import PROMPT, TOLERANCE, expected_log_probs, token_ids
from tests.server.running_server import RunningServer

MESSAGES = [{"role": "user", "content": "import os\n"}]


def assert_entries(entries: list[Any], tokens: list[int], after: torch.Tensor, top_n: int) -> None:
    """Assert that `entries` match a prompt; `after` are the log-probs of the vocabulary after each token."""
    assert len(entries) == len(tokens) and entries[0] is None
    for token, best, named in zip(tokens[1:], after[:-1], entries[1:], strict=True):
        own = named[str(token)]
        assert next(iter(named)) == str(token)
        assert own["logprob"] == pytest.approx(best[token].item(), abs=TOLERANCE)
        assert own["rank"] == 1 + int((best > best[token]).sum())
        values, ids = best.topk(top_n)
        ranked = sorted((entry["rank"], key) for key, entry in named.items() if entry["rank"] <= top_n)
        assert [int(key) for _, key in ranked] == ids.tolist()
        assert [named[key]["logprob"] for _, key in ranked] == pytest.approx(values.tolist(), abs=TOLERANCE)
        assert len(named) == top_n + (own["rank"] > top_n)


@pytest.mark.parametrize("top_n", [0, 3])
@pytest.mark.parametrize("others", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 5}, {"max_tokens": 0}, {"n": 2}])
def test_completion_returns_prompt_log_probs_and_ranks(
    server: RunningServer, others: dict[str, Any], top_n: int
) -> None:
    tokens = token_ids(server, PROMPT)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 3}
    with server.client() as http:
        plain = http.post("/v1/completions", json=body | others).json()
        found = http.post("/v1/completions", json=body | others | {"prompt_logprobs": top_n}).json()
    after = expected_log_probs(server, tokens)
    tokenizer = server.server.settings.tokenizer
    for choice, expected in zip(found["choices"], plain["choices"], strict=True):
        entries = choice.pop("prompt_logprobs")
        assert_entries(entries, tokens, after, top_n)
        for named in entries[1:]:
            texts = {key: entry["decoded_token"] for key, entry in named.items()}
            assert texts == {key: tokenizer.detokenize([int(key)], skip_special_tokens=False) for key in named}
        choice["logprobs"] = expected["logprobs"] = None
        assert choice == expected
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_chat_returns_prompt_log_probs_in_addition_to_its_choices(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "return_token_ids": True, "n": 2}
    with server.client() as http:
        found = http.post("/v1/chat/completions", json=body | {"prompt_logprobs": 2}).json()
    tokens = found["choices"][0]["prompt_token_ids"]
    assert_entries(found["prompt_logprobs"], tokens, expected_log_probs(server, tokens), 2)
    assert found["choices"][0]["logprobs"] is None


def test_each_prompt_has_its_own_log_probs(server: RunningServer) -> None:
    with server.client() as http:
        body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "prompt_logprobs": 0, "max_tokens": 1}
        choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [[list(entry or {}) for entry in choice["prompt_logprobs"]] for choice in choices] == [
        *[[[], ["2"], ["3"]]] * 2,
        *[[[], ["5"]]] * 2,
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": -1}, "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs requires stream to be false"),
        ({"prompt_logprobs": True}, "integer"),
    ],
)
def test_unsupported_prompt_log_prob_requests_are_refused(
    server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    with server.client() as http:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
            reply = http.post(f"/v1/{path}", json=body | fields)
            assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
            assert reply.json()["error"]["param"] == "prompt_logprobs"


def test_request_for_too_many_prompt_log_probs_is_refused_before_it_runs(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "_MOST_ENTRIES", 20)
    with server.client() as http:
        body = {"prompt": [[1] * 6, [1] * 7], "max_tokens": 1}
        assert http.post("/v1/completions", json=body | {"prompt_logprobs": 0}).status_code == 200
        reply = http.post("/v1/completions", json=body | {"prompt_logprobs": 1})
    message = "prompt_logprobs=1 requests 22 entries, and at most 20 are allowed"
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(message)


def test_infinite_prompt_log_probs_become_valid_json() -> None:
    scoring = PromptScoring(2, str)
    scores = [ScoredToken(float("-inf"), 9, (0.0, float("nan")), (5, 6))]
    found = scoring.entries([1, 7], scores)
    assert json.loads(json.dumps(found, allow_nan=False))[1] == {
        "7": {"logprob": -9999.0, "rank": 9, "decoded_token": "7"},
        "5": {"logprob": 0.0, "rank": 1, "decoded_token": "5"},
        "6": {"logprob": -9999.0, "rank": 2, "decoded_token": "6"},
    }
