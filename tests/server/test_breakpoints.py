"""Breakpoints cache states for later sessions with the same prefix."""

import time
from typing import Any

import anthropic
import openai
import pytest

from megatron_mamba_cache.server.conversation import Breakpoint, Conversation
from megatron_mamba_cache.server.prompts import PromptReader
from megatron_mamba_cache.server.tenants import Tenant
from megatron_mamba_cache.server.transcripts import Transcripts
from tests.server.running_server import MODEL, RED, RunningServer
from tests.server.scripted_agent import TEMPLATES, agent_tokenizer

BLOCK = 64
CONTROL = {"type": "ephemeral"}
FUNCTIONS = [
    {
        "name": f"tool_{number}",
        "description": "def read(path): return open(path)",
        "parameters": {"type": "object"},
    }
    for number in range(6)
]
INSTRUCTIONS = "import os\nimport sys\n" * 20
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GREEDY: dict[str, Any] = {"max_tokens": 2, "extra_body": {"top_k": 1}}


def chat_session(
    server: RunningServer, question: str, after: str | None, instructions: str = INSTRUCTIONS
) -> tuple[int, int]:
    """Send a session's first turn with a breakpoint; return the numbers of prompt tokens and cached tokens."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)
    tools: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
    system: dict[str, Any] = {"type": "text", "text": instructions}
    if after == "tools":
        tools[-1] |= {"cache_control": CONTROL}
    if after == "instructions":
        system |= {"cache_control": CONTROL}
    messages: Any = [{"role": "system", "content": [system]}, {"role": "user", "content": question}]
    usage = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, **GREEDY).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def messages_session(server: RunningServer, question: str, after: str | None) -> tuple[int, int]:
    """Like `chat_session`, with Anthropic's client."""
    client = anthropic.Anthropic(base_url=server.url, api_key=RED, max_retries=0)
    tools: list[Any] = [
        {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
        for function in FUNCTIONS
    ]
    system: dict[str, Any] = {"type": "text", "text": INSTRUCTIONS}
    if after == "tools":
        tools[-1] |= {"cache_control": CONTROL}
    if after == "instructions":
        system |= {"cache_control": CONTROL}
    messages: Any = [{"role": "user", "content": question}]
    usage = client.messages.create(model=MODEL, system=[system], messages=messages, tools=tools, **GREEDY).usage
    cached = usage.cache_read_input_tokens or 0
    return usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached


@pytest.mark.parametrize("session", [chat_session, messages_session])
@pytest.mark.parametrize("after", [None, "tools", "instructions"])
def test_second_session_needs_no_prefill_before_a_breakpoint(server: RunningServer, session: Any, after: str) -> None:
    shared, _ = session(server, "", None)
    server.between_steps(lambda engine: engine.flush())
    questions = ["class A:\n" * 30, "print(1)\n" * 40]
    total, cached = session(server, questions[0], after)
    assert cached == 0 and total > shared
    _, cached = session(server, questions[1], after)
    if after is None:
        assert cached == 0  # the first session cached a state only at its end
    else:
        assert shared - 2 * BLOCK <= cached <= shared


def test_tools_before_a_breakpoint_are_cached_for_sessions_with_other_instructions(server: RunningServer) -> None:
    server.between_steps(lambda engine: engine.flush())
    chat_session(server, "x", "tools")
    _, cached = chat_session(server, "x", "tools", instructions="print(2)\n" * 60)
    total, _ = chat_session(server, "", None)
    assert 0 < cached < total - 2 * BLOCK


@pytest.mark.parametrize("template", ["hermes", "tools first"])
@pytest.mark.parametrize("position", [Breakpoint(keep_s=9), Breakpoint(0, 12, 9), Breakpoint(0, 3), Breakpoint(1, 2)])
def test_breakpoint_after_tools_or_instructions_marks_both(template: str, position: Breakpoint, tmp_path: Any) -> None:
    source = (
        TEMPLATES["hermes"] if template == "hermes" else "{% for t in tools %}{{ t | tojson }}\n{% endfor %}" + TURNS
    )
    tokenizer = agent_tokenizer(tmp_path / "model", source)
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "system", "content": "import os\nxy"}, {"role": "user", "content": "def f"}]
    conversation = Conversation(messages, [tool], breakpoints=(position,))
    prompt = PromptReader(tokenizer, Transcripts(0), 4096).read_chat(Tenant(), conversation)
    own, *both = prompt.breakpoints
    if position in (Breakpoint(0, 3), Breakpoint(1, 2)):
        assert not both
        return
    last = max(prompt.breakpoints)
    text = tokenizer.detokenize(prompt.token_ids[: last.position], skip_special_tokens=False)
    assert '"name": "f"' in text and "import os\nxy" in text and "def" not in text
    assert last.keep_s == own.keep_s == 9 and both == [last] * (own != last)


def test_breakpoint_position_in_tokens_matches_its_position_in_the_text(tmp_path: Any) -> None:
    tokenizer = agent_tokenizer(tmp_path / "hermes", TEMPLATES["hermes"])
    reader = PromptReader(tokenizer, Transcripts(0), 4096)
    tool = {"type": "function", "function": {"name": "f"}}
    positions = (Breakpoint(), Breakpoint(0, 6), Breakpoint(0, 12), Breakpoint(1, 0))
    messages = [{"role": "system", "content": "import os\nx"}, {"role": "user", "content": "def f"}]
    prompt = reader.read_chat(Tenant(), Conversation(messages, [tool], breakpoints=positions))
    ends = [point.position for point in prompt.breakpoints]
    texts = [tokenizer.detokenize(prompt.token_ids[:end], skip_special_tokens=False) for end in ends]
    assert texts[0].rstrip().endswith('"name": "f"}}') and prompt.text.startswith(texts[0])
    assert texts[1].endswith("import") and texts[2].endswith("import os\nx")
    assert texts[3].endswith("<|im_start|>user\n")


@pytest.mark.parametrize(
    ("reads", "count"), [("f.parameters.properties.items()", 1), ("f.parameters.properties.city.items()", 0)]
)
def test_breakpoint_is_ignored_when_the_template_drops_its_position(tmp_path: Any, reads: str, count: int) -> None:
    template = f"{{% for t in tools %}}{{% set f = t.function %}}{{% for key, value in {reads} %}}{{{{ key }}}}"
    tokenizer = agent_tokenizer(tmp_path / "reads", template + "{% endfor %}{% endfor %}" + TEMPLATES["hermes"])
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "x"}]
    reader = PromptReader(tokenizer, Transcripts(0), 4096)
    prompt = reader.read_chat(Tenant(), Conversation(messages, [tool], breakpoints=(Breakpoint(),)))
    assert len(prompt.breakpoints) == count


@pytest.mark.parametrize("count", [4, 5, 4000])
def test_more_than_four_breakpoints_are_refused(server: RunningServer, count: int) -> None:
    part = {"type": "text", "text": "a", "cache_control": CONTROL}
    with server.client() as http:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": [{"role": "user", "content": [part] * count}]}
            reply = http.post(path, json=body | ({} if path.endswith("tokens") else {"max_tokens": 1}))
            assert reply.status_code == (200 if count == 4 else 400), reply.text
            if count > 4:
                expected = f"the request has {count} parts with cache_control; at most 4 are allowed"
                assert reply.json()["error"]["message"] == expected


def test_breakpoints_of_unknown_types_are_refused(server: RunningServer) -> None:
    for control, words in (
        ({"type": "permanent"}, "'ephemeral'"),
        ({"type": "ephemeral", "ttl": "1d"}, "'5m' or '1h'"),
    ):
        part = {"type": "text", "text": "a", "cache_control": control}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        with server.client() as http:
            reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text


def systems(*texts: str, ttl: str | None = None) -> list[dict[str, Any]]:
    """Return instructions in several parts, with a breakpoint at the end of the first part."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    parts[0]["cache_control"] = CONTROL if ttl is None else {**CONTROL, "ttl": ttl}
    return parts


def held_seconds(server: RunningServer) -> list[float]:
    """Return the remaining hold times of all held states, in seconds."""
    return server.between_steps(
        lambda engine: [end - time.time() for end in engine.context.cache.slots._held.until.values()]
    )


@pytest.mark.parametrize(("ttl", "seconds"), [(None, []), ("5m", [300]), ("1h", [3600])])
def test_state_at_a_breakpoint_has_raised_priority_until_its_ttl_expires(
    server: RunningServer, ttl: str | None, seconds: list[int]
) -> None:
    server.between_steps(lambda engine: engine.flush())
    messages: Any = [{"role": "user", "content": "x"}]
    client = anthropic.Anthropic(base_url=server.url, api_key=RED, max_retries=0)
    for _ in range(2):
        client.messages.create(
            model=MODEL, max_tokens=1, messages=messages, system=systems(INSTRUCTIONS, "def f", ttl=ttl)
        )
        assert held_seconds(server) == pytest.approx(seconds, abs=30)
    server.between_steps(lambda engine: engine.flush())
    assert held_seconds(server) == []


def test_request_level_ttl_raises_the_priority_of_the_state_at_the_prompts_end(server: RunningServer) -> None:
    server.between_steps(lambda engine: engine.flush())
    content = INSTRUCTIONS * 2
    with server.client() as http:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert http.post("/v1/messages", json=body).status_code == 200
        assert held_seconds(server) == []
        assert http.post("/v1/messages", json=body | {"cache_control": {**CONTROL, "ttl": "1h"}}).status_code == 200
    assert held_seconds(server) == pytest.approx([3600], abs=30)
    server.between_steps(lambda engine: engine.flush())


def test_anthropic_usage_reports_newly_cached_tokens_by_ttl(server: RunningServer) -> None:
    server.between_steps(lambda engine: engine.flush())
    client = anthropic.Anthropic(base_url=server.url, api_key=RED, max_retries=0)
    seen = []
    for question, ttl in (("def a" * 40, "1h"), ("def a" * 40, "1h"), ("class B" * 60, "1h"), ("print" * 80, "5m")):
        settings: Any = {
            "model": MODEL,
            "max_tokens": 2,
            "messages": [{"role": "user", "content": question}],
            "system": systems(INSTRUCTIONS, "\n# then\n", ttl=ttl),
        }
        usage = client.messages.create(**settings, stream=False).usage
        assert usage.cache_creation is not None and usage.cache_creation_input_tokens is not None
        of_hour, of_minutes = (
            usage.cache_creation.ephemeral_1h_input_tokens,
            usage.cache_creation.ephemeral_5m_input_tokens,
        )
        assert of_hour + of_minutes == usage.cache_creation_input_tokens
        total = client.messages.count_tokens(**{k: settings[k] for k in ("model", "messages", "system")}).input_tokens
        read = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + read + usage.cache_creation_input_tokens == total
        seen.append((read, of_hour, of_minutes))
        if not read:
            first_total, shared = total, of_hour
    assert first_total // BLOCK * BLOCK == sum(seen[0]) and shared > 0
    assert seen[1] == (first_total // BLOCK * BLOCK, 0, 0)
    assert seen[2][0] == seen[3][0] == shared // BLOCK * BLOCK
    assert seen[2][2] > 0 and seen[3][1] == 0 < seen[3][2]


def test_usage_in_openais_apis_reports_newly_cached_tokens(server: RunningServer) -> None:
    server.between_steps(lambda engine: engine.flush())
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=RED, max_retries=0)
    for text in ("a = 1\n" * 50, "b = 2\n" * 60, "c = 3\n" * 70):
        prompts = [text + "x", text + "x"]
        first, second = (client.completions.create(model=MODEL, prompt=prompt, max_tokens=1) for prompt in prompts)
        assert first.usage is not None and first.usage.prompt_tokens_details is not None
        last = first.usage.prompt_tokens // BLOCK * BLOCK
        details = first.usage.prompt_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (0, last)
        assert second.usage is not None and second.usage.prompt_tokens_details is not None
        details = second.usage.prompt_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (last, 0)
    response = client.responses.create(model=MODEL, input="d = 4\n" * 60, max_output_tokens=1)
    assert response.usage is not None
    written = response.usage.input_tokens_details.cache_write_tokens
    assert written == response.usage.input_tokens // BLOCK * BLOCK
