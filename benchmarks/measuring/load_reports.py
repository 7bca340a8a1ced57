"""Parts that all reports on recorded loads share: the command, the output file and the JSON document."""

import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(script: str, arguments: Sequence[str]) -> str:
    """Return the command line of a script, with file names instead of paths and without output flags.

    Args:
        script: Path of the script, relative to the root of the repository.
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
    """Append a table to a file; a new file begins with the method and the meaning of the columns.

    Args:
        description: Docstring of the script; the part after its first line and its command explains the columns.
    """
    meaning = "\n\n".join(description.split("\n\n")[2:])
    heading = "" if path.exists() else f"# {title}\n\n{meaning}"
    with path.open("a") as file:
        file.write(f"{heading}\n{text}")


def document(figures: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the measurements and the Python version as JSON types."""
    return {"python": platform.python_version(), "figures": list(figures)}


def _without_folders(word: str) -> str:
    name = Path(word).name
    if ".jsonl" in name:
        return f"traces/{name}"
    return f"benchmarks/results/{name}" if name.endswith(".json") else word
