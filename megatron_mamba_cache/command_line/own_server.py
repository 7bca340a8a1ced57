"""A server for one chat, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from .flag_sources import variable_of
from .usage_error import UsageError

_SERVING = re.compile(r"^serving .* on (http://\S+)$")
_END_S = 30.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # the second is that of a closed terminal


@contextmanager
def own_server(arguments: Namespace) -> Iterator[str]:
    """Serve the model of the flags on a free port of this machine; yield the URL, and stop the server afterwards.

    A signal that would end this process raises `SystemExit` until then.

    Raises:
        UsageError: If it does not start; its own message has been printed then.
    """
    with _signals_raise(), _server(arguments) as url:
        yield url


@contextmanager
def _server(arguments: Namespace) -> Iterator[str]:
    command = [sys.executable, "-m", f"{__package__.split('.')[0]}", "serve", *_flags(arguments)]
    # Its flags are those of the command line; the file of --config is about the chat.
    environment = {name: value for name, value in os.environ.items() if name != variable_of("--config")}
    # In a group of its own, a Ctrl-C of the terminal ends a reply and not the server.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = _SERVING.match(line.strip())
            if found is not None:
                yield found[1]
                return
            print(line, end="", flush=True)
        raise UsageError(f"the server for --model ended with status {process.wait()} before it was ready")
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def _signals_raise() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    ending = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _flags(arguments: Namespace) -> list[str]:
    flags = ["--host", "127.0.0.1", "--port", "0", "--access-log", "off", "--log-level", arguments.log_level]
    flags += ["--device", arguments.device]
    for flag, value in (
        ("--hf-model", arguments.hf_model),
        ("--load", arguments.load),
        ("--dtype", arguments.dtype),
        ("--api-key", arguments.api_key),
    ):
        flags += [] if value is None else [flag, value]
    return flags
