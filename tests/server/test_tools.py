"""Tools and reasoning over HTTP: text is parsed into calls, and the next turn keeps the exact tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron_mamba_cache.server.reply import Reply
from megatron_mamba_cache.server.schemas import ChatRequest
from tests.server.scripted_agent import ASKED, DROPS_REASONING, TEMPLATES, TOOL, WRITTEN, Agent, agent_of


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Agent]]:
    """One agent for each tool call format."""
    folder = tmp_path_factory.mktemp("agents")
    with (
        agent_of(folder / "hermes", TEMPLATES["hermes"]) as hermes,
        agent_of(folder / "xml", TEMPLATES["qwen3_coder"]) as xml,
        agent_of(folder / "nemotron", TEMPLATES["nemotron_nano_v2"]) as nemotron,
    ):
        yield {"hermes": hermes, "qwen3_coder": xml, "nemotron_nano_v2": nemotron}


def accumulated(deltas: list[Any]) -> list[tuple[str, str]]:
    """Return the names and arguments of streamed calls, ordered by index."""
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or []):
        if call.id is not None:
            assert call.index == len(calls) and call.type == "function"
            calls[call.index] = [call.function.name, ""]
        calls[call.index][1] += call.function.arguments
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("form", WRITTEN)
def test_tool_calls_are_the_same_with_and_without_streaming(agents: dict[str, Agent], form: str) -> None:
    agent, reply = agents[form], "<think>\nHm.\n</think>\n\nI look.\n" + WRITTEN[form] % "Oslo é"
    whole = agent.ask(reply)
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look."
    assert whole.message.reasoning_content == "Hm."
    (call,) = whole.message.tool_calls
    assert call.id.startswith("call_") and json.loads(call.function.arguments) == {"city": "Oslo é", "days": 3}
    deltas, finish = agent.ask_streamed(reply)
    assert finish == "tool_calls" and deltas[0].role == "assistant"
    assert accumulated(deltas) == [(call.function.name, call.function.arguments)]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
    assert len([delta for delta in deltas if delta.tool_calls]) > 10  # streamed while the model writes them


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("reasoning", ["", "<think>\nHm.\n</think>\n\n"])
def test_prompt_of_each_agent_turn_starts_with_the_tokens_of_earlier_turns(
    agents: dict[str, Agent], form: str, reasoning: str
) -> None:
    agent, messages = agents[form], [{"role": "system", "content": f"Be {form}{reasoning}."}, *ASKED]
    earlier = len(agent.prompts())
    for round_number in range(5):
        reply = reasoning + "One look.\n" * (round_number % 2) + WRITTEN[form] % f"city {round_number}"
        message = agent.ask(reply, messages=messages).message
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{round_number} degrees"},
        ]
        exact = [*agent.prompts()[-1], *agent.tokens(reply)]
        agent.ask("Done.", messages=messages)
        assert list(agent.prompts()[-1][: len(exact)]) == exact
    assert len(agent.prompts()) == earlier + 10


def test_reply_that_the_client_edited_is_tokenized_again(agents: dict[str, Agent]) -> None:
    agent, messages = agents["hermes"], [{"role": "system", "content": "Changed."}, *ASKED]
    reply = WRITTEN["hermes"] % "Oslo"
    changed = agent.ask(reply, messages=messages).message.model_dump(exclude_none=True)
    changed["tool_calls"][0]["function"]["arguments"] = '{"city": "Bergen", "days": 3}'
    exact = [*agent.prompts()[-1], *agent.tokens(reply)]
    agent.ask("Done.", messages=[*messages, changed, *ASKED])
    prompt = agent.prompts()[-1]
    assert list(prompt[: len(exact)]) != exact and "Bergen" in agent.tokenizer.detokenize(prompt)


def test_reasoning_that_the_template_drops_is_not_in_the_next_prompt(tmp_path: Path) -> None:
    with agent_of(tmp_path / "drops", DROPS_REASONING) as agent:
        message = agent.ask("<think>\nHm.\n</think>\n\n" + WRITTEN["hermes"] % "Oslo").message
        assert message.reasoning_content == "Hm."
        agent.ask("Done.", messages=[*ASKED, message.model_dump(exclude_none=True), *ASKED])
        text = agent.tokenizer.detokenize(agent.prompts()[-1])
        assert "Hm." not in text and '"arguments": {"days": 3' in text.replace('"city": "Oslo", ', "")


def test_reply_ends_after_one_call_when_parallel_calls_are_disabled(agents: dict[str, Agent]) -> None:
    agent, both = agents["hermes"], (WRITTEN["hermes"] % "Oslo") + (WRITTEN["hermes"] % "Bergen")
    assert len(agent.ask(both).message.tool_calls) == 2
    alone = agent.ask(both, parallel_tool_calls=False)
    assert len(alone.message.tool_calls) == 1 and alone.finish_reason == "tool_calls"
    deltas, finish = agent.ask_streamed(both, parallel_tool_calls=False)
    assert len(accumulated(deltas)) == 1 and finish == "tool_calls"


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(
    "cut", [{"parallel_tool_calls": False}, {"stop": ["</tool_call>", "</TOOLCALL>"]}, {"end": "length"}]
)
def test_call_cut_before_its_closing_marker_keeps_its_exact_tokens(
    agents: dict[str, Agent], form: str, cut: dict[str, Any]
) -> None:
    agent, messages = agents[form], [{"role": "system", "content": f"Cut {form} {[*cut]}."}, *ASKED]
    reply = WRITTEN[form] % "Oslo" + "</tool_call>" * (form == "qwen3_coder")
    begun = reply.partition("</tool_call>")[0].partition("</TOOLCALL>")[0]
    if form == "nemotron_nano_v2" and "parallel_tool_calls" in cut:
        begun = begun.partition("]")[0]
    message = agent.ask(begun if "end" in cut else reply, messages=messages, **cut).message
    exact = [*agent.prompts()[-1], *agent.tokens(begun)]
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "a", "content": "5"}]
    agent.ask("Done.", messages=messages)
    prompt = agent.prompts()[-1]
    fresh = ChatRequest.model_validate({"messages": messages, "tools": [TOOL]}).conversation().text(agent.tokenizer)
    if begun.endswith("]\n"):  # the template would repeat the bracket
        assert agent.tokenizer.detokenize(prompt, skip_special_tokens=False) == fresh
        return
    assert list(prompt[: len(exact)]) == exact
    rest = agent.tokenizer.detokenize(prompt[len(exact) :], skip_special_tokens=False)
    assert fresh.endswith(rest) and rest.lstrip("\n]").startswith(("</tool_call><|im_end|>", "</TOOLCALL><|im_end|>"))


def test_tool_calls_are_returned_as_text_when_tools_are_disabled(agents: dict[str, Agent]) -> None:
    reply = WRITTEN["hermes"] % "Oslo"
    for fields in ({"tool_choice": "none"}, {"tools": openai.omit}):
        choice = agents["hermes"].ask(reply, **fields)
        assert choice.message.content == reply and choice.message.tool_calls is None and choice.finish_reason == "stop"


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(("cut", "finish"), [({"end": "length"}, "length"), ({}, "stop"), ({"stop": ["STOP"]}, "stop")])
def test_conversation_can_continue_after_an_incomplete_tool_call(
    agents: dict[str, Agent], form: str, cut: dict[str, Any], finish: str
) -> None:
    agent, begun = agents[form], (WRITTEN[form] % "Oslo STOP").partition(" STOP" if "stop" not in cut else "\0")[0]
    choice = agent.ask(begun, **cut)
    written = choice.message.tool_calls[0].function.arguments
    assert choice.finish_reason == finish and "Oslo" in written and not written.endswith("}")
    deltas, streamed = agent.ask_streamed(begun, **cut)
    assert streamed == finish and accumulated(deltas) == [("get_weather", written)]
    reply_message = choice.message.model_dump(exclude_none=True)
    agent.ask("Done.", messages=[*ASKED, reply_message, {"role": "tool", "tool_call_id": "a", "content": "cut off"}])
    text = agent.tokenizer.detokenize(agent.prompts()[-1])
    assert "malformed_input" in text and "cut off" in text


@pytest.mark.parametrize("written", ["", " ", "{}"])
def test_call_in_an_earlier_reply_may_have_no_arguments(agents: dict[str, Agent], written: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": written}}
    reply_message = {"role": "assistant", "content": None, "tool_calls": [call]}
    agents["hermes"].ask(
        "Done.", messages=[*ASKED, reply_message, {"role": "tool", "tool_call_id": "a", "content": "5"}]
    )
    text = agents["hermes"].tokenizer.detokenize(agents["hermes"].prompts()[-1])
    assert '"arguments": {}}' in text


@pytest.mark.parametrize(("knows", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_developer_message_becomes_a_system_message_when_unsupported(tmp_path: Path, knows: str, role: str) -> None:
    with agent_of(tmp_path / "developer", knows + TEMPLATES["hermes"]) as agent:
        agent.ask("Yes.", messages=[{"role": "developer", "content": "Be brief."}, *ASKED])
        text = agent.tokenizer.detokenize(agent.prompts()[-1], skip_special_tokens=False)
    assert f"<|im_start|>{role}\nBe brief.<|im_end|>" in text


def test_reasoning_tokens_are_counted_when_omitted_from_the_reply(agents: dict[str, Agent]) -> None:
    reply = "<think>\nHm, well.\n</think>\n\nYes."
    answer = agents["hermes"].answered(reply)
    hidden = agents["hermes"].answered(reply, extra_body={"include_reasoning": False})
    assert answer.choices[0].message.reasoning_content == "Hm, well." and answer.choices[0].message.content == "Yes."
    assert not hasattr(hidden.choices[0].message, "reasoning_content") and hidden.choices[0].message.content == "Yes."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 5


def test_template_settings_of_the_client_are_passed_to_the_template(tmp_path: Path) -> None:
    template = (
        "{{ effort }}{{ reasoning_effort }}{{ enable_thinking }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    )
    with agent_of(tmp_path / "values", template + "{% if add_generation_prompt %}|>{% endif %}") as agent:

        def prompt_of(**fields: Any) -> str:
            agent.ask("x", tools=openai.omit, **fields)
            return str(agent.tokenizer.detokenize(agent.prompts()[-1]))

        values = {"chat_template_kwargs": {"enable_thinking": False, "effort": [1]}}
        assert prompt_of(reasoning_effort="low", extra_body=values) == "[1]lowFalse|Weather?|>"
        assert prompt_of(extra_body={"add_generation_prompt": False}) == "|Weather?"
        begun = [*ASKED, {"role": "assistant", "content": "It is"}]
        assert prompt_of(messages=begun, extra_body={"continue_final_message": True}) == "|Weather?|It is"
        for name in ("messages", "chat_template", "tokenize", "tools"):
            with pytest.raises(openai.BadRequestError, match=f"chat template variables cannot be named {name};"):
                prompt_of(extra_body={"chat_template_kwargs": {name: 1}})


def test_unexpected_exception_ends_a_stream_with_an_error_and_is_logged(
    agents: dict[str, Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: Any) -> None:
        raise ValueError("planted")

    agent = agents["hermes"]
    monkeypatch.setattr(Reply, "take", raises)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": ASKED},
        "/v1/messages": {"messages": ASKED, "max_tokens": 5},
        "/v1/responses": {"input": "x"},
    }
    for path, body in bodies.items():
        with agent.saying("y"), agent.server.client() as http:
            reply = http.post(path, json=body | {"stream": True})
        last = reply.text.strip().splitlines()[-1]
        assert reply.status_code == 200 and "the server failed to handle this request; the reason is in its log" in last
        assert f"a stream on {path} failed" in caplog.text
