"""A random model with a byte-fallback tokenizer over HTTP: every API and mode returns the same text."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.text_stream import common_length
from tests.command_line.tiny_directories import save_model
from tests.models.tokenizer_kinds import SCRIPTS, save_kind, size_of
from tests.server.front_end import front_end, wait_until
from tests.server.running_server import running_server

SAMPLED: dict[str, Any] = {"temperature": 2, "max_tokens": 24, "return_token_ids": True}
NUM_TOKENS = SAMPLED["max_tokens"]
SEEDS = range(6)
MESSAGES = [{"role": "user", "content": "The lazy dog, größer and 世"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sentence_piece")
    save_kind(path, "SentencePiece BPE", "begin")
    save_model("bamba", path, size_of(path) + 3)
    return path


@pytest.fixture(scope="module")
def backend(directory: Path) -> Tokenizer:
    """Return the tokenizer loaded with the tokenizers package."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def http(directory: Path) -> Iterator[httpx.Client]:
    with running_server("--hf-model", str(directory)) as server, server.client() as client:
        yield client
        server.assert_nothing_held()


def asked(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


def streamed(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def added(backend: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """Return the text that tokens add to earlier tokens."""
    head, whole = backend.decode(before), backend.decode([*before, *tokens])
    return whole[common_length(whole, head) :]


def prompts(backend: Tokenizer) -> list[Any]:
    """Return prompts: text in several scripts, and token ids that end inside a character or a run of bytes."""
    texts = [SCRIPTS[name] for name in ("Latin", "Thai", "emoji")]
    ids = backend.encode(SCRIPTS["Chinese"]).ids
    return [*texts, ids, ids[:-1], ids[:-2]]


def test_completion_text_is_the_same_with_streaming_and_with_echo(http: httpx.Client, backend: Tokenizer) -> None:
    texts = []
    for prompt in prompts(backend):
        for seed in SEEDS[:2]:
            body = SAMPLED | {"prompt": prompt, "seed": seed}
            (choice,) = asked(http, "/v1/completions", **body)["choices"]
            before, tokens = choice["prompt_token_ids"], choice["token_ids"]
            assert choice["text"] == added(backend, before, tokens), (prompt, seed)
            events = streamed(http, "/v1/completions", **body)
            assert "".join(event["choices"][0]["text"] for event in events) == choice["text"], (prompt, seed)
            whole = asked(http, "/v1/completions", **body, echo=True)["choices"][0]["text"]
            head = prompt if isinstance(prompt, str) else backend.decode(prompt)
            assert whole == head + choice["text"], (prompt, seed)
            found = asked(http, "/detokenize", tokens=[*before, *tokens])["prompt"]
            assert found == backend.decode([*before, *tokens], skip_special_tokens=False)
            texts.append(choice["text"])
    assert any(text[:1] == " " for text in texts) and sum("\ufffd" in text for text in texts) > 2
    first, second = asked(http, "/v1/completions", **SAMPLED, prompt="a", n=2, seed=3)["choices"]
    for choice in (first, second):
        assert choice["text"] == added(backend, choice["prompt_token_ids"], choice["token_ids"])
    assert first["text"] != second["text"]


def test_chat_reply_is_the_same_with_and_without_streaming(http: httpx.Client, backend: Tokenizer) -> None:
    for seed in SEEDS:
        body = SAMPLED | {"messages": MESSAGES, "seed": seed}
        (choice,) = asked(http, "/v1/chat/completions", **body)["choices"]
        content = choice["message"]["content"]
        assert content == added(backend, choice["prompt_token_ids"], choice["token_ids"]), seed
        events = streamed(http, "/v1/chat/completions", **body)
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == content, seed


def test_next_turn_contains_the_exact_tokens_of_the_reply(http: httpx.Client) -> None:
    num_odd = 0
    for seed in SEEDS:
        body = SAMPLED | {"messages": MESSAGES, "seed": seed}
        (choice,) = asked(http, "/v1/chat/completions", **body)["choices"]
        body["messages"] = [*MESSAGES, choice["message"], {"role": "user", "content": "and?"}]
        exact = [*choice["prompt_token_ids"], *choice["token_ids"]]
        found = asked(http, "/v1/chat/completions", **body)["choices"][0]["prompt_token_ids"]
        assert found[: len(exact)] == exact, seed
        num_odd += "\ufffd" in choice["message"]["content"]
    assert num_odd > 1


TRIMMING = "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}{% endfor %}<assistant>"


def test_trimmed_reply_keeps_its_tokens_in_the_next_turn(tmp_path: Path) -> None:
    save_kind(tmp_path, "SentencePiece BPE", "begin", TRIMMING)
    tokenizer = load_tokenizer(tmp_path, size_of(tmp_path))
    assert tokenizer is not None
    reply = [tokenizer.id_of("▁lazy"), *map(tokenizer.id_of, "dog")]  # tokens that the tokenizer would not produce
    with front_end(tokenizer=tokenizer) as found, found.client() as client, ThreadPoolExecutor(1) as pool:

        def turn(messages: list[dict[str, Any]]) -> tuple[list[int], str]:
            """Send a turn; return its prompt and its reply."""
            number = len(found.backend.asked)
            answer = pool.submit(client.post, "/v1/chat/completions", json={"messages": messages})
            wait_until(lambda: len(found.backend.asked) > number)
            found.backend.deliver(Progress(tuple(reply), end="stop"))
            return list(found.backend.asked[-1].prompt), answer.result(60).json()["choices"][0]["message"]["content"]

        first, content = turn(MESSAGES)
        second, _ = turn([*MESSAGES, {"role": "assistant", "content": content}, MESSAGES[0]])
    assert content == " lazydog" and second[: len(first) + len(reply)] == [*first, *reply]


def test_all_chat_apis_return_the_same_text(http: httpx.Client) -> None:
    for script in ("Latin", "Greek", "Hebrew"):
        messages = [{"role": "user", "content": SCRIPTS[script]}]
        body = {"temperature": 0, "max_tokens": NUM_TOKENS}
        text = asked(http, "/v1/chat/completions", messages=messages, **body)["choices"][0]["message"]["content"]
        asking = {"input": SCRIPTS[script], "temperature": 0, "max_output_tokens": NUM_TOKENS}
        response = asked(http, "/v1/responses", **asking)
        assert [part["text"] for item in response["output"] for part in item["content"]] == [text] * bool(text)
        events = streamed(http, "/v1/responses", **asking)
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
        asking = {"model": response["model"], "messages": messages, **body}
        message = asked(http, "/v1/messages", **asking)
        assert "".join(block["text"] for block in message["content"]) == text
        events = streamed(http, "/v1/messages", **asking)
        assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == text


def test_alternatives_of_a_chat_token_have_distinct_bytes(http: httpx.Client, backend: Tokenizer) -> None:
    num_alike = 0
    for seed in SEEDS:
        body = SAMPLED | {"messages": MESSAGES, "seed": seed}
        (choice,) = asked(http, "/v1/chat/completions", **body, logprobs=True, top_logprobs=20)["choices"]
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert bytes(entry["bytes"]) == own_bytes(backend, token)
            assert entry["token"] == own_bytes(backend, token).decode(errors="replace")
            best = entry["top_logprobs"]
            values = [one["logprob"] for one in best]
            assert len(best) == 20 and values == sorted(values, reverse=True) and entry["logprob"] <= values[0]
            assert all(one["token"] == bytes(one["bytes"]).decode(errors="replace") for one in best)
            num_alike += len({one["token"] for one in best}) < 20
        events = streamed(http, "/v1/chat/completions", **body, logprobs=True, top_logprobs=20)
        found = [event["choices"][0]["logprobs"] or {"content": []} for event in events]
        assert [entry for one in found for entry in one["content"]] == choice["logprobs"]["content"]
    assert num_alike > 20


def own_bytes(backend: Tokenizer, token: int) -> bytes:
    name = backend.id_to_token(token)
    if name is None:
        return b""
    return bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("▁", " ").encode()


@pytest.mark.parametrize("echo", [False, True])
def test_completion_returns_all_alternatives_when_their_texts_are_equal(
    http: httpx.Client, backend: Tokenizer, echo: bool
) -> None:
    text, num_by_id = "The lazy 世 dog", 0
    for seed in SEEDS:
        body = SAMPLED | {"prompt": text, "seed": seed}
        (choice,) = asked(http, "/v1/completions", **body, logprobs=20, echo=echo)["choices"]
        tokens, found = [*(choice["prompt_token_ids"] if echo else []), *choice["token_ids"]], choice["logprobs"]
        assert found["tokens"] == [own_bytes(backend, token).decode(errors="replace") for token in tokens]
        entries = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        for name, value, best in [*entries][echo:]:
            assert best[name] == value and len(best) in (20, 21)
            others = sorted(best.values(), reverse=True)
            assert len(best) == 20 or value == min(others)
            num_by_id += any(key.startswith("token_id:") for key in best)
        offsets = found["text_offset"]
        assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])
        for name, offset in zip(found["tokens"], offsets, strict=True):
            is_text = "\ufffd" not in name + choice["text"][: offset + len(name)] and name != "<s>"
            assert not is_text or choice["text"][offset:].startswith(name) or offset == 0
    assert num_by_id > 20


def test_log_probs_have_texts_for_end_and_prompt_tokens(http: httpx.Client, backend: Tokenizer) -> None:
    end = backend.token_to_id("</s>")
    body = {"messages": MESSAGES, "max_tokens": 4, "logit_bias": {str(end): 100}, "logprobs": True, "top_logprobs": 3}
    (choice,) = asked(http, "/v1/chat/completions", **body)["choices"]
    (entry,) = choice["logprobs"]["content"]
    assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")
    assert (entry["token"], bytes(entry["bytes"])) == ("</s>", b"</s>")
    body = {"prompt": "The lazy 世", "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    (choice,) = asked(http, "/v1/completions", **body)["choices"]
    tokens, entries = choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:]
    texts = [entry[str(token)]["decoded_token"] for token, entry in zip(tokens, entries, strict=True)]
    assert texts == [own_bytes(backend, token).decode(errors="replace") for token in tokens] and " lazy" in texts


def test_stop_string_made_of_byte_tokens_ends_a_completion(http: httpx.Client, backend: Tokenizer) -> None:
    lines = {str(backend.token_to_id("<0x0A>")): 100, str(backend.token_to_id("<0x41>")): 100}
    body = {"prompt": "The", "logit_bias": lines, "temperature": 1, "max_tokens": 64, "return_token_ids": True}
    for seed in SEEDS:
        (choice,) = asked(http, "/v1/completions", **body, seed=seed, stop=["A\n"])["choices"]
        assert choice["finish_reason"] == "stop" and "A\n" not in choice["text"]
        assert backend.decode(choice["token_ids"]) == choice["text"] + "A\n"
        events = streamed(http, "/v1/completions", **body, seed=seed, stop=["A\n"])
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
