"""aider with --message: edits to a file in two formats, streamed and not, and an error that aider reports."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import Served, check, replies, thought

served = Served.of_arguments()
BEFORE = "def area(width, height):\n    return width + height\n"
AFTER = BEFORE.replace("+", "*")
WHOLE = f"area.py\n```\n{AFTER}```\n"
BLOCK = f"area.py\n```python\n<<<<<<< SEARCH\n{BEFORE}=======\n{AFTER}>>>>>>> REPLACE\n```\n"
FLAGS = "--yes-always --no-git --no-check-update --no-show-model-warnings --no-pretty --analytics-disable"


def aider(
    folder: str, message: str, *flags: str, model: str = f"openai/{served.model}"
) -> "subprocess.CompletedProcess[str]":
    """Run aider with one message; return the completed process."""
    keys = {"OPENAI_API_KEY": served.key, "OPENAI_API_BASE": f"{served.url}/v1", "HOME": folder}
    words = [sys.executable, "-m", "aider", "--model", model, *FLAGS.split(), *flags, "--message", message, "area.py"]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, env=os.environ | keys, stdin=subprocess.DEVNULL
    )


for edit_format, reply in (("whole", WHOLE), ("diff", BLOCK)):
    for flag in ("--stream", "--no-stream"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "area.py")
            file.write_text(BEFORE)
            script = replies(thought("A product.") + "I mend it.\n\n" + reply)
            done = aider(folder, script, "--edit-format", edit_format, flag)
            print(done.stdout[-1500:] if done.returncode else "")
            check(f"aider ends well ({edit_format}, {flag})", done.returncode, 0)
            check(f"the file is edited ({edit_format}, {flag})", file.read_text(), AFTER)

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "area.py").write_text(BEFORE)
    done = aider(folder, "Hello.", "--edit-format", "whole", model="openai/absent")
    check("a model that is not there is named", "absent" in done.stdout and "NotFound" in done.stdout)
