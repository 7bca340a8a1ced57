"""Requests from coding agents and agent SDKs, with fields, tools and items that plain clients do not send."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.server import unsupported
from megatron_mamba_cache.server.unsupported import note_ignored
from tests.server.clients.codex_bodies import CODEX, HOSTED_TOOLS, LATER, SHOWN
from tests.server.family_templates import FAMILIES
from tests.server.front_end import BLUE, RED, front_end
from tests.server.scripted_agent import TEMPLATES, TOOL, WRITTEN, Agent, agent_of, agent_tokenizer
from tests.server.scripted_backend import ScriptedBackend

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = TOOL["function"]
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Weather?"}]},
    RESPONSES: {"input": "Weather?"},
    MESSAGES: {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 50},
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    tokenizer = agent_tokenizer(tmp_path_factory.mktemp("agent") / "hermes", TEMPLATES["hermes"])
    with front_end(keys=(), tokenizer=tokenizer, backend=ScriptedBackend(tokenizer=tokenizer)) as server:
        yield Agent(server, tokenizer)


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    """Clear the counts of ignored fields."""
    unsupported._counts.clear()
    yield


def posted(agent: Agent, path: str, reply: str = "Yes.", **fields: Any) -> httpx.Response:
    """Send a plain request with additional fields; return the response."""
    response = None
    with agent.saying(reply):
        response = httpx.post(agent.server.listening.url + path, json=PLAIN[path] | fields, timeout=60)
        if response.status_code != 200:
            raise AssertionError(response.text)
    return response


def prompt_after(agent: Agent, path: str, **fields: Any) -> str:
    """Send a plain request with additional fields; return its prompt."""
    posted(agent, path, **fields)
    return str(agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False))


LABELS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"client_metadata": {"a": "b"}, "user": "me", "session_id": "s"}),
    (CHAT, {"litellm_metadata": {"a": [1]}, "prompt_cache_key": "k", "tags": ["a"]}),
    (CHAT, {"prediction": {"type": "content", "content": "Yes."}, "prompt_cache_retention": "24h"}),
    (RESPONSES, {"prompt_cache_retention": "24h"}),
    (RESPONSES, {"client_metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto"}),
    (MESSAGES, {"anthropic_version": "v", "betas": ["b"], "metadata": {"user_id": "u"}}),
]


@pytest.mark.parametrize(("path", "fields"), LABELS)
def test_ignored_fields_are_counted_in_one_log_line(
    agent: Agent, path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = prompt_after(agent, path)
    caplog.clear()
    for _ in range(3):
        assert prompt_after(agent, path, **fields) == plain
    (line,) = [record.getMessage() for record in caplog.records if record.name == unsupported.__name__]
    assert all(f"'{name}' (1 so far)" in line for name in fields)


def test_ignored_fields_are_logged_when_their_count_is_a_power_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(120):
        note_ignored("x", ["a"])
    assert [record.getMessage().split("(")[1].split(" ")[0] for record in caplog.records] == ["1", "10", "100"]
    for number in range(3000):
        note_ignored("x", [f"name {number}"])
    assert len(unsupported._counts) <= 1001 and unsupported._counts["x", "others"] == 3000 - 999


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"temprature": 1}),
        (CHAT, {"previous_response_id": "resp_1"}),
        (RESPONSES, {"conversation_id": "c"}),
        (MESSAGES, {"response_format": {"type": "json_object"}}),
    ],
)
def test_unknown_fields_that_may_change_a_reply_are_still_refused(
    agent: Agent, path: str, fields: dict[str, Any]
) -> None:
    reply = httpx.post(agent.server.listening.url + path, json=PLAIN[path] | fields, timeout=60)
    assert reply.status_code == 400 and "is not a known field; leave it out" in reply.text


VALUES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (RESPONSES, {"text": {"verbosity": "high"}}, "verbosity"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (MESSAGES, {"thinking": {"type": "disabled"}}, "enable_thinking"),
]


@pytest.mark.parametrize(("path", "fields", "name"), VALUES)
def test_message_fields_that_the_template_ignores_are_counted(
    agent: Agent, path: str, fields: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    posted(agent, path, **fields)
    assert f"'{name}' (1 so far): the chat template does not read it" in caplog.text


def test_message_names_and_is_error_are_counted_when_the_template_ignores_them(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    named = [{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "user", "content": "Ho", "name": "Bob"}]
    posted(agent, CHAT, messages=named)
    assert "'messages.name' (1 so far): the chat template does not read it" in caplog.text
    called = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no such city", "is_error": True}
    asked, used = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": [called]}
    posted(agent, MESSAGES, messages=[asked, used, {"role": "user", "content": [failed]}])
    assert "'is_error of results' (1 so far): the chat template does not support it" in caplog.text


def test_names_that_the_template_renders_are_not_counted(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
    with agent_of(tmp_path / "names", template) as agent:
        asked = {"role": "user", "content": "Hi", "name": "Ann"}
        assert "Ann: Hi\n" in prompt_after(agent, CHAT, messages=[asked])
    assert "messages.name" not in caplog.text


REFUSAL = {"refusal": "Not that."}
REFUSED = [REFUSAL, {"content": None, **REFUSAL}, {"content": [{"type": "refusal", **REFUSAL}]}]


@pytest.mark.parametrize("refused", REFUSED)
def test_refusal_in_an_earlier_reply_becomes_text(agent: Agent, refused: dict[str, Any]) -> None:
    asked = {"role": "user", "content": "Go on."}
    messages = [asked, {"role": "assistant", **refused}, asked]
    assert "assistant\nNot that." in prompt_after(agent, CHAT, messages=messages)


def test_verbosity_is_passed_to_the_chat_template(tmp_path: Any) -> None:
    with agent_of(tmp_path / "verbose", "{{ verbosity }}:" + TEMPLATES["hermes"]) as agent:
        assert prompt_after(agent, CHAT, verbosity="low").startswith("low:")
        assert prompt_after(agent, RESPONSES, text={"verbosity": "high"}).startswith("high:")
        response = posted(agent, RESPONSES, text={"verbosity": "high"}).json()
        assert response["text"] == {"format": {"type": "text"}, "verbosity": "high"}


FOREIGN: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}},
        {"type": "web_search_preview"},
    ],
    RESPONSES: HOSTED_TOOLS,
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "code_execution_20250825", "name": "code_execution"},
    ],
}
OWN: dict[str, dict[str, Any]] = {
    CHAT: TOOL,
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    },
}


@pytest.mark.parametrize("path", FOREIGN)
def test_hosted_tools_are_dropped_with_a_warning(agent: Agent, path: str, caplog: pytest.LogCaptureFixture) -> None:
    alone = prompt_after(agent, path, tools=[OWN[path]])
    first, *rest = FOREIGN[path]
    caplog.clear()
    assert prompt_after(agent, path, tools=[first, OWN[path], *rest]) == alone
    assert caplog.records[0].levelno == logging.WARNING
    assert all(f"'tools.type {tool['type']}' (1 so far)" in caplog.text for tool in FOREIGN[path])
    assert prompt_after(agent, path, tools=FOREIGN[path]) == prompt_after(agent, path)


@pytest.mark.parametrize("path", FOREIGN)
def test_cache_breakpoint_of_a_dropped_tool_moves_to_the_last_tool(agent: Agent, path: str) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    posted(agent, path, tools=[OWN[path] | mark])
    wanted = agent.server.backend.asked[-1].breakpoints
    posted(agent, path, tools=[OWN[path], FOREIGN[path][0] | mark])
    assert agent.server.backend.asked[-1].breakpoints == wanted and wanted[0].keep_s == 3600


def test_error_for_a_tool_names_its_index_in_the_request(agent: Agent) -> None:
    body = PLAIN[RESPONSES] | {"tools": [*FOREIGN[RESPONSES], {"type": "function", "name": "a b"}]}
    reply = httpx.post(agent.server.listening.url + RESPONSES, json=body, timeout=60)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools.5.name"


FLAT = {"type": "function", **FUNCTION}


@pytest.mark.parametrize(("path", "tool"), [(CHAT, FLAT), (CHAT, FLAT | {"strict": None}), (RESPONSES, TOOL)])
def test_tool_definitions_may_be_flat_or_nested(agent: Agent, path: str, tool: dict[str, Any]) -> None:
    for choice in ("auto", {"type": "function", "name": "get_weather"}, {"type": "function", "function": FUNCTION}):
        own = prompt_after(agent, path, tools=[OWN[path]], tool_choice="auto")
        assert prompt_after(agent, path, tools=[tool], tool_choice=choice) == own
        form = agent.server.backend.asked[-1].sampling.grammar
        assert bool(form) == (choice != "auto")


def allowed(mode: str, *names: str, is_nested: bool) -> dict[str, Any]:
    """Return a tool choice that allows only some tools."""
    tools = [NAMED | ({"function": {"name": name}} if is_nested else {"name": name}) for name in names]
    inner = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": inner} if is_nested else {"type": "allowed_tools", **inner}


NAMED = {"type": "function"}


@pytest.mark.parametrize(("path", "is_nested"), [(CHAT, True), (CHAT, False), (RESPONSES, False)])
def test_prompt_shows_all_tools_when_only_some_may_be_called(agent: Agent, path: str, is_nested: bool) -> None:
    tools = [TOOL, OTHER]
    plain = prompt_after(agent, path, tools=tools)
    for mode, names, is_held in (
        ("required", ["get_time"], True),
        ("auto", ["get_time"], True),
        ("auto", ["get_time", "get_weather"], False),
        ("auto", [], False),
    ):
        choice = allowed(mode, *names, is_nested=is_nested)
        assert prompt_after(agent, path, tools=tools, tool_choice=choice) == plain
        grammar = agent.server.backend.asked[-1].sampling.grammar
        assert bool(grammar) == is_held
        if grammar:
            assert "get_time" in grammar and "get_weather" not in grammar
    if path == RESPONSES:
        choice = allowed("auto", "get_time", is_nested=False)
        assert posted(agent, path, tools=tools, tool_choice=choice).json()["tool_choice"] == choice


def codex_prompt(agent: Agent, body: dict[str, Any]) -> str:
    """Send a streamed request to the responses API; return its prompt."""
    with agent.saying("Done."):
        reply = httpx.post(agent.server.listening.url + RESPONSES, json=body, timeout=60)
        if reply.status_code != 200:
            raise AssertionError(reply.text)
    assert "response.completed" in reply.text
    return str(agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False))


@pytest.mark.parametrize("family", ["hermes", "mistral 3", "nemotron nano 2"])
def test_both_turns_of_a_codex_session_are_rendered(tmp_path: Any, family: str) -> None:
    with agent_of(tmp_path / "family", FAMILIES[family]) as agent:
        first = codex_prompt(agent, CODEX)
        assert all(text in first for text in SHOWN[:4]) and "exec_command" in first and "inner" not in first
        later = codex_prompt(agent, CODEX | {"input": [*CODEX["input"], *LATER]})
        assert [text for text in SHOWN if text not in later] == []
        assert "base64" not in later and "gAAAA" not in later and later.count("You write code") == 1
        if family == "hermes":
            start = "<|im_start|>system\nYou write code in a terminal.\n\nAsk before you delete.<|im_end|>\n"
            assert start in first and later.startswith(first)


ITEMS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "x\ny"},
        "assistant\n[Called patch with x\ny]",
    ),
    (
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAA"},
        "assistant\n<think>\nHm.\n</think>",
    ),
    (
        {"type": "mcp_call", "id": "m", "name": "find", "server_label": "docs", "arguments": "{}", "output": "none"},
        'assistant\n[Called find with {"server_label": "docs", "arguments": "{}", "output": "none"}]',
    ),
    (
        {"type": "image_generation_call", "id": "i", "status": "completed", "result": "iVBOR"},
        'assistant\n[Called image_generation with {"result": "[image omitted: this model reads text only]"}]',
    ),
    (
        {
            "type": "computer_call_output",
            "call_id": "a",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"},
        },
        "user\n[Result of computer]\n[image omitted: this model reads text only]",
    ),
    ({"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "5"}]}, 'shell]\n[{"stdout": "5"}]'),
    ({"type": "shell_call", "call_id": {"a": 1}, "action": "ls"}, '[Called shell with {"action": "ls"}]'),
    ({"type": "shell_call_output", "call_id": ["a"], "output": "5"}, "[Result of shell]\n5"),
]


@pytest.mark.parametrize(("item", "words"), ITEMS)
def test_response_items_of_hosted_tools_become_text(agent: Agent, item: dict[str, Any], words: str) -> None:
    asked = {"role": "user", "content": "Go on."}
    prompt = prompt_after(agent, RESPONSES, input=[asked, item, asked])
    assert words in prompt


@pytest.mark.parametrize("depth", [100, 300, 900])
def test_deeply_nested_items_are_accepted_or_get_a_400(agent: Agent, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = {"a": nested}
    call = {"type": "web_search_call", "action": nested}
    used = {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "x", "input": nested}]}
    asked = {"role": "user", "content": "Go on."}
    for path, fields in ((RESPONSES, {"input": [call, asked]}), (MESSAGES, {"messages": [asked, used, asked]})):
        body = PLAIN[path] | fields | {"model": "another"}  # unknown model: checked after all other fields
        reply = httpx.post(agent.server.listening.url + path, json=body, timeout=60)
        assert reply.status_code in (400, 404), reply.text


BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "lists"}},
        '[Called web_search with {"query": "lists"}]',
    ),
    ({"type": "mcp_tool_use", "id": "s", "name": "find", "server_name": "docs", "input": {}}, "[Called find with"),
    (
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        '[Result of web_search]\n[{"type": "web_search_result", "url": "u"}]',
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "s", "is_error": False, "content": [{"type": "text", "text": "9"}]},
        "[Result of mcp]",
    ),
]


@pytest.mark.parametrize(("block", "words"), BLOCKS)
def test_content_blocks_of_hosted_tools_become_text(agent: Agent, block: dict[str, Any], words: str) -> None:
    asked = {"role": "user", "content": "Go on."}
    replied = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]}
    assert f"assistant\nI look.\n{words}" in prompt_after(agent, MESSAGES, messages=[asked, replied, asked])


def called(part: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return messages with a tool result that has a further part in addition to its text."""
    function = {"name": "get_weather", "arguments": "{}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    content = [{"type": "text", "text": "A map:"}, part]
    result = {"role": "tool", "tool_call_id": "a", "content": content}
    return {"messages": [*PLAIN[CHAT]["messages"], {"role": "assistant", "content": None, "tool_calls": calls}, result]}


USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}]}
IMAGES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, called({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), "image"),
    (CHAT, called({"type": "file", "file": {"file_id": "f"}}), "file"),
    (
        MESSAGES,
        {
            "messages": [
                *PLAIN[MESSAGES]["messages"],
                USED,
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [
                                {"type": "text", "text": "A map:"},
                                {"type": "image", "source": {"type": "url", "url": "https://a.example/a.png"}},
                            ],
                        }
                    ],
                },
            ]
        },
        "image",
    ),
    (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_text", "text": "A map:"}, {"type": "input_file", "file_id": "f"}],
                },
            ]
        },
        "file",
    ),
]


@pytest.mark.parametrize(("path", "fields", "kind"), IMAGES)
def test_image_in_a_tool_result_becomes_a_line_of_text(agent: Agent, path: str, fields: Any, kind: str) -> None:
    line = f"[{kind} omitted: this model reads text only]"
    assert f"tool\nA map:\n{line}<|im_end|>" in prompt_after(agent, path, **fields)


def test_text_document_in_a_tool_result_becomes_its_text(agent: Agent) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Oslo is cold."}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document", "source": source}]}
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert "tool\nOslo is cold.<|im_end|>" in prompt_after(agent, MESSAGES, messages=messages)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ],
)
def test_error_for_an_image_in_a_user_message_names_its_type(agent: Agent, path: str, fields: dict[str, Any]) -> None:
    reply = httpx.post(agent.server.listening.url + path, json=PLAIN[path] | fields, timeout=60)
    assert reply.status_code == 400 and "image" in reply.text and "is not supported by this server" in reply.text


TEXTS = ["one", "two\n", "three"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in TEXTS]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": text} for text in TEXTS]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in TEXTS]}]}),
        (
            MESSAGES,
            {"system": [{"type": "text", "text": text} for text in TEXTS]},
        ),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "assistant", "content": [{"type": "output_text", "text": text} for text in TEXTS]},
                    {"role": "user", "content": "x"},
                ]
            },
        ),
    ],
)
def test_text_parts_are_joined_by_newlines_in_every_api(agent: Agent, path: str, fields: dict[str, Any]) -> None:
    assert "\none\ntwo\n\nthree<|im_end|>" in prompt_after(agent, path, **fields)


def test_item_references_are_resolved_only_for_their_owner(tmp_path: Any) -> None:
    """Vercel's AI SDK sends the history as ids of items in earlier responses."""
    tokenizer = agent_tokenizer(tmp_path / "hermes", TEMPLATES["hermes"])
    reply = "<think>\nHm.\n</think>\n\nI look.\n" + WRITTEN["hermes"] % "Oslo"
    with front_end(tokenizer=tokenizer) as server:
        agent = Agent(server, tokenizer)
        tools = [OWN[RESPONSES]]

        def post(key: str, **fields: Any) -> httpx.Response:
            with server.client(key) as http:
                return http.post(RESPONSES, json=PLAIN[RESPONSES] | {"tools": tools} | fields)

        with agent.saying(reply):
            output = post(RED).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "5 degrees"}
        asked = {"role": "user", "content": "Weather?"}
        references = [{"type": "item_reference", "id": item["id"]} for item in output]
        with agent.saying("Cold."):
            post(RED, input=[asked, *references, result])
        with agent.saying("Cold."):
            post(RED, input=[asked, *output, result])
        assert agent.prompts()[-1] == agent.prompts()[-2]
        references[0].pop("type")  # the type may be omitted
        with agent.saying("Cold."):
            assert post(RED, input=[asked, *references, result]).status_code == 200
        refused = post(BLUE, input=[asked, *references, result])
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "item_not_found"
