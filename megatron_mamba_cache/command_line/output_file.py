"""The JSON file of results."""

import json
from pathlib import Path

from .results import RunResult
from .usage_error import UsageError


def check_writable(path: str) -> None:
    """Raise `UsageError` unless a file can be written there; leave an existing file unchanged."""
    target = Path(path)
    try:
        existed = target.exists()
        with target.open("ab"):
            pass
        if not existed:
            target.unlink()
    except OSError as error:
        raise UsageError(f"--output-path {path}: {error.strerror or error}") from error


def write_output(path: str, result: RunResult, **more_summary: object) -> None:
    """Write records and summary as JSON, `more_summary` added to the summary.

    Raises:
        UsageError: If the file cannot be written.
    """
    document = {
        "requests": [record.as_dict() for record in result.records],
        "summary": {**result.summary(), **more_summary},
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output-path {path}: {error.strerror or error}") from error
