"""The common parts of reports on recorded loads: their command, their output file, and JSON."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(script: str, arguments: Sequence[str]) -> str:
    """Return the command without the folders of files, and without output flags.

    Args:
        script: Its path from the root of the repository.
    """
    words, skipped = [], False
    for word in arguments:
        if word in ("--append", "--processes"):
            skipped = True
        elif skipped:
            skipped = False
        elif word != "--json":
            words.append(_without_folders(word))
    return f"PYTHONPATH=. python {script} {shlex.join(words)}"


def append(text: str, path: Path, title: str, description: str) -> None:
    """Append a table to a file, which begins with the method and the meaning of the columns.

    Args:
        description: The docstring of the script: after the line of its name and its command, the meaning.
    """
    meaning = "\n\n".join(description.split("\n\n")[2:])
    heading = "" if path.exists() else f"# {title}\n\n{meaning}"
    with path.open("a") as file:
        file.write(f"{heading}\n{text}")


def document(figures: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the figures with the Python version of the run."""
    return {"python": platform.python_version(), "figures": list(figures)}


def _without_folders(word: str) -> str:
    name = Path(word).name
    if ".jsonl" in name:
        return f"traces/{name}"
    return f"benchmarks/results/{name}" if name.endswith(".json") else word
