"""Replies as text over several lines, each below the end of its prompt."""

from collections.abc import Iterator, Sequence

from .prompts import PromptLine
from .results import RequestRecord

_MAX_REPLIES = 6
_PROMPT_LINES = 3
_REPLY_LINES = 12
_WIDTH = 110


def reply_lines(lines: Sequence[PromptLine], records: Sequence[RequestRecord], prompts: Sequence[str]) -> Iterator[str]:
    """Yield the end of each prompt, marked "|", and its reply, marked ">"; of a session only those of the last turn.

    All characters are printable ASCII. A prompt that ends inside a line is continued on it.

    Args:
        records, prompts: One for each line, in the same order; prompts are text.
    """
    last_turns = {line.session: index for index, line in enumerate(lines)}
    is_shown = [line.session is None or last_turns[line.session] == index for index, line in enumerate(lines)]
    shown = [index for index, shows in enumerate(is_shown) if shows][:_MAX_REPLIES]
    for index in shown:
        record = records[index]
        yield f"request {record.request_id}" + ("" if record.error is None else f" failed: {record.error}")
        if record.error is None:
            yield from _continued(prompts[index], record.text)
    if len(shown) < len(lines):
        yield f"... and {len(lines) - len(shown)} more; --output-path writes them all"


def _continued(prompt: str, reply: str) -> Iterator[str]:
    *before, unfinished = prompt.split("\n")
    first, *rest = (unfinished + reply).split("\n")
    if first == unfinished and rest:  # the reply begins with a line of its own
        before.append(first)
    else:
        rest.insert(0, first)
    yield from (f"  | {_printable(line)}" for line in before[-_PROMPT_LINES:])
    yield from (f"  > {_printable(line)}" for line in rest[:_REPLY_LINES])
    if len(rest) > _REPLY_LINES:
        yield f"  > ... {len(rest) - _REPLY_LINES} lines more"


def _printable(line: str) -> str:
    """Escape whatever could move a terminal's cursor or is not ASCII, and cut what is too long."""
    shown = "".join(map(_printable_character, line.expandtabs(4)))
    return shown if len(shown) <= _WIDTH else f"{shown[:_WIDTH]}..."


def _printable_character(character: str) -> str:
    return character if character.isascii() and character.isprintable() else ascii(character)[1:-1]
