"""Prompts for a run without a file: sessions of an editing assistant that reads one file and writes others.

Each turn's prompt holds the file that all sessions share, then the edited file up to where the reply belongs.
"""

from pathlib import Path

from .prompts import PromptLine

_SHARED_NAME = "joblog.py"
_SHARED_FILE = Path(__file__).with_name("shared_file.py.txt")

_SESSIONS = {
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


def editing_lines() -> list[PromptLine]:
    """Return the turns of all sessions, each prompt complete with the turns before it.

    A prompt ends without its last line break: tokenizers join it with the indentation that the reply begins with.
    """
    shared = f"# file: {_SHARED_NAME}\n{_SHARED_FILE.read_text(encoding='utf-8')}"
    lines: list[PromptLine] = []
    for name, parts in _SESSIONS.items():
        prompt = f"{shared}\n\n# file: {name}\n"
        for part in parts:
            prompt += part
            lines.append(PromptLine(len(lines), prompt.removesuffix("\n"), session=name))
    return lines
