"""Special tokens in chats (from the template) and in texts (from the tokenizer)."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.server.conversation import Breakpoint, Conversation
from megatron_mamba_cache.server.errors import ApiError
from megatron_mamba_cache.server.prompts import PromptReader
from megatron_mamba_cache.server.tenants import Tenant
from megatron_mamba_cache.server.transcripts import Transcripts
from tests.models.tokenizer_kinds import BEGIN, CASES, END, SCRIPTS, THREE_KINDS, TURN_END, UNKNOWN, save_kind, size_of
from tests.server.front_end import front_end, request_bytes, wait_until

TENANT = Tenant()
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CALL: Any = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "größe"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "The lazy dog"}],
    "leading spaces": [{"role": "user", "content": "  x"}, {"role": "assistant", "content": " y "}],
    "scripts": [{"role": "system" if n == 0 else "user", "content": text} for n, text in enumerate(SCRIPTS.values())],
    "special tokens": [{"role": "user", "content": f"{BEGIN}a{END} {TURN_END}\n{BEGIN}{BEGIN}"}],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"ok": true}'},
    ],
}


class Saved(NamedTuple):
    ours: HuggingFaceTokenizer
    theirs: Any


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_in(tmp_path_factory.mktemp("kind"), *request.param)


def saved_in(directory: Path, kind: str, ends: str, **options: Any) -> Saved:
    theirs = save_kind(directory, kind, ends, **options)
    ours = load_tokenizer(directory, size_of(directory))
    assert ours is not None
    return Saved(ours, theirs)


def reader_of(tokenizer: HuggingFaceTokenizer, transcript_bytes: int = 0) -> PromptReader:
    return PromptReader(tokenizer, Transcripts(transcript_bytes), 4096)


@pytest.mark.parametrize("name", CHATS)
def test_chat_tokens_match_transformers(saved: Saved, name: str) -> None:
    tools = [TOOL] if name == "calls" else []
    for adds_prompt in (True, False):
        found = reader_of(saved.ours).read_chat(TENANT, Conversation(CHATS[name], tools, adds_prompt=adds_prompt))
        expected = saved.theirs.apply_chat_template(
            CHATS[name], tools=tools or None, add_generation_prompt=adds_prompt, return_dict=False
        )
        assert list(found.token_ids) == expected
        assert expected[0] == saved.theirs.bos_token_id and expected[-1] != saved.theirs.eos_token_id


def test_special_tokens_are_added_to_a_chat_on_request(saved: Saved) -> None:
    conversation = Conversation(CHATS["one turn"])
    plain = reader_of(saved.ours).read_chat(TENANT, conversation)
    added = reader_of(saved.ours).read_chat(TENANT, conversation, add_special_tokens=True)
    assert list(added.token_ids) == saved.theirs(plain.text, add_special_tokens=True)["input_ids"]
    assert (added.token_ids != plain.token_ids) is saved.ours.adds_special_tokens


@pytest.mark.parametrize("text", ["The lazy dog", " x", f"{BEGIN}a", f"a{END}", "日本語 größe"])
def test_special_tokens_are_added_to_a_completion_prompt_unless_disabled(saved: Saved, text: str) -> None:
    read = reader_of(saved.ours).read
    for add in (True, False):
        expected = saved.theirs(text, add_special_tokens=add)["input_ids"]
        assert list(read(TENANT, text, add).token_ids) == expected
    begin, added = saved.theirs.bos_token_id, saved.theirs(text)["input_ids"]
    assert list(read(TENANT, text).token_ids) == (added[1:] if added[:2] == [begin, begin] else added)


ECHOED = ("The lazy dog", f"lazy{TURN_END}dog{TURN_END}", f"{BEGIN}x\n<tool_call>größe", "日本 x  y")


@pytest.mark.parametrize("text", ECHOED)
def test_offsets_in_an_echo_are_the_starts_of_its_tokens(saved: Saved, text: str) -> None:
    for add in (None, True, False):
        prompt = reader_of(saved.ours).read_to_echo(TENANT, text, add, has_tokens=True)
        assert prompt.echo is not None and prompt.echo.text == text
        offsets = prompt.echo.offsets
        assert len(offsets) == len(prompt.token_ids) and [*offsets] == sorted(offsets) and offsets[-1] <= len(text)
        num_found = 0
        for token, offset in zip(prompt.token_ids, offsets, strict=True):
            name = prompt.echo.reader.text_of(token)
            is_added = name in (BEGIN, END) and name not in text
            if name.strip() and not is_added and "\ufffd" not in name and name != UNKNOWN:
                num_found += 1
                assert text[offset:].lstrip().startswith(name.strip()), (add, name, offset)
        assert num_found >= 2


def test_next_turn_of_a_chat_begins_with_the_exact_earlier_tokens(saved: Saved) -> None:
    reader = reader_of(saved.ours, 10**6)
    first = Conversation(CHATS["one turn"])
    prompt = reader.read_chat(TENANT, first)
    reply = "def f(x): return 42"
    exact = spelled(saved.ours, reply)
    reader.remember(TENANT, prompt, reply, exact)
    last = {"role": "user", "content": "lazy größe"}
    second = Conversation([*first.messages, {"role": "assistant", "content": reply}, last])
    following = reader.read_chat(TENANT, second)
    assert following.token_ids[: len(prompt.token_ids) + len(exact)] == (*prompt.token_ids, *exact)
    rest = following.token_ids[len(prompt.token_ids) + len(exact) :]
    fresh = reader_of(saved.ours).read_chat(TENANT, second)
    assert fresh.token_ids != following.token_ids and fresh.token_ids[-len(rest) :] == rest


def spelled(tokenizer: HuggingFaceTokenizer, text: str) -> list[int]:
    """Return one token for each character of an ASCII text."""
    by_bytes = {tokenizer.bytes_of(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[character.encode()] for character in text]


def test_exact_tokens_are_stored_separately_for_each_special_token_setting(tmp_path: Path) -> None:
    for kind in THREE_KINDS:
        ours, theirs = saved_in(tmp_path / kind, kind, "begin", template="{{ messages[0].content }}")
        reader, text, reply = reader_of(ours, 10**6), "The lazy", " dog, and"
        prompt = reader.read(TENANT, text)
        assert prompt.token_ids[0] == ours.bos
        reader.remember(TENANT, prompt, reply, spelled(ours, reply))
        chat = reader.read_chat(TENANT, Conversation([{"role": "user", "content": text + reply}]))
        assert list(chat.token_ids) == theirs(text + reply, add_special_tokens=False)["input_ids"]
        assert reader.read(TENANT, text + reply).token_ids == (*prompt.token_ids, *spelled(ours, reply))
        assert list(reader.read(TENANT, text + reply, True).token_ids) == theirs(text + reply)["input_ids"]


def test_added_end_token_is_never_inside_a_continued_text(tmp_path: Path) -> None:
    for kind in THREE_KINDS:
        ours, theirs = saved_in(tmp_path / kind, kind, "both")
        reader, text, reply = reader_of(ours, 10**6), "The lazy", " dog, and"
        prompt = reader.read(TENANT, text)
        assert prompt.token_ids[-1] == theirs.eos_token_id
        reader.remember(TENANT, prompt, reply, spelled(ours, reply))
        found = list(reader.read(TENANT, text + reply + " others").token_ids)
        assert found == theirs(text + reply + " others")["input_ids"]


def test_breakpoints_in_a_chat_become_token_positions(saved: Saved) -> None:
    positions = (Breakpoint(0, 3), Breakpoint(1, 4))
    messages = [{"role": "system", "content": "The lazy dog"}, {"role": "user", "content": "quick brown"}]
    for add in (False, True):
        conversation = Conversation(messages, breakpoints=positions)
        prompt = reader_of(saved.ours).read_chat(TENANT, conversation, add_special_tokens=add)
        ends = [point.position for point in prompt.breakpoints]
        texts = [saved.ours.detokenize(prompt.token_ids[:end], skip_special_tokens=False) for end in ends]
        assert len(texts) == 2 and "system" in texts[0] and "lazy" not in texts[0]
        assert "lazy dog" in texts[1] and "brown" not in texts[1] and ends[0] < ends[1]


def test_chat_with_tools_uses_the_tool_template(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    calls = "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}"
    with_tools = "{{ tools | tojson }}" + plain.replace("{% endfor %}", calls + "{% endfor %}")
    templates: Any = {"default": plain, "tool_use": with_tools, "rag": "{{ documents }}"}
    ours, theirs = saved_in(tmp_path, "byte-level BPE", "begin", template=templates)
    reader = reader_of(ours)
    for tools, messages in (([], CHATS["one turn"]), ([TOOL], CHATS["calls"]), ([TOOL], CHATS["one turn"])):
        expected = theirs.apply_chat_template(messages, tools=tools or None, return_dict=False)
        assert list(reader.read_chat(TENANT, Conversation(messages, tools)).token_ids) == expected
    with pytest.raises(ApiError, match="does not support tool calls"):
        reader.read_chat(TENANT, Conversation(CHATS["calls"]))


@pytest.mark.parametrize("kind", THREE_KINDS)
def test_every_route_accepts_add_special_tokens(kind: str, tmp_path: Path) -> None:
    ours, theirs = saved_in(tmp_path, kind, "both")
    text, messages = "The lazy dog", CHATS["one turn"]
    rendered = ours.render_chat(messages)
    wanted = [
        ("/v1/completions", {"prompt": text}, text, True),
        ("/v1/chat/completions", {"messages": messages}, rendered, False),
    ]
    with front_end(tokenizer=ours) as server, server.client() as http:
        for path, body, of_text, default in wanted:
            for add in (None, True, False):
                expected = theirs(of_text, add_special_tokens=default if add is None else add)["input_ids"]
                fields = {} if add is None else {"add_special_tokens": add}
                found = http.post("/tokenize", json=body | fields).json()["tokens"]
                assert found == expected, (path, add)
                count = len(server.backend.asked)
                with server.connection(request_bytes(body | fields | {"stream": True}, path)):
                    wait_until(lambda count=count: len(server.backend.asked) > count)
                    assert list(server.backend.asked[-1].prompt) == expected, (path, add)
