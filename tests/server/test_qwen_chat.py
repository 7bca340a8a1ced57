"""Chats with Qwen's hybrid models: thinking on or off, tool calls within reasoning, history, images."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.front_end import front_end
from tests.server.parsers.tagged_replies import KINDS, VOCAB_SIZE, Tag, tagged_tokenizer
from tests.server.qwen_templates import QWEN_3_6, QWEN_3_8, QWEN_3_NEXT, QWEN_3_NEXT_THINKING
from tests.server.scripted_agent import ASKED, TagAgent
from tests.server.scripted_backend import ScriptedBackend

TEMPLATES = {"qwen 3.6": QWEN_3_6, "qwen 3.8": QWEN_3_8, "next thinking": QWEN_3_NEXT_THINKING, "next": QWEN_3_NEXT}
MODELS = [*(("qwen 3.6", kind) for kind in KINDS), ("qwen 3.8", "added"), ("next thinking", "added")]
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "most": {"type": "integer"},
        "where": {"type": "object", "properties": {"paths": {"type": "array", "items": {"type": "string"}}}},
    },
    "required": ["text", "most"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "search", "parameters": SEARCH}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "search"}}
ARGUMENTS = {"text": "a\nb", "most": 3}
THINKS, DOES_NOT = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
IMAGE, PAD = 99, VOCAB_SIZE + 2  # image token in the model's configuration; image token in the tokenizer


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TagAgent]:
    name, kind = request.param
    yield from agent_of(tmp_path_factory, name, kind)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TagAgent]:
    """Agent with the template of the newest models; tags are added tokens."""
    yield from agent_of(tmp_path_factory, "qwen 3.6", "added")


@pytest.fixture(scope="module")
def weighing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TagAgent]:
    """Agent with a template that accepts three efforts."""
    yield from agent_of(tmp_path_factory, "qwen 3.8", "added")


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TagAgent]:
    yield from agent_of(tmp_path_factory, "next", "added")


def agent_of(folders: pytest.TempPathFactory, name: str, kind: str) -> Iterator[TagAgent]:
    folder = folders.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps({"image_token_id": IMAGE, "text_config": {}}))
    tokenizer = tagged_tokenizer(folder, kind, TEMPLATES[name], VISION)
    with front_end(keys=(), tokenizer=tokenizer, backend=ScriptedBackend(tokenizer=tokenizer)) as server:
        yield TagAgent(server, tokenizer)


def writes_xml(agent: TagAgent) -> bool:
    return "<function=" in agent.tokenizer.chat_template


def call(agent: TagAgent, name: str = "search", arguments: dict[str, Any] = ARGUMENTS) -> list[Any]:
    """Return a call in the format that the agent's model writes."""
    if not writes_xml(agent):
        return [Tag("<tool_call>"), f"\n{json.dumps({'name': name, 'arguments': arguments})}\n", Tag("</tool_call>")]
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return [Tag("<tool_call>"), f"\n<function={name}>\n{values}</function>\n", Tag("</tool_call>")]


def prompt_text(agent: TagAgent) -> str:
    """Return the text of the last prompt."""
    return str(agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False))


def allows(agent: TagAgent, reply: Any) -> bool:
    """Return True if the grammar of the last request accepts a complete reply."""
    backend = agent.server.backend
    matcher, tokens = backend.grammars.matcher(backend.asked[-1].sampling.grammar), agent.tokens(reply)
    return bool(matcher.validate_tokens([*tokens, agent.tokenizer.eod]) == len(tokens) + 1)


def arguments_of(message: Any) -> list[tuple[str, Any]]:
    return [(found.function.name, json.loads(found.function.arguments)) for found in message.tool_calls or ()]


def together(deltas: list[Any], name: str) -> str:
    return "".join(getattr(delta, name, None) or "" for delta in deltas)


@pytest.mark.parametrize("fields", [{}, {"chat_template_kwargs": {"enable_thinking": True}}, OFF])
def test_qwen_replies_have_reasoning_by_default(qwen: TagAgent, fields: dict[str, Any]) -> None:
    is_on = fields is not OFF
    reply = ["Hm.\n", Tag("</think>"), "\n\nHello."] if is_on else ["Hello."]
    chat = qwen.answered(reply, tools=openai.omit, extra_body=fields)
    assert prompt_text(qwen).endswith(THINKS if is_on else DOES_NOT)
    message = chat.choices[0].message
    assert (message.content, getattr(message, "reasoning_content", None)) == ("Hello.", "Hm." if is_on else None)
    assert bool(chat.usage.completion_tokens_details.reasoning_tokens) is is_on
    deltas, finish = qwen.ask_streamed(reply, tools=openai.omit, extra_body=fields)
    assert (together(deltas, "content"), together(deltas, "reasoning_content")) == ("Hello.", "Hm." if is_on else "")
    assert finish == "stop"


ENDS = {  # texts between reasoning and calls, and after the calls
    "closed": ([Tag("</think>"), "\n\n"], []),
    "open": ([], []),
    "closed afterwards": ([], ["\n", Tag("</think>")]),
}


@pytest.mark.parametrize("ending", ENDS)
@pytest.mark.parametrize("num_calls", [1, 3])
def test_tool_calls_within_reasoning_are_parsed_like_calls_after_reasoning(
    agent: TagAgent, ending: str, num_calls: int
) -> None:
    before, after = ENDS[ending]
    wanted = [("search", ARGUMENTS), ("now", {}), ("search", {"text": "", "most": 0})][:num_calls]
    reply = ["I look.\n", *before]
    for number, (name, arguments) in enumerate(wanted):
        reply += ["\n"] * bool(number) + call(agent, name, arguments)
    reply += after
    whole = agent.ask(reply, tools=TOOLS)
    assert (whole.message.reasoning_content, whole.message.content) == ("I look.", None)
    assert arguments_of(whole.message) == wanted and whole.finish_reason == "tool_calls"
    deltas, finish = agent.ask_streamed(reply, tools=TOOLS)
    assert together(deltas, "reasoning_content") == "I look." and not together(deltas, "content")
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.function.name for part in parts if part.id] == [name for name, _ in wanted] and finish == "tool_calls"
    for index, (_, arguments) in enumerate(wanted):
        written = "".join(part.function.arguments for part in parts if part.index == index)
        assert json.loads(written) == arguments


STRICT: list[Any] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
CHOICES: dict[str, dict[str, Any]] = {
    "required": {"tool_choice": "required", "tools": TOOLS},
    "named": {"tool_choice": NAMED, "tools": TOOLS},
    "auto": {"tool_choice": "auto", "tools": STRICT},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_grammars_allow_calls_within_and_after_reasoning(agent: TagAgent, choice: str) -> None:
    for before, after in ENDS.values():
        reply = ["I look.\n", *before, *call(agent), *after]
        asked = agent.ask(reply, **CHOICES[choice])
        assert arguments_of(asked.message) == [("search", ARGUMENTS)] and asked.message.content is None
        assert asked.message.reasoning_content == "I look." and asked.finish_reason == "tool_calls"
        assert allows(agent, reply)
        several = ["I look.\n", *before, *call(agent), "\n", *call(agent, "now", {}), *after]
        assert allows(agent, several) is (choice != "named")
        for bad in (call(agent, arguments={"text": "a"}), call(agent, "other"), call(agent)[:2]):
            assert not allows(agent, ["I look.\n", *before, *bad, *after])
        assert allows(agent, ["I look.\n", *before, "No."]) is (choice == "auto" and before != [])
    assert allows(agent, ["The `<tool_call>` tag", *ENDS["closed"][0], *call(agent)])
    assert allows(agent, ["I look.", *call(agent)]) is (agent.tokenizer.id_of("<tool_call>") is not None)


@pytest.mark.parametrize("choice", CHOICES)
def test_grammars_apply_when_thinking_is_off(qwen: TagAgent, choice: str) -> None:
    asked = qwen.ask(call(qwen), extra_body=OFF, **CHOICES[choice])
    assert arguments_of(asked.message) == [("search", ARGUMENTS)] and asked.message.content is None
    assert prompt_text(qwen).endswith(DOES_NOT) and allows(qwen, call(qwen))
    assert allows(qwen, ["No."]) is (choice == "auto")
    thoughtful = [Tag("<think>"), "\nHm.\n", Tag("</think>"), "\n\n", *call(qwen)]
    assert allows(qwen, thoughtful) is (choice == "auto")  # its text is free
    deltas, finish = qwen.ask_streamed(call(qwen), extra_body=OFF, **CHOICES[choice])
    assert finish == "tool_calls" and not together(deltas, "content") + together(deltas, "reasoning_content")
    assert allows(qwen, call(qwen)) and allows(qwen, thoughtful) is (choice == "auto")


def test_constrained_answers_and_calls_may_follow_reasoning(qwen: TagAgent) -> None:
    fields: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SEARCH}}}
    reply = ["I look.\n", *call(qwen)]
    assert arguments_of(qwen.ask(reply, tools=TOOLS, **fields).message) == [("search", ARGUMENTS)]
    answer = ["Hm.", Tag("</think>"), json.dumps(ARGUMENTS)]
    assert allows(qwen, reply) and allows(qwen, answer) and not allows(qwen, ["Hm.", json.dumps(ARGUMENTS)])
    assert qwen.ask(answer, tools=TOOLS, **fields).message.content == json.dumps(ARGUMENTS)


def test_all_chat_apis_return_the_same_reasoning_content_and_calls(agent: TagAgent) -> None:
    client = anthropic.Anthropic(base_url=agent.server.listening.url, api_key="none", max_retries=0)
    tools: Any = [{"name": "search", "input_schema": SEARCH}, {"name": "now", "input_schema": {"type": "object"}}]
    reply = ["I look.\n", *call(agent), "\n", *call(agent, "now", {})]
    for streams, choice in ((False, "auto"), (True, "auto"), (False, "any"), (True, "any")):
        settings: Any = {"model": "scripted", "max_tokens": 900, "messages": ASKED, "tools": tools}
        settings |= {"tool_choice": {"type": choice}}
        with agent.saying(reply):
            if streams:
                with client.messages.stream(**settings) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**settings)
        thinking, *calls = [block.model_dump() for block in message.content]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "I look.")
        assert [(block["name"], block["input"]) for block in calls] == [("search", ARGUMENTS), ("now", {})]
        assert message.stop_reason == "tool_use"
    functions: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for choice in ("auto", "required"):
        with agent.saying(reply):
            response = agent.client.responses.create(
                model="scripted",
                input="Weather?",
                tools=functions,
                tool_choice=choice,  # type: ignore[arg-type]
            )
        reasoning, *found = response.output
        assert reasoning.content[0].text == "I look."
        assert [(item.name, json.loads(item.arguments)) for item in found] == [("search", ARGUMENTS), ("now", {})]
    assert allows(agent, reply)


def test_messages_api_can_turn_thinking_off(qwen: TagAgent) -> None:
    client = anthropic.Anthropic(base_url=qwen.server.listening.url, api_key="none", max_retries=0)
    for kind, end in (("disabled", DOES_NOT), ("adaptive", THINKS)):
        with qwen.saying([Tag("</think>")] * (end is THINKS) + ["Hello."]):
            thinking: Any = {"type": kind}
            message = client.messages.create(model="scripted", max_tokens=9, messages=ASKED, thinking=thinking)
        assert prompt_text(qwen).endswith(end) and message.content[-1].text == "Hello."


def test_reasoning_effort_none_turns_thinking_off(qwen: TagAgent) -> None:
    for effort, end in (("none", DOES_NOT), ("high", THINKS)):
        qwen.ask("Hello.", tools=openai.omit, reasoning_effort=effort)
        assert prompt_text(qwen).endswith(end)
        with qwen.saying("Hello."):
            qwen.client.responses.create(model="scripted", input="Hi", reasoning={"effort": effort})  # type: ignore[arg-type]
        assert prompt_text(qwen).endswith(end)
    qwen.ask("Hello.", reasoning_effort="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert prompt_text(qwen).endswith(THINKS)


@pytest.mark.parametrize("ending", ["closed", "open"])
def test_agent_rounds_reuse_tokens_until_a_new_question_drops_reasoning(agent: TagAgent, ending: str) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Look {ending}."}]
    for number in range(3):
        reply = [f"Thought {number}.\n", *ENDS[ending][0], *call(agent, arguments={"text": f"{number}", "most": 1})]
        message = agent.ask(reply, messages=messages, tools=TOOLS).message.model_dump(exclude_none=True)
        exact = [*agent.prompts()[-1], *agent.tokens(reply)]
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": f"{number} found"}]
        agent.ask("Done.", messages=messages, tools=TOOLS)
        assert list(agent.prompts()[-1][: len(exact)]) == exact
    messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Again."}]
    agent.ask("Yes.", messages=messages, tools=TOOLS)
    text = prompt_text(agent)
    keeps = "preserve_thinking is undefined" in agent.tokenizer.chat_template
    assert ("Thought 2" in text) is keeps and text.count("<think>") == (5 if keeps else 1)
    assert "2 found" in text and text.endswith(THINKS)


EFFORTS = {"minimal": "low", "low": "low", "medium": "", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"}


@pytest.mark.parametrize("effort", EFFORTS)
def test_reasoning_effort_becomes_the_nearest_value_that_the_template_accepts(weighing: TagAgent, effort: str) -> None:
    begin = f"<|im_start|>system\n(effort: {EFFORTS[effort]})" if EFFORTS[effort] else "<|im_start|>user"
    fields: list[dict[str, Any]] = [
        {"reasoning_effort": effort},
        {"extra_body": {"chat_template_kwargs": {"reasoning_effort": effort}}},
    ]
    for sent in fields:
        weighing.ask("Hello.", tools=openai.omit, **sent)
        assert prompt_text(weighing).startswith(begin) and prompt_text(weighing).endswith(THINKS)
    if effort in ("low", "medium", "high", "max"):
        client = anthropic.Anthropic(base_url=weighing.server.listening.url, api_key="none", max_retries=0)
        with weighing.saying("Hello."):
            config: Any = {"effort": effort}
            client.messages.create(model="scripted", max_tokens=9, messages=ASKED, output_config=config)
        assert prompt_text(weighing).startswith(begin)


def test_unknown_reasoning_effort_is_refused(weighing: TagAgent) -> None:
    with pytest.raises(openai.BadRequestError, match="there is no effort of utmost"):
        weighing.ask("Hello.", tools=openai.omit, reasoning_effort="utmost")
    weighing.ask("Hello.", tools=openai.omit, reasoning_effort="none")
    assert prompt_text(weighing).startswith("<|im_start|>user") and prompt_text(weighing).endswith(DOES_NOT)


def test_earlier_reasoning_stays_in_the_prompt_when_requested(qwen: TagAgent) -> None:
    keeps: Any = {"extra_body": {"chat_template_kwargs": {"preserve_thinking": True}}, "tools": TOOLS}
    messages: list[Any] = [{"role": "user", "content": "Keep it."}]
    reply = ["Thought.\n", Tag("</think>"), "\n\nDone."]
    message = qwen.ask(reply, messages=messages, **keeps).message.model_dump(exclude_none=True)
    exact = [*qwen.prompts()[-1], *qwen.tokens(reply)]
    qwen.ask("Yes.", messages=[*messages, message, {"role": "user", "content": "Again."}], **keeps)
    assert list(qwen.prompts()[-1][: len(exact)]) == exact and "Thought." in prompt_text(qwen)


def test_model_without_reasoning_can_call_tools(instruct: TagAgent) -> None:
    for fields in ({"tools": TOOLS}, *CHOICES.values()):
        asked = instruct.ask(["I look.\n"] * ("tool_choice" not in fields) + call(instruct), **fields)
        assert arguments_of(asked.message) == [("search", ARGUMENTS)]
        assert not hasattr(asked.message, "reasoning_content") and prompt_text(instruct).endswith("assistant\n")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_generation_prompt": False, "continue_final_message": True}, ("", "It is fine.")),
        ({"add_generation_prompt": True}, ("Hm.", "It is fine.")),
    ],
)
def test_continuation_of_a_reply_is_content_without_reasoning(
    qwen: TagAgent, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "It"}]
    is_continued = "continue_final_message" in fields
    reply = [" is fine."] if is_continued else ["Hm.", Tag("</think>"), "It is fine."]
    message = qwen.ask(reply, messages=messages, tools=openai.omit, extra_body=fields).message
    begun = "It" if is_continued else ""
    assert (getattr(message, "reasoning_content", ""), begun + message.content) == expected


SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
WITH_IMAGES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [1, IMAGE, 2]}, f"token {IMAGE} (image_token_id) at position 1"),
    ("/v1/completions", {"prompt": [[5], [PAD]]}, f"token {PAD} (<|image_pad|>) at position 0"),
    ("/v1/completions", {"prompt": f"See {SHOWN}"}, f"token {VOCAB_SIZE} (<|vision_start|>)"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"See {SHOWN}"}]}, "(<|vision_start|>)"),
    ("/v1/messages", {"messages": [{"role": "user", "content": SHOWN}], "max_tokens": 5}, "(<|vision_start|>)"),
    ("/v1/responses", {"input": SHOWN}, "(<|vision_start|>)"),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "body", "words"), WITH_IMAGES)
def test_prompts_with_image_tokens_are_refused_in_every_route(
    qwen: TagAgent, path: str, body: dict[str, Any], words: str, streams: bool
) -> None:
    count = len(qwen.prompts())
    with qwen.server.client() as http:
        reply = http.post(path, json=body | {"stream": streams})
    assert reply.status_code == 400 and words in reply.text and "reads text only" in reply.text
    assert len(qwen.prompts()) == count


def test_reply_with_an_image_token_does_not_end_the_conversation(weighing: TagAgent) -> None:
    """Models may generate an image token. It is not shown, and the next prompt does not contain it."""
    asked: list[Any] = [{"role": "user", "content": "Show it."}]
    reply = ["Hm.", Tag("</think>"), "See ", Tag("<|image_pad|>"), "there."]
    message = weighing.ask(reply, messages=asked, tools=openai.omit).message
    assert message.content == "See there."
    asked += [message.model_dump(exclude_none=True), {"role": "user", "content": "Where?"}]
    weighing.ask("Hm.", messages=asked, tools=openai.omit)
    assert "See there." in prompt_text(weighing) and PAD not in weighing.prompts()[-1]


@pytest.mark.parametrize("kind", ["image_url", "image", "video", "video_url", "input_audio"])
def test_error_for_a_part_that_is_not_text_names_its_type(qwen: TagAgent, kind: str) -> None:
    content = [{"type": "text", "text": "See"}, {"type": kind, kind: {"url": "data:image/png;base64,AA"}}]
    with qwen.server.client() as http:
        reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 400 and f"'{kind}' is not supported" in reply.json()["error"]["message"]


MENTIONS = (
    "The `<tool_call>` tag begins a call.",
    "It writes <tool_call> and <function=search> in a sentence.",
    "```xml\n<tool_call>\n<function=search>\n</function>\n</tool_call>\n```\nis how.",
)


@pytest.mark.parametrize("mention", MENTIONS)
def test_call_mentioned_in_reasoning_is_parsed_as_reasoning(agent: TagAgent, mention: str) -> None:
    for rest, calls in (([], []), ([*call(agent)], [("search", ARGUMENTS)])):
        message = agent.ask([f"{mention}\n", Tag("</think>"), "\n\n", *rest], tools=TOOLS).message
        assert message.reasoning_content == mention and arguments_of(message) == calls


def test_tag_that_no_call_follows_is_parsed_as_text(qwen: TagAgent) -> None:
    """The tag is a single token wherever the model writes it."""
    for mention in (["A `", Tag("<tool_call>"), "` begins a call."], ["\n", Tag("<tool_call>"), "\n<function=no>\n"]):
        message = qwen.ask(["So. ", *mention, "\n", *call(qwen)], tools=TOOLS).message
        assert message.reasoning_content == "So. " + "".join(mention).rstrip()
        assert arguments_of(message) == [("search", ARGUMENTS)]


VALUES: list[dict[str, Any]] = [
    {"text": "</parameter> and\n<parameter> and </function>", "most": 1},
    {"text": "\n\nlines\n  and spaces \n", "most": -1},
    {"text": "3", "most": 3},
    {"text": "null", "most": 0, "where": {"paths": ["a/b", "</parameter>", '"', "\n"]}},
    {"text": '{"a": [1, {"b": "<tool_call>"}]}', "most": 10**9, "where": {"paths": [], "deep": {"er": [None, 1.5]}}},
    {"text": "", "most": 2, "where": {}},
    {"text": "<think>\nnot </think> closed", "most": 7},
]


@pytest.mark.parametrize("values", VALUES)
def test_call_arguments_have_the_types_in_the_schema(agent: TagAgent, values: dict[str, Any]) -> None:
    for before in (["Hm.\n"], ["Hm.\n", Tag("</think>"), "\n\n"]):
        reply = [*before, *call(agent, arguments=values)]
        message = agent.ask(reply, tools=TOOLS, tool_choice="required").message
        assert arguments_of(message) == [("search", values)]
        deltas, _ = agent.ask_streamed(reply, tools=TOOLS)
        written = "".join(part.function.arguments for delta in deltas for part in delta.tool_calls or [])
        assert json.loads(written) == values
