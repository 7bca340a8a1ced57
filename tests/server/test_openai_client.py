"""OpenAI's client with a running server: tokens equal those of `generate`, finish reasons, cached tokens."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_mamba_cache.command_line.main import main
from tests.server.running_server import MODEL, RED, RunningServer, at_once

BLOCK = 64
PROMPTS = (
    "# file: bridge.py\nimport time\n\n\nclass Bridge:\n    def __init__(self, name):\n        self.name = name\n",
    "import os\n\n\ndef main",
    "def é(x):\n    return",
    "class Harbour:\n" + "    boats = []\n" * 30,
)
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"return_token_ids": True}}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the `generate` command greedily on the prompts; return its records."""
    folder = tmp_path_factory.mktemp("generate")
    lines, out = folder / "prompts.jsonl", folder / "out.json"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    flags = ["--prompts", str(lines), "--output-path", str(out), "--top-k", "1"]
    assert main(["generate", "--num-tokens-to-generate", str(NUM_TOKENS), *flags]) == 0
    return json.loads(Path(out).read_text(encoding="utf-8"))["requests"]


Found = tuple[str, list[int]]


def _whole(url: str, prompt: str) -> Found:
    reply = openai.OpenAI(base_url=url, api_key=RED).completions.create(model=MODEL, prompt=prompt, **GREEDY)
    return reply.choices[0].text, reply.choices[0].token_ids  # type: ignore[attr-defined]


def _streamed(url: str, prompt: str) -> Found:
    stream = openai.OpenAI(base_url=url, api_key=RED).completions.create(
        model=MODEL, prompt=prompt, stream=True, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in stream]
    return "".join(choice.text for choice in choices), [token for choice in choices for token in choice.token_ids]


def _whole_async(url: str, prompt: str) -> Found:
    async def ask() -> Found:
        async with openai.AsyncOpenAI(base_url=url, api_key=RED) as client:
            reply = await client.completions.create(model=MODEL, prompt=prompt, **GREEDY)
        return reply.choices[0].text, reply.choices[0].token_ids

    return asyncio.run(ask())


def _streamed_async(url: str, prompt: str) -> Found:
    async def ask() -> Found:
        async with openai.AsyncOpenAI(base_url=url, api_key=RED) as client:
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **GREEDY)
            choices = [chunk.choices[0] async for chunk in stream]
        return "".join(choice.text for choice in choices), [token for choice in choices for token in choice.token_ids]

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [_whole, _streamed, _whole_async, _streamed_async])
def test_greedy_replies_equal_those_of_the_generate_command(
    ask: Callable[[str, str], Found], server: RunningServer, generated: list[dict[str, Any]]
) -> None:
    found = at_once(lambda prompt: ask(f"{server.url}/v1", prompt), PROMPTS)
    assert found == [(record["text"], record["generated_tokens"]) for record in generated]


@pytest.mark.parametrize("stream", [False, True])
def test_second_turn_of_a_chat_recomputes_at_most_two_blocks(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "# file: bridge.py\n" + "import time\n" * 40 + "class Bridge"}]
    before, usage = 0, None
    for turn in range(2 + stream):
        settings: dict[str, Any] = {"temperature": 0.9, "seed": turn, "max_tokens": 64}
        if stream:
            chunks = list(
                client.chat.completions.create(
                    model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, **settings
                )
            )
            text, usage = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]), chunks[-1].usage
        else:
            reply = client.chat.completions.create(model=MODEL, messages=messages, **settings)
            text, usage = reply.choices[0].message.content, reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached >= before - 2 * BLOCK and cached % BLOCK == 0
        before = usage.total_tokens
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "\n\n# And another one.\ndef "},
        ]
    assert cached >= 192


def test_next_turn_contains_the_exact_tokens_of_the_reply(client: openai.OpenAI, server: RunningServer) -> None:
    tokenizer = server.server.settings.tokenizer
    splits_otherwise = False
    messages: list[Any] = [{"role": "user", "content": "# file: bridge.py\nimport time\n\n\nclass Bridge"}]
    earlier: list[int] = []
    for turn in range(3):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            seed=turn,
            max_tokens=48,
            temperature=1.6,
            extra_body={"return_token_ids": True},
        )
        choice: Any = reply.choices[0]
        assert choice.prompt_token_ids[: len(earlier)] == earlier
        earlier = choice.prompt_token_ids + choice.token_ids
        text = choice.message.content
        splits_otherwise |= tokenizer.tokenize(text) != choice.token_ids
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "\n\n\ndef "}]
    assert splits_otherwise  # otherwise this would also be true without the stored tokens


def test_reported_cached_tokens_equal_the_tokens_that_needed_no_prefill(
    client: openai.OpenAI, server: RunningServer
) -> None:
    def skipped() -> int:
        return server.between_steps(lambda engine: engine.context.snapshot().counters.prompt_tokens_skipped)

    before = skipped()
    replies = [client.completions.create(model=MODEL, prompt=PROMPTS[3], max_tokens=2) for _ in range(3)]
    cached_counts = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached_counts[0] == 0 < cached_counts[1] == cached_counts[2] and skipped() - before == sum(cached_counts)
    several = client.completions.create(model=MODEL, prompt=[PROMPTS[3]] * 2, max_tokens=2, n=3).usage
    assert several.prompt_tokens == 2 * replies[0].usage.prompt_tokens
    assert several.prompt_tokens_details.cached_tokens == 2 * cached_counts[1]  # once per prompt, not per choice


def test_finish_reason_says_why_the_reply_ended(client: openai.OpenAI) -> None:
    def ends(**settings: Any) -> tuple[str, str]:
        choice = client.completions.create(model=MODEL, prompt=PROMPTS[1], temperature=0, **settings).choices[0]
        return choice.finish_reason, choice.text

    reason, text = ends(max_tokens=20)
    assert reason == "length" and "import sys" in text
    for stop in ("import sys", ["zzz", "ort sy"], "):\n"):
        first = min(text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text)
        assert ends(max_tokens=20, stop=stop) == ("stop", text[:first])
    ending = {
        "model": MODEL,
        "prompt": 'if __name__ == "__main__":\n    unittest.main',
        "temperature": 0,
        "max_tokens": 20,
    }
    short = client.completions.create(**ending)
    assert (short.choices[0].finish_reason, short.choices[0].text) == ("stop", "()\n")
    longer = client.completions.create(**ending, extra_body={"ignore_eos": True})
    assert longer.choices[0].finish_reason == "length" and longer.choices[0].text.startswith("()\n")


def test_choices_have_different_reproducible_seeds(client: openai.OpenAI) -> None:
    def texts(**settings: Any) -> list[str]:
        reply = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=12, **settings)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    three = texts(n=3, seed=-5)
    assert len(set(three)) == 3 and texts(n=3, seed=-5) == three and texts(seed=-5) == three[:1]
    assert texts(seed=6) != three[:1]
    assert texts(n=2, extra_body={"top_k": 1})[0] == texts(temperature=0)[0] == texts(top_p=0)[0]


def test_each_prompt_of_a_completion_gets_its_own_choices(client: openai.OpenAI) -> None:
    alone = [client.completions.create(model=MODEL, prompt=prompt, **GREEDY).choices[0].text for prompt in PROMPTS]
    both = client.completions.create(model=MODEL, prompt=list(PROMPTS), **GREEDY)
    assert [choice.text for choice in both.choices] == alone
    as_ids = [choice.prompt_token_ids for choice in both.choices]  # type: ignore[attr-defined]
    again = client.completions.create(model=MODEL, prompt=as_ids, **GREEDY)
    assert [choice.text for choice in again.choices] == alone


def test_log_probs_are_those_of_the_returned_tokens(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPTS[1], temperature=0, max_tokens=8, logprobs=3)
    choice = reply.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.token_logprobs) == 8
    for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert choice.text[offset:].startswith(token)
    for value, best in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert value == max(best.values()) <= 0 and len(best) <= 3
    messages: Any = [{"role": "user", "content": PROMPTS[1]}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert all(entry.logprob == max(other.logprob for other in entry.top_logprobs) for entry in content)


def test_served_model_is_listed_and_the_server_is_healthy(client: openai.OpenAI, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with server.client() as http:
        assert http.get("/health").json() == {"status": "ready"}


def test_errors_raise_the_matching_exceptions_of_the_client_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model=MODEL, prompt=[1] * 5000)
    assert found.value.code == "context_length_exceeded" and "4096" in found.value.message
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="x", temperature=-1)


@pytest.mark.parametrize(
    "too_long", [{"prompt": [1] * 5000}, {"prompt": "x" * 2**20}, {"prompt": "x", "max_tokens": 4096}]
)
def test_context_overflow_error_has_openais_wording(client: openai.OpenAI, too_long: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(model=MODEL, **too_long)
    assert found.value.code == "context_length_exceeded" and found.value.param == "prompt"
    assert "This model's maximum context length is 4096 tokens, and the prompt is too long: " in found.value.message


def test_flush_with_or_without_a_new_weights_version_empties_the_cache(
    client: openai.OpenAI, server: RunningServer
) -> None:
    def cached() -> int:
        usage = client.completions.create(model=MODEL, prompt=PROMPTS[3], max_tokens=1).usage
        return usage.prompt_tokens_details.cached_tokens

    assert cached() == 0 < cached()
    with server.client() as http:
        assert http.post("/admin/flush").status_code == 200 and cached() == 0 < cached()
        version = http.post("/admin/flush", json={"weights_version": "step-12"}).json()
        assert version == http.get("/admin/weights").json() == {"weights_version": "step-12"}
        assert cached() == 0
