"""Recorder of served requests for the `plan` command; stores times, lengths and prompt hashes, but no text."""

import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..policy.block_hashing import TokenIds
from .job import Job

logger = logging.getLogger(__name__)

_RUN_TOKENS = 64
_MOST_SESSIONS = 2**16
_HASH_MASK = 2**53 - 1  # JSON readers that use float64 represent integers exactly up to this value
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Finished engine request to record."""

    arrived: float  # in seconds since the epoch
    tenant: str  # name of the tenant; tenants do not share prefixes
    prompt: TokenIds
    reply_len: int


class LoadRecord:
    """Interface for recording served requests; this base class ignores them."""

    def start(self) -> None:
        """Start recording."""

    def note(self, job: Job) -> None:
        """Queue a finished job's requests for recording; do not wait for I/O."""

    def close(self) -> None:
        """Write the requests that are still queued."""


class LoadFile(LoadRecord):
    """Recorder that appends one line per request to a file, in a separate thread.

    After a file system error, it logs a warning and stops recording. A line that is only partly written is removed.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        self._path = path
        self._lines = LoadLines(_RUN_TOKENS if block_size % _RUN_TOKENS == 0 else block_size)
        self._queue: queue.SimpleQueue[ServedRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="load record", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, job: Job) -> None:
        """Record each choice as a separate request."""
        arrived = time.time() - (time.monotonic() - job.times.arrived)
        for choice in job.choices:
            request = ServedRequest(arrived, job.tenant.name, choice.spec.prompt, len(choice.reply.token_ids))
            self._queue.put(request)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            with self._path.open("ab+", buffering=0) as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    file.write(b"\n")
                for request in iter(self._queue.get, None):
                    _append(file, self._lines.line(request))
        except OSError as error:
            logger.warning("--record-load %s: cannot write (%s); no more requests are recorded", self._path, error)


class LoadLines:
    """Encodes requests as lines of a load record, with one hash for every `run_tokens` prompt tokens.

    Each hash also covers all earlier tokens, so equal hashes mean equal prefixes. The hashes have a random salt that is
    not stored, so the file cannot be used to test if a guessed prompt was sent.
    """

    def __init__(self, run_tokens: int) -> None:
        self._run_tokens = run_tokens
        self._salt = os.urandom(16)
        self._sessions: OrderedDict[int, int] = OrderedDict()  # session ids, by hash of the latest prompt's last run

    def line(self, request: ServedRequest) -> bytes:
        """Return the line for a request, as JSON bytes that end with a newline."""
        hashes = list(self._hashes(request))
        fields = {
            "timestamp": round(request.arrived * 1000),
            "input_length": len(request.prompt),
            "output_length": request.reply_len,
            "hash_ids": hashes,
            "block_size": self._run_tokens,
            "session": self._session_of(hashes, len(request.prompt) // self._run_tokens),
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    def _hashes(self, request: ServedRequest) -> Iterator[int]:
        """Yield one hash for every `run_tokens` prompt tokens and for the rest; each also covers all earlier tokens."""
        tokens = np.asarray(request.prompt, dtype=np.int64)
        digest = hashlib.blake2b(request.tenant.encode(), key=self._salt).digest()
        for start in range(0, len(tokens), self._run_tokens):
            digest = hashlib.blake2b(digest + tokens[start : start + self._run_tokens].tobytes()).digest()
            yield int.from_bytes(digest[:8], "little") & _HASH_MASK

    def _session_of(self, hashes: list[int], num_complete: int) -> int:
        """Return the id of the session whose latest prompt is a prefix of this prompt, or a new id."""
        complete = hashes[:num_complete]
        known = next((run for run in reversed(complete) if run in self._sessions), None)
        session = hashes[-1] if known is None else self._sessions.pop(known)
        if complete:
            self._sessions[complete[-1]] = session
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return session


def _append(file: BinaryIO, line: bytes) -> None:
    """Append a line. If the disk is full, remove the partially written line and raise `OSError`."""
    end = file.seek(0, os.SEEK_END)
    if file.write(line) != len(line):
        file.truncate(end)
        raise OSError("the disk is full")
