"""For any chat template, every message is in the prompt or the request is refused."""

from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.server.conversation import Conversation
from megatron_mamba_cache.server.errors import ApiError
from megatron_mamba_cache.server.prompts import Prompt, PromptReader
from megatron_mamba_cache.server.schemas import ChatRequest
from megatron_mamba_cache.server.tenants import Tenant
from megatron_mamba_cache.server.transcripts import Transcripts
from tests.server.family_templates import FAMILIES
from tests.server.scripted_agent import TOOL, agent_tokenizer

IDS = ("call_4f1d9b7c", "toolu_01A9")


def spoken(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text} | fields


def calling(text: str, *cities: str) -> dict[str, Any]:
    """Return an assistant message that calls a tool for each city."""
    calls = [
        {"id": call_id, "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'}}
        for call_id, city in zip(IDS, cities, strict=False)
    ]
    return spoken("assistant", text, tool_calls=calls)


def result(text: str, number: int = 0) -> dict[str, Any]:
    return spoken("tool", text, tool_call_id=IDS[number])


BRIEF, KIND, RULE = spoken("system", "Be brief."), spoken("system", "Be kind."), spoken("developer", "Write no code.")
ASKED, AGAIN, HELLO = (
    spoken("user", "Weather in Oslo?"),
    spoken("user", "And in Rome?"),
    spoken("assistant", "Hello there."),
)

TALKS: dict[str, list[dict[str, Any]]] = {
    "instructions first": [BRIEF, ASKED],
    "two instructions": [BRIEF, KIND, ASKED],
    "instructions of both": [BRIEF, RULE, ASKED, AGAIN],
    "the developer alone": [RULE, ASKED],
    "instructions in between": [BRIEF, ASKED, HELLO, KIND, RULE, AGAIN],
    "instructions without any before": [ASKED, HELLO, RULE, AGAIN],
    "instructions last": [BRIEF, ASKED, KIND],
    "instructions after a reply, last": [ASKED, HELLO, KIND],
    "instructions alone": [BRIEF],
    "two users": [ASKED, AGAIN, HELLO, spoken("user", "One."), spoken("user", "Two.")],
    "two replies": [ASKED, HELLO, spoken("assistant", "How are you?"), AGAIN],
}
CALLING_TALKS: dict[str, list[dict[str, Any]]] = {
    "a call": [BRIEF, ASKED, calling("", "Oslo"), result("5 degrees")],
    "a call and its answer": [BRIEF, ASKED, calling("", "Oslo"), result("5 degrees"), HELLO, AGAIN],
    "text after a result": [BRIEF, ASKED, calling("", "Oslo"), result("5 degrees"), AGAIN],
    "two calls": [ASKED, calling("", "Oslo", "Rome"), result("5 degrees"), result("20 degrees", 1), HELLO, AGAIN],
    "a reply and a call": [ASKED, HELLO, calling("", "Oslo"), result("5 degrees"), spoken("assistant", "Cold."), AGAIN],
    "instructions before a result": [ASKED, calling("", "Oslo"), KIND, result("5 degrees")],
    "instructions after a result": [BRIEF, ASKED, calling("", "Oslo"), result("5 degrees"), KIND, AGAIN],
}


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptReader]:
    folder = tmp_path_factory.mktemp("families")
    return {
        name: PromptReader(agent_tokenizer(folder / name.replace(" ", "_"), source), Transcripts(0), 4096)
        for name, source in FAMILIES.items()
    }


def conversation(messages: list[dict[str, Any]], **fields: Any) -> Conversation:
    """Return the conversation of a chat completion with these messages."""
    return ChatRequest.model_validate({"messages": messages} | fields).conversation()


def prompt_of(reader: PromptReader, messages: list[dict[str, Any]], **fields: Any) -> Prompt:
    return reader.read_chat(Tenant(), conversation(messages, **fields))


def knows_tools(family: str) -> bool:
    return "tool_calls" in FAMILIES[family]


@pytest.mark.parametrize("talk", [*TALKS, *CALLING_TALKS])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_message_is_rendered_exactly_once(readers: dict[str, PromptReader], family: str, talk: str) -> None:
    if talk in CALLING_TALKS and not knows_tools(family):
        return
    messages = (TALKS | CALLING_TALKS)[talk]
    text = prompt_of(readers[family], messages, tools=[TOOL] if talk in CALLING_TALKS else None).text
    assert text is not None
    for message in messages:
        assert text.count(message["content"]) == 1 or not message["content"], text
        for call in message.get("tool_calls", ()):
            city = call["function"]["arguments"].split('"')[3]
            assert city in text.replace(f"in {city}", ""), text


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mistral 3"}))
def test_rewritten_messages_stay_in_order(readers: dict[str, PromptReader], family: str) -> None:
    """Instructions at the beginning come first; later instructions stay adjacent to the messages around them."""
    text = prompt_of(readers[family], TALKS["instructions in between"]).text or ""
    wanted = [message["content"] for message in TALKS["instructions in between"]]
    assert sorted(wanted, key=text.index) == wanted
    assert "Be kind.\n\nWrite no code." in text


def test_messages_are_unchanged_when_the_template_renders_all_of_them(readers: dict[str, PromptReader]) -> None:
    for talk in ("instructions in between", "two users", "two replies", "instructions last"):
        talked = [spoken("system", "Be kind.") if message is RULE else message for message in TALKS[talk]]
        if talk == "instructions in between":
            talked.pop(4)
        roles = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in talked]
        text = prompt_of(readers["hermes"], talked).text
        assert text == "".join(roles) + "<|im_start|>assistant\n"


LONG = [
    *TALKS["instructions of both"],
    HELLO,
    KIND,
    spoken("user", "One."),
    calling("", "Oslo"),
    result("5 degrees"),
    spoken("user", "<note>"),
    spoken("assistant", "Cold."),
    spoken("user", "Two."),
]


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mistral 3"}))  # moves instructions to the last message
def test_each_rewritten_prompt_starts_with_the_previous_prompt(readers: dict[str, PromptReader], family: str) -> None:
    talk = [message for message in LONG if knows_tools(family) or message["role"] != "tool"]
    if not knows_tools(family):
        talk = [message for message in talk if "tool_calls" not in message]
    before = ""
    for end, message in enumerate(talk):
        is_turn = end + 1 == len(talk) or talk[end + 1]["role"] == "assistant"
        if message["role"] not in ("user", "tool") or not is_turn:
            continue
        text = prompt_of(readers[family], talk[: end + 1], add_generation_prompt=False).text or ""
        assert text.startswith(before) and len(text) > len(before)
        before = text


MARK = {"cache_control": {"type": "ephemeral"}}


def marked(text: str) -> list[dict[str, Any]]:
    """Return content with a breakpoint at the end of the first part."""
    return [{"type": "text", "text": text} | MARK, {"type": "text", "text": "The rest."}]


MARKED: dict[str, list[dict[str, Any]]] = {
    "instructions": [spoken("system", marked("Be brief.")), ASKED],  # type: ignore[arg-type]
    "instructions of the developer": [BRIEF, spoken("developer", marked("Be kind.")), ASKED],  # type: ignore[arg-type]
    "instructions in between": [BRIEF, ASKED, HELLO, spoken("system", marked("Be kind.")), AGAIN],  # type: ignore[arg-type]
    "the second of two users": [ASKED, spoken("user", marked("And in Rome?"))],  # type: ignore[arg-type]
    "the first of two users": [spoken("user", marked("And in Rome?")), ASKED],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("talk", MARKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_breakpoints_move_with_rewritten_messages(readers: dict[str, PromptReader], family: str, talk: str) -> None:
    prompt = prompt_of(readers[family], MARKED[talk])
    (words,) = (m["content"][0]["text"] for m in MARKED[talk] if isinstance(m["content"], list))
    (point,) = prompt.breakpoints
    assert prompt.text is not None
    end = prompt.text.index(words) + len(words)
    tokenizer = readers[family]._tokenizer
    found = tokenizer.detokenize(prompt.token_ids[: point.position], skip_special_tokens=False)
    assert abs(len(found) - end) <= 3, found  # a token may span the end


CALL_MARKS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("a result", [ASKED, calling("", "Oslo"), result("5 degrees") | MARK, AGAIN], "5 degrees"),
    ("text after a result", [ASKED, calling("", "Oslo"), result("5 degrees"), AGAIN | MARK], "And in Rome?"),
    ("text before a call", [ASKED, calling("", "Oslo") | {"content": marked("I look.")}, result("5")], "I look."),
]


@pytest.mark.parametrize("family", [name for name in FAMILIES if knows_tools(name)])
@pytest.mark.parametrize(("_name", "messages", "words"), CALL_MARKS)
def test_breakpoints_around_calls_move_with_rewritten_calls(
    readers: dict[str, PromptReader], family: str, _name: str, messages: list[dict[str, Any]], words: str
) -> None:
    prompt = prompt_of(readers[family], messages, tools=[TOOL])
    assert prompt.text is not None
    (point,) = prompt.breakpoints
    end = prompt.text.index(words) + len(words)
    found = readers[family]._tokenizer.detokenize(prompt.token_ids[: point.position], skip_special_tokens=False)
    assert abs(len(found) - end) <= 3, found


def test_text_before_a_call_moves_to_a_message_that_the_template_renders(readers: dict[str, PromptReader]) -> None:
    messages = [ASKED, calling("I look.", "Oslo"), result("5 degrees")]
    assert "assistant\nI look.<|eot|><|header|>assistant\n{" in (
        prompt_of(readers["llama 3"], messages, tools=[TOOL]).text or ""
    )
    text = prompt_of(readers["mistral 3"], [*messages, HELLO, AGAIN], tools=[TOOL]).text or ""
    assert "[RESULTS] [Said with the call]\nI look.\n\n5 degrees " in text  # this template requires alternating roles


def test_parallel_calls_are_split_and_get_short_ids_for_the_template(readers: dict[str, PromptReader]) -> None:
    messages = CALLING_TALKS["two calls"]
    text = prompt_of(readers["llama 3"], messages, tools=[TOOL]).text or ""
    words = ["Oslo?", '"Oslo"}', "5 degrees", '"Rome"}', "20 degrees", "Hello"]
    assert sorted(words, key=text.index) == words
    text = prompt_of(readers["mistral 3"], messages, tools=[TOOL]).text or ""
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert not any(call_id in text for call_id in ids) and text.count("[RESULTS]") == 2


def test_tool_results_that_the_template_drops_become_user_text(readers: dict[str, PromptReader]) -> None:
    text = prompt_of(readers["phi 4"], CALLING_TALKS["a call"], tools=[TOOL]).text or ""
    assert '<|assistant|>[Called get_weather with {"city": "Oslo"}]<|end|>' in text
    assert text.endswith("<|user|>[Result of get_weather]\n5 degrees<|end|><|assistant|>")


NO_CALLS = (  # like SmolLM3's: renders tools, results and text, but no calls
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.role == 'tool' %}<user>{{ m.content }}{% endif %}{% endfor %}"
)
FIRST_CALLS = (  # like DeepSeek R1's: renders text before a call only in the first message with calls
    "{% set ns = namespace(has_called=false) %}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}<assistant>{{ m.content if not ns.has_called }}{{ m.tool_calls | tojson }}"
    "{% set ns.has_called = true %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [NO_CALLS, FIRST_CALLS])
def test_earlier_calls_and_their_texts_are_rendered_in_order(tmp_path: Path, source: str) -> None:
    reader = PromptReader(agent_tokenizer(tmp_path / "model", source), Transcripts(0), 4096)
    first = [ASKED, calling("I look.", "Oslo"), result("5 degrees"), HELLO, AGAIN]
    second = [*first, calling("I look again.", "Rome"), result("20 degrees")]
    for messages in (first, second):
        text = prompt_of(reader, messages, tools=[TOOL]).text or ""
        words = [message["content"] for message in messages]
        assert sorted(words, key=text.index) == words and all(text.count(word) == 1 for word in words)
        assert "Oslo" in text.replace("in Oslo", "") and ("Rome" in text.replace("in Rome", "")) is (messages is second)


EVERYWHERE = "{# developer #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = "{% if messages[0].role in ('system', 'developer') %}<{{ messages[0].role }}>{{ messages[0].content }}"
FIRST += "{% endif %}"
FIRST += "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_DEVELOPER = EVERYWHERE.replace("developer", "")


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (EVERYWHERE, [BRIEF, RULE, ASKED], "<system>Be brief.<developer>Write no code.<user>Weather in Oslo?"),
        (EVERYWHERE, [RULE, KIND, KIND], "<developer>Write no code.<system>Be kind.\n\nBe kind."),
        (FIRST, [RULE, ASKED], "<system>Write no code.<user>Weather in Oslo?"),
        (FIRST, [BRIEF, RULE, ASKED], "<system>Be brief.\n\nWrite no code.<user>Weather in Oslo?"),
        (FIRST, [ASKED, HELLO, RULE, AGAIN], "<user>Weather in Oslo?<assistant>Hello there.<user>Write no code.\n\nA"),
        (NO_DEVELOPER, [RULE, ASKED], "<system>Write no code.<user>"),
        (NO_DEVELOPER, [BRIEF | {"name": "a"}, KIND | {"name": "b"}], "<system>Be brief.<system>Be kind."),
    ],
)
def test_developer_role_is_kept_when_the_template_supports_it(
    tmp_path: Path, source: str, messages: list[dict[str, Any]], text: str
) -> None:
    reader = PromptReader(agent_tokenizer(tmp_path / "model", source), Transcripts(0), 4096)
    assert (prompt_of(reader, messages).text or "").startswith(text)


DEAF = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("family", "messages", "words"),
    [
        (DEAF, [ASKED, HELLO, AGAIN], "leaves out the message with role assistant that begins with 'Hello there.'"),
        (
            "{{ messages[-1].content }}",
            [ASKED, HELLO],
            "leaves out the message with role user that begins with 'Weather",
        ),
        ("gemma", [HELLO, ASKED], "the model's chat template rejects the messages: roles must alternate"),
        ("mistral 3", [HELLO], "the model's chat template rejects the messages: roles must alternate"),
    ],
)
def test_conversation_is_refused_when_every_rewrite_drops_a_message(
    tmp_path: Path, family: str, messages: list[dict[str, Any]], words: str
) -> None:
    reader = PromptReader(agent_tokenizer(tmp_path / "model", FAMILIES.get(family, family)), Transcripts(0), 4096)
    with pytest.raises(ApiError) as found:
        prompt_of(reader, messages)
    assert words in found.value.message


def test_conversation_is_accepted_when_the_template_drops_earlier_reasoning(readers: dict[str, PromptReader]) -> None:
    reply = spoken("assistant", "Hello there.", reasoning_content="Hm, well.")
    for family in FAMILIES:
        text = prompt_of(readers[family], [ASKED, reply, AGAIN]).text or ""
        assert "Hello there." in text and ("Hm, well." in text) is (family == "qwen 3.8"), family
