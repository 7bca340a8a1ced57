"""Read prompts files, which have one JSON object per line."""

import json
from dataclasses import dataclass
from pathlib import Path

from .flag_sources import UsageError

_KEYS = {"prompt", "prompt_tokens", "num_tokens_to_generate", "session"}


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A generation request, read from one line of a prompts file."""

    request_id: int  # line number, starting at 0
    prompt: str | tuple[int, ...]
    num_tokens: int | None = None  # maximum number of tokens to generate; None for the flag's value
    session: str | int | None = None  # the lines of a session run in sequence; None for no session


def read_prompts(path: str) -> list[PromptLine]:
    """Read all lines of a prompts file, ignoring blank lines at its end.

    Raises:
        UsageError: If the file or a line is invalid; the message names the file and the line, counted from 1.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = text.rstrip().split("\n")  # splitlines() would also split at separators inside JSON strings
    if lines == [""]:
        raise UsageError(f"--prompts {path} is empty; add at least one line")
    parsed = []
    for request_id, line in enumerate(lines):
        try:
            parsed.append(parse_line(request_id, line))
        except UsageError as error:
            raise UsageError(f"--prompts {path}, line {request_id + 1} (request_id {request_id}): {error}") from error
    return parsed


def parse_line(request_id: int, line: str) -> PromptLine:
    """Parse one line of a prompts file; raise `UsageError` that says what is invalid."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"each line must be a JSON object, found {_kind(found)}")
    unknown = sorted(set(found) - _KEYS)
    if unknown:
        raise UsageError(f"unknown key {unknown[0]!r}; known keys are {', '.join(sorted(_KEYS))}")
    return PromptLine(
        request_id=request_id, prompt=_prompt_of(found), num_tokens=_num_tokens_of(found), session=_session_of(found)
    )


def _prompt_of(found: dict[str, object]) -> str | tuple[int, ...]:
    if ("prompt" in found) == ("prompt_tokens" in found):
        both = "both" if "prompt" in found else "neither"
        raise UsageError(f'exactly one of "prompt" and "prompt_tokens" must be given, found {both}')
    if "prompt_tokens" in found:
        tokens = found["prompt_tokens"]
        if not isinstance(tokens, list):
            raise UsageError(f'"prompt_tokens" must be a list of integers, found {_kind(tokens)}')
        for index, token in enumerate(tokens):
            if type(token) is not int:  # isinstance would accept a bool
                raise UsageError(f'"prompt_tokens"[{index}] must be an integer, found {_kind(token)}')
        return tuple(tokens)
    prompt = found["prompt"]
    if not isinstance(prompt, str):
        raise UsageError(f'"prompt" must be a string, found {_kind(prompt)}')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f'"prompt" contains an unpaired surrogate at character {error.start}') from error
    return prompt


def _num_tokens_of(found: dict[str, object]) -> int | None:
    if "num_tokens_to_generate" not in found:
        return None
    number = found["num_tokens_to_generate"]
    if type(number) is not int:
        raise UsageError(f'"num_tokens_to_generate" must be an integer, found {_kind(number)}')
    if number < 1:
        raise UsageError(f'"num_tokens_to_generate" is {number}; it must be at least 1')
    return number


def _session_of(found: dict[str, object]) -> str | int | None:
    if "session" not in found:
        return None
    session = found["session"]
    if type(session) is not int and not isinstance(session, str):
        raise UsageError(f'"session" must be a string or an integer, found {_kind(session)}')
    return session


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"the number {value}")
