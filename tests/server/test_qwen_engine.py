"""A server with a random Qwen 3.5 model: constrained replies are parsed, and later turns hit the cache."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

from tests.server.parsers.tagged_replies import TAGS, VOCAB_SIZE, tagged_tokenizer
from tests.server.qwen_templates import QWEN_3_6
from tests.server.running_server import RunningServer, at_once, running_server

IMAGE = VOCAB_SIZE  # image token in the model's configuration
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 1,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["box", "piece"]},
        "to": {
            "type": "object",
            "properties": {"rush": {"type": "boolean"}, "floor": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["rush"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "count", "unit", "to"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "order", "parameters": ORDER, "strict": True}},
    {"type": "function", "function": {"name": "wait", "strict": True}},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict[str, int]]]:
    """Server, with the ids of its tags and of its end token."""
    folder = tmp_path_factory.mktemp("random") / "qwen"
    torch.manual_seed(5)
    config = Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer = tagged_tokenizer(folder, "added", QWEN_3_6, ["<|image_pad|>"])
    ids = {tag: VOCAB_SIZE - len(TAGS) + TAGS.index(tag) for tag in ("<think>", "</think>", "<tool_call>")}
    with running_server("--hf-model", str(folder)) as server:
        yield server, {**ids, "end": tokenizer.eod}


@pytest.fixture
def client(served: tuple[RunningServer, dict[str, int]]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("num_replies", [20, pytest.param(100, marks=pytest.mark.long)])
def test_constrained_qwen_replies_are_parsed_into_reasoning_and_calls(
    served: tuple[RunningServer, dict[str, int]], client: openai.OpenAI, num_replies: int, choice: Any
) -> None:
    """A bias makes tags and the end token probable; a random model would seldom generate them."""
    _, ids = served

    def ask(seed: int) -> Any:
        wished = {"</think>": 5, "<tool_call>": 5 + seed % 3, "end": 6}
        return client.chat.completions.create(
            model="qwen",
            messages=[{"role": "user", "content": f"Order {seed}."}],
            tools=TOOLS,
            tool_choice=choice,
            seed=seed,
            max_tokens=250,
            logit_bias={str(ids[name]): bias for name, bias in wished.items()},
            extra_body={"chat_template_kwargs": {"enable_thinking": bool(seed % 4)}},
        ).choices[0]

    replies = [reply for start in range(0, num_replies, 20) for reply in at_once(ask, range(start, start + 20))]
    num_calls = num_reasoned = 0
    for reply in replies:
        if reply.finish_reason == "length":
            continue
        calls = reply.message.tool_calls or []
        assert reply.finish_reason == ("tool_calls" if calls else "stop") and (calls or choice == "auto")
        assert choice == "auto" or not reply.message.content
        assert "<tool_call>" not in (reply.message.content or "")
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert jsonschema_rs.is_valid(ORDER, arguments) if call.function.name == "order" else arguments == {}
        num_calls += len(calls)
        num_reasoned += bool(getattr(reply.message, "reasoning_content", None))
    print(
        f"{sum(reply.finish_reason != 'length' for reply in replies)} ended, {num_calls} calls, {num_reasoned} reasoned"
    )
    assert num_calls > 0.6 * num_replies and num_reasoned > 0.2 * num_replies


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_have_no_reasoning_when_thinking_is_off(
    served: tuple[RunningServer, dict[str, int]], client: openai.OpenAI, stream: bool
) -> None:
    """A bias makes the model open its reasoning almost always if the grammar allows that."""
    _, ids = served

    def ask(seed: int) -> list[Any]:
        reply: Any = client.chat.completions.create(
            model="qwen",
            messages=[{"role": "user", "content": f"Order {seed}."}],
            tools=TOOLS,
            tool_choice="required",
            seed=seed,
            max_tokens=250,
            logit_bias={str(ids["<think>"]): 20, str(ids["end"]): 6},
            stream=stream,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        return [chunk.choices[0] for chunk in reply] if stream else reply.choices

    for parts in at_once(ask, range(6)):
        messages = [part.delta if stream else part.message for part in parts]
        assert any(message.tool_calls for message in messages)
        assert not any(getattr(message, "reasoning_content", None) or message.content for message in messages)


def test_next_turn_of_a_qwen_chat_hits_the_cache_and_images_are_refused(
    served: tuple[RunningServer, dict[str, int]], client: openai.OpenAI
) -> None:
    server, ids = served
    settings: Any = {"model": "qwen", "tools": TOOLS, "seed": 3, "max_tokens": 300}
    settings |= {"logit_bias": {str(ids["<tool_call>"]): 8, str(ids["end"]): 8}, "tool_choice": "required"}
    asked: list[Any] = [{"role": "user", "content": "Order boxes. " * 40}]
    chat = client.chat.completions.create(messages=asked, **settings)
    message = chat.choices[0].message
    assert chat.choices[0].finish_reason == "tool_calls" and message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Done."} for call in message.tool_calls]
    asked += [message.model_dump(exclude_none=True), *results]
    usage = client.chat.completions.create(messages=asked, **settings).usage
    assert usage is not None and usage.prompt_tokens_details is not None and chat.usage is not None
    num_cached = usage.prompt_tokens_details.cached_tokens or 0
    assert chat.usage.prompt_tokens - 64 <= num_cached < usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match=f"token {IMAGE} .* at position 1, which is for images"):
        client.completions.create(model="qwen", prompt=[1, IMAGE])
    server.assert_nothing_held()
