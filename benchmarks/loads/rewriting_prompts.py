"""Prompts of an editing assistant that must rewrite a file it has read, with a change."""

from pathlib import Path

import megatron_mamba_cache.command_line
from megatron_mamba_cache.command_line.prompts import PromptLine

_FILE = Path(megatron_mamba_cache.command_line.__file__).with_name("shared_file.py.txt")
_CHANGES = (("LogEntry", "Entry"), ("worker", "machine"), ("level", "severity"), ("lineno", "number"))
_STARTS = ("class JobLog:\n", "def parse_line(", "    def __init__(self, time")


def rewriting_lines() -> list[PromptLine]:
    """Return one line for each change and start: the file, then the changed file up to that start.

    The expected reply repeats the file's next lines, changed where the name occurs.
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
