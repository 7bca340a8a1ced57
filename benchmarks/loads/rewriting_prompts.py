"""Prompts for an assistant that rewrites a file with one name changed."""

from pathlib import Path

import megatron_mamba_cache.command_line
from megatron_mamba_cache.command_line.prompts import PromptLine

_FILE = Path(megatron_mamba_cache.command_line.__file__).with_name("shared_file.py.txt")
_CHANGES = (("LogEntry", "Entry"), ("worker", "machine"), ("level", "severity"), ("lineno", "number"))
_STARTS = ("class JobLog:\n", "def parse_line(", "    def __init__(self, time")


def rewriting_lines() -> list[PromptLine]:
    """Return one prompt for each changed name and starting point: the file, then the changed file up to that point.

    The expected reply is the rest of the changed file, which repeats the file except for the name.
    """
    file = _FILE.read_text(encoding="utf-8")
    lines: list[PromptLine] = []
    for old, new in _CHANGES:
        changed = file.replace(old, new)
        for start in _STARTS:
            end = changed.index(start.replace(old, new)) + len(start.replace(old, new))
            prompt = f"# file: joblog.py\n{file}\n\n# file: joblog.py\n{changed[:end]}"
            lines.append(PromptLine(len(lines), prompt.removesuffix("\n")))
    return lines
