"""Reading a file of prompts."""

import json
from codeop import compile_command
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.command_line.built_in_prompts import built_in_lines, editing_lines
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.prompts import PromptLine, parse_line, read_prompts

TEXT = st.text(st.characters(codec="utf-8"))
PROMPTS = st.fixed_dictionaries({"prompt": TEXT}) | st.fixed_dictionaries({"prompt_tokens": st.lists(st.integers())})
OPTIONS = st.fixed_dictionaries(
    {}, optional={"num_tokens_to_generate": st.integers(min_value=1), "session": st.integers() | TEXT}
)
LINES = st.lists(st.tuples(PROMPTS, OPTIONS).map(lambda parts: parts[0] | parts[1]), min_size=1, max_size=5)

BAD_LINES = {
    "not_json": ("{", "not JSON"),
    "empty": ("", "not JSON"),
    "too_deep": ("[" * 100_000, "not JSON"),
    "no_object": ('["prompt"]', "found a list"),
    "neither_prompt": ('{"session": 1}', "found neither"),
    "both_prompts": ('{"prompt": "a", "prompt_tokens": [1]}', "found both"),
    "prompt_is_a_number": ('{"prompt": 1}', '"prompt" must be a string, found the number 1'),
    "prompt_is_null": ('{"prompt": null}', "found null"),
    "prompt_is_no_text": ('{"prompt": "\\ud800"}', "surrogate"),
    "tokens_are_text": ('{"prompt_tokens": "1 2"}', "found a string"),
    "token_is_a_float": ('{"prompt_tokens": [1, 2.0]}', '"prompt_tokens"[1] must be an integer, found the number 2.0'),
    "token_is_a_boolean": ('{"prompt_tokens": [true]}', "found a boolean"),
    "number_is_zero": ('{"prompt": "a", "num_tokens_to_generate": 0}', '"num_tokens_to_generate" is 0'),
    "number_is_a_boolean": ('{"prompt": "a", "num_tokens_to_generate": true}', "found a boolean"),
    "number_is_a_float": ('{"prompt": "a", "num_tokens_to_generate": 1.5}', "the number 1.5"),
    "session_is_a_boolean": ('{"prompt": "a", "session": false}', '"session" must be'),
    "session_is_a_list": ('{"prompt": "a", "session": [1]}', "found a list"),
    "unknown_key": ('{"prompt": "a", "num_token": 3}', "unknown key 'num_token'"),
}


@given(lines=LINES)
def test_written_prompts_are_read_back(
    lines: list[dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("prompts") / "lines.jsonl"
    ascii_only = len(lines) % 2 == 0  # both ways of writing other characters
    file.write_bytes("\n".join(json.dumps(line, ensure_ascii=ascii_only) for line in lines).encode())
    for number, (line, read) in enumerate(zip(lines, read_prompts(str(file)), strict=True)):
        prompt = line["prompt"] if "prompt" in line else tuple(line["prompt_tokens"])
        assert read == PromptLine(number, prompt, line.get("num_tokens_to_generate"), line.get("session"))


@pytest.mark.parametrize("name", BAD_LINES)
def test_error_for_an_invalid_prompt_line_gives_its_number(name: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[name]
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + '\n{"prompt": "good"}\n')
    with pytest.raises(UsageError) as raised:
        read_prompts(str(file))
    assert f"{file}, line 2 (request_id 1): " in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b"\n \n", "empty"), (b"\xff\n", "not UTF-8"), (None, "No such file")]
)
def test_error_names_an_invalid_prompts_file(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_prompts(str(file))
    assert str(file) in str(raised.value)


def test_byte_order_mark_carriage_returns_and_trailing_blank_lines_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n\r\n\n')
    assert [line.prompt for line in read_prompts(str(file))] == ["a", "b"]


def test_integer_and_string_session_ids_are_distinct() -> None:
    number, text = (parse_line(0, json.dumps({"prompt": "", "session": session})) for session in (1, "1"))
    assert number.session != text.session


def test_built_in_turns_extend_earlier_turns() -> None:
    latest: dict[str | int, str] = {}
    for line in built_in_lines():
        if line.session is not None:
            assert line.prompt.startswith(latest.get(line.session, "You answer")) and line.prompt not in latest.values()
            latest[line.session] = line.prompt
    assert len(latest) == 3


def test_editing_turns_extend_earlier_turns_and_share_a_long_file() -> None:
    latest: dict[str | int, list[str]] = {}
    for line in editing_lines():
        assert line.session is not None and isinstance(line.prompt, str)
        turns = latest.setdefault(line.session, [])
        assert not turns or (line.prompt.startswith(turns[-1]) and line.prompt != turns[-1])
        turns.append(line.prompt)
    assert len(latest) >= 3 and all(len(turns) >= 4 for turns in latest.values())
    (shared,) = {turns[0].split("\n\n# file: ")[0] for turns in latest.values()}
    assert shared.startswith("# file: ") and shared.count("\n") > 120


def test_every_editing_prompt_is_a_prefix_of_valid_python() -> None:
    for line in editing_lines():
        shared, edited = str(line.prompt).split("\n\n# file: ")
        compile(shared, "shared", "exec")
        compile_command(f"# file: {edited}", symbol="exec")  # an error only where nothing could follow
