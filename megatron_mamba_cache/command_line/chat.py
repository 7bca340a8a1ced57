"""The chat command: hold a conversation with a model in the terminal."""

import os
import re
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from types import FrameType
from typing import NoReturn

from .chat_client import DEFAULT_URL, ChatClient, ChatError, Message, Turn
from .flag_sources import UsageError, variable_of

_HELP = r"/clear forgets the conversation, /quit ends; \n is a line break; Ctrl-C ends a reply"
_SERVING = re.compile(r"^serving .* on (http://\S+)$")
_END_S = 30.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP is sent when the terminal is closed
EXIT_FAILED = 1


def chat(arguments: Namespace) -> int:
    """Run the chat command until its input ends, and return the exit status; raise `UsageError` for an invalid flag."""
    starts_own = arguments.url is None and bool(arguments.hf_model or arguments.load)
    if arguments.url is not None and arguments.load is not None:
        raise UsageError("--load cannot be used with --url, whose server has its own model; leave out one of them")
    server = own_server(arguments) if starts_own else nullcontext(arguments.url or DEFAULT_URL)
    try:
        with server as url:
            client = ChatClient(url, arguments.api_key)
            name = None if starts_own else arguments.hf_model
            return Chat(client, name or client.first_model(), arguments).run()
    except ChatError as error:
        advice = "" if arguments.url or starts_own else "; start a server with mamba-cache serve, or give --model"
        print(f"{error}{advice}", file=sys.stderr)
        return EXIT_FAILED


class Chat:
    """A conversation in the terminal with one model on a server."""

    def __init__(self, client: ChatClient, model: str, arguments: Namespace) -> None:
        self._client = client
        self._model = model
        given = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}
        self._settings = {name: value for name, value in given.items() if value is not None}
        system = arguments.system
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._given_turns: list[str] | None = arguments.say or None

    def run(self) -> int:
        """Exchange turns until the input ends. If a turn fails, drop it, or raise `ChatError` if it came from --say."""
        if self._given_turns is None:
            print(f"{self._model} at {self._client.url}: {_HELP}")
        for line in self._typed() if self._given_turns is None else self._given_turns:
            if line == "/quit":
                break
            if line == "/clear":
                self._messages = list(self._start)
            elif line == "/help":
                print(_HELP)
            elif line:
                self._turn(line.replace("\\n", "\n"))
        return 0

    def _turn(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        turn = Turn()
        try:
            with closing(self._client.stream(turn, self._model, self._messages, self._settings)) as parts:
                for part in parts:
                    print(part, end="", flush=True)
        except KeyboardInterrupt:
            turn.finish_reason = "interrupted"
        except ChatError as error:
            self._messages.pop()
            if self._given_turns is not None:
                raise
            print(f"\n{error}", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": turn.text})
        print(f"\n{turn}", flush=True)

    def _typed(self) -> Iterator[str]:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives `input` history and cursor keys
        while True:
            try:
                yield input("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return


@contextmanager
def own_server(arguments: Namespace) -> Iterator[str]:
    """Context manager that runs a server for the given model on a free local port and yields the server's URL.

    While the server runs, SIGTERM and SIGHUP raise `SystemExit`, so that the server is stopped as well.

    Raises:
        UsageError: If the server does not start; the server itself prints the reason.
    """
    command = [sys.executable, "-m", f"{__package__.split('.')[0]}", "serve", *_flags(arguments)]
    # The --config file is for the chat command, so the server must not read it.
    environment = {name: value for name, value in os.environ.items() if name != variable_of("--config")}
    with _signals_raise():
        # In a separate process group, Ctrl-C interrupts the reply but does not stop the server.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = _SERVING.match(line.strip())
                if found is not None:
                    yield found[1]
                    return
                print(line, end="", flush=True)
            raise UsageError(
                f"the server for --model exited with status {process.wait()} before it was ready; see its output above"
            )
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
    for name in ("hf_model", "load", "dtype", "api_key"):
        value = getattr(arguments, name)
        flags += [] if value is None else [f"--{name.replace('_', '-')}", value]
    return flags
