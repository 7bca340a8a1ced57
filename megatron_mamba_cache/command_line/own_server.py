"""A server for one chat, in a process of its own."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from .flag_sources import variable_of
from .usage_error import UsageError

_SERVING = re.compile(r"^serving .* on (http://\S+)$")
_END_S = 30.0


@contextmanager
def own_server(arguments: Namespace) -> Iterator[str]:
    """Serve the model of the flags on a free port of this machine; yield the URL, and stop the server afterwards.

    Raises:
        UsageError: If it does not start; its own message has been printed then.
    """
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
