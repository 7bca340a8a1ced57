"""Processes of blocks in addition to shells: a Python that executes blocks, and a server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .blocks import Block

_START_S = 300
_STOP_S = 60
_READY = "serving "


class BlockError(Exception):
    """Raised if a block fails or its output differs from the page."""


class PythonWorker:
    """One process for all Python blocks of a run: importing torch and megatron takes longer than most blocks."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("python_worker.py"))],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, block: Block, text: str) -> str:
        """Execute a block and return its output.

        Raises:
            BlockError: If it raises.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"name": str(block), "text": text, "continues": "continues" in block.values}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BlockError(f"{block}: Python ended with status {self._process.wait()}")
        reply = json.loads(line)
        if reply["error"]:
            raise BlockError(f"{block}: {reply['error']}")
        printed: str = reply["printed"]
        return printed

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class ServerProcess:
    """A server that a shell block starts."""

    def __init__(self, block: Block, text: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.text = text
        self._block = block
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._printed: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def printed(self) -> str:
        """Return the output so far."""
        return "".join(self._printed)

    def wait_until_it_serves(self) -> None:
        """Wait until the server prints the line with its address.

        Raises:
            BlockError: If it ends before that, or takes too long.
        """
        end = time.monotonic() + _START_S
        while not any(line.startswith(_READY) for line in self._printed):
            if time.monotonic() > end or not self._reader.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
                raise BlockError(f"{self._block} does not serve:\n{self.printed()}\n{self._stderr()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Send SIGTERM to its processes.

        Raises:
            BlockError: If it does not end with status 0 within a minute; it is killed then.
        """
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            status = self._process.wait()
        self._reader.join(_STOP_S)
        if status:
            raise BlockError(f"{self._block} ended with status {status}:\n{self.printed()}\n{self._stderr()}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.append(line)

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read()
