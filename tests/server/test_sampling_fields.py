"""Sampling fields take effect over HTTP."""

from typing import Any

import pytest

from tests.server.running_server import RunningServer, at_once, running_server

PROMPT = "import os\nimport sys\n"
NUM_TOKENS = 24


def answered(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """Return the first choice of a completion; `fields` override greedy sampling."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True} | fields
    with server.client() as http:
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_logit_bias_makes_a_token_certain_or_impossible(server: RunningServer) -> None:
    plain = answered(server)["token_ids"]
    assert answered(server, logit_bias={"77": 100})["token_ids"] == [77] * NUM_TOKENS
    assert plain[0] not in answered(server, logit_bias={str(plain[0]): -100})["token_ids"]


def test_penalties_prevent_repeated_tokens(server: RunningServer) -> None:
    long: dict[str, Any] = {"prompt": "x = 1\n" * 40, "max_tokens": 200, "temperature": 0.5, "seed": 1}
    fields: Any = [{}, {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5}]
    replies = at_once(lambda extra: answered(server, **long, **extra)["token_ids"], fields)
    plain, *penalized = (len(set(reply)) for reply in replies)
    assert min(penalized) > plain, (plain, penalized)


def test_reply_ends_at_a_stop_token_after_min_tokens(server: RunningServer) -> None:
    plain = answered(server)["token_ids"]
    stopped = answered(server, stop_token_ids=[plain[5]])
    first = plain.index(plain[5])
    assert stopped["token_ids"] == plain[: first + 1] and stopped["finish_reason"] == "stop"
    longer = answered(server, stop_token_ids=[plain[5]], min_tokens=first + 4)
    assert plain[5] not in longer["token_ids"][: first + 3] and len(longer["token_ids"]) >= first + 4


def test_special_tokens_are_in_the_text_on_request(server: RunningServer) -> None:
    end = {"logit_bias": {"0": 100}, "ignore_eos": True, "max_tokens": 2}
    assert answered(server, **end)["text"] == ""
    assert answered(server, skip_special_tokens=False, **end)["text"] == "<|endoftext|>" * 2
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "skip_special_tokens": False, **end}
    with server.client() as http:
        reply = http.post("/v1/chat/completions", json=chat).json()
    assert reply["choices"][0]["message"]["content"] == "<|endoftext|>" * 2


FIELDS = {
    "temperature": 0.9,
    "min_p": 0.02,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.2,
    "logit_bias": {"77": 1.5},
    "min_tokens": 4,
    "seed": 5,
    "max_tokens": 80,
}


def test_seed_determines_the_tokens_despite_drafts_and_caching(server: RunningServer) -> None:
    prompt = PROMPT * 20
    first = answered(server, prompt=prompt, **FIELDS)["token_ids"]
    changes: list[dict[str, float]] = [{}, {"seed": 6}, {"min_p": 0}]
    again, *others = at_once(lambda change: answered(server, prompt=prompt, **FIELDS | change)["token_ids"], changes)
    assert again == first and first not in others
    with running_server("--num-speculative-tokens", "3", "--dtype", "fp32") as drafting, drafting.client() as http:
        body = {"prompt": prompt, "return_token_ids": True} | FIELDS
        reply = http.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["token_ids"] == first
    assert reply["usage"]["completion_tokens_details"]["draft_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias", "outside the vocabulary of 2048"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024 tokens"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05", "match pattern"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "match pattern"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"min_p": -1}, "min_p", "greater than or equal to 0"),
        ({"min_tokens": 1.5}, "min_tokens", "valid integer"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    ],
)
def test_sampling_values_out_of_range_are_refused(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    with server.client() as http:
        reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2} | fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and words in error["message"] and error["param"].startswith(param), error
