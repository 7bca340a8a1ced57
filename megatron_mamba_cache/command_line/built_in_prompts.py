"""Built-in prompts: questions about a document, and sessions with an editing assistant."""

from pathlib import Path

from .prompts import PromptLine

_DOCUMENT = """\
You answer questions about the following notice. Quote it where you can, and say so if it has no answer.

Harbour notice 14. The swing bridge at Mill Quay opens on request between 06:00 and 21:30. Boats shorter than nine
metres pass under the closed span at any state of the tide; longer ones call the keeper on channel 12 at least twenty
minutes ahead. No boat passes while the red lamp on the east pier is lit, whatever the keeper has said before.
Visitors berth on the north pontoon and pay at the office within an hour of arriving; the first night is free for
crews that bring news of a light or buoy out of order. Fresh water is laid on at every second berth. Nets are mended on
the slip only, and never across the rails of the lifeboat. When the bell rings three times, everybody who can hold a
rope comes to the slip.
"""
_SESSIONS = {
    "skipper": (
        "\nQuestion: May a boat of eleven metres pass at noon?\n",
        "Answer: Yes, if it calls the keeper on channel 12 twenty minutes ahead.\n"
        "Question: And if the red lamp is lit?\n",
        "Answer: Then no boat passes.\nQuestion: Where does it wait?\n",
    ),
    "visitor": (
        "\nQuestion: Where do I berth for the night, and what does it cost?\n",
        "Answer: On the north pontoon; the notice names no price.\nQuestion: How do I get the first night free?\n",
        "Answer: Bring news of a light or buoy out of order.\nQuestion: Is there water at every berth?\n",
    ),
    "fisher": (
        "\nQuestion: May I mend my nets on the pontoon?\n",
        "Answer: No, on the slip only, clear of the rails of the lifeboat.\n"
        "Question: What do three strokes of the bell mean?\n",
    ),
}
_SINGLE_QUESTIONS = (
    "\nQuestion: Which channel does the keeper listen to?\n",
    "\nQuestion: When does the bridge open in the morning?\n",
    "\nQuestion: Is there a shop on the quay?\n",
    "\nQuestion: When does the bridge open in the morning?\n",
)


_SHARED_NAME = "joblog.py"
_SHARED_FILE = Path(__file__).with_name("shared_file.py.txt")

_EDITING_SESSIONS = {
    "test_joblog.py": (
        '''\
"""Tests for joblog."""

import io
import unittest
from datetime import datetime, timedelta

from joblog import Error, JobLog, LogEntry, parse_line, read_log


class LogEntryTest(unittest.TestCase):

    def setUp(self):
        self.entry = LogEntry(datetime(2024, 5, 1, 10, 20, 30), "INFO",
                              "worker-3", "job 17 started")

    def test_attributes(self):
''',
        """\
        self.assertEqual(self.entry.level, "INFO")
        self.assertEqual(self.entry.worker, "worker-3")
        self.assertEqual(self.entry.message, "job 17 started")

    def test_unknown_level(self):
""",
        """\
        with self.assertRaises(ValueError):
            LogEntry(self.entry.time, "LOUD", "worker-3", "")

    def test_job(self):
        self.assertEqual(self.entry.job, 17)

    def test_is_at_least(self):
""",
        """\
        self.assertTrue(self.entry.is_at_least("DEBUG"))
        self.assertTrue(self.entry.is_at_least("INFO"))
        self.assertFalse(self.entry.is_at_least("ERROR"))


class ReadLogTest(unittest.TestCase):

    def test_comments_are_ignored(self):
""",
    ),
    "jobreport.py": (
        '''\
"""Write a report about the jobs of a log."""

import sys
from collections import defaultdict

from joblog import LEVELS, read_log


class JobReport:
    """What a log says about each job."""

    def __init__(self, log):
        self.log = log
        self.jobs = defaultdict(list)
        for entry in log:
''',
        """\
            if entry.job is not None:
                self.jobs[entry.job].append(entry)

    def __len__(self):
        return len(self.jobs)

    def __iter__(self):
""",
        '''\
        return iter(sorted(self.jobs))

    def failed(self):
        """Return the numbers of all jobs that have an error."""
        result = []
        for job, entries in self.jobs.items():
''',
        '''\
            if any(entry.level == "ERROR" for entry in entries):
                result.append(job)
        return sorted(result)

    def write(self, file=None):
        """Write a line for each job, by default to the standard output."""
        if file is None:
''',
    ),
    "jobwatch.py": (
        '''\
"""Follow a growing log and call a function for each new entry."""

import os
import time

from joblog import Error, parse_line


class LogWatcher:
    """Reads what has been added to a log since it was last asked.

    Lines that are not log entries are skipped and counted.
    """

    def __init__(self, filename, interval=1.0):
        self.filename = filename
''',
        """\
        self.interval = interval
        self.skipped = 0
        self._position = 0

    def __repr__(self):
""",
        '''\
        return "<%s %r>" % (self.__class__.__name__, self.filename)

    def size(self):
        """Return the size of the file in bytes, or 0 if it does not exist."""
        try:
''',
        '''\
            return os.path.getsize(self.filename)
        except FileNotFoundError:
            return 0

    def poll(self):
        """Return a list of the new entries."""
        entries = []
        if self.size() < self._position:
            self._position = 0
        with open(self.filename, encoding="utf-8") as file:
''',
    ),
}


def built_in_lines() -> list[PromptLine]:
    """Return the document prompts: each turn of the sessions, including all earlier turns, and single questions."""
    turns: list[tuple[str, str | None]] = []
    for session, questions in _SESSIONS.items():
        prompt = _DOCUMENT
        for question in questions:
            prompt += question
            turns.append((prompt, session))
    turns += [(_DOCUMENT + question, None) for question in _SINGLE_QUESTIONS]
    return [PromptLine(number, prompt, session=session) for number, (prompt, session) in enumerate(turns)]


def editing_lines() -> list[PromptLine]:
    """Return the prompts of the editing sessions, which all start with the same long file.

    A prompt does not include its last line break, because tokenizers merge it with the indentation of the next line.
    """
    shared = f"# file: {_SHARED_NAME}\n{_SHARED_FILE.read_text(encoding='utf-8')}"
    lines: list[PromptLine] = []
    for name, parts in _EDITING_SESSIONS.items():
        prompt = f"{shared}\n\n# file: {name}\n"
        for part in parts:
            prompt += part
            lines.append(PromptLine(len(lines), prompt.removesuffix("\n"), session=name))
    return lines
