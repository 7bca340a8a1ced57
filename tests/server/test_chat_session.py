"""The `chat` command, with a running server and with a server that it starts."""

import builtins
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.command_line.chat_client import ChatClient
from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from tests.command_line.command_runs import REPOSITORY, run_process
from tests.server.running_server import RED, RunningServer

_SHOWN = re.compile(r"\[(\d+) of (\d+) prompt tokens cached .* first token after \d+ ms, (\d+) tokens at")
FIRST = r"# file: bridge.py\n" + r"import time\n" * 40 + "class Bridge"


def chat(server: RunningServer, *flags: str) -> int:
    settings = ("--max-tokens", "20", "--seed", "1", "--temperature", "0.9")
    return main(["chat", "--url", server.url, "--api-key", RED, *settings, *flags])


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make `input` return these lines or raise these errors."""
    left: Iterator[Any] = iter(lines)

    def typed(_prompt: str) -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", typed)


def turns_in(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found)) for found in _SHOWN.findall(text)]


def test_chat_command_shows_the_cached_tokens_of_each_turn(server: RunningServer) -> None:
    turns = ("--say", FIRST, "--say", r"\n\n\nclass Quay", "--say", r"\n\n\ndef main")
    script = REPOSITORY / "examples" / "chat_session.py"
    flags = ("--url", f"{server.url}/v1", "--api-key", RED, "--max-tokens", 60, "--seed", 1)
    done = run_process(script, *flags, *turns, cwd=REPOSITORY)
    assert done.status == 0, done.stderr
    shown = turns_in(done.stdout)
    assert len(shown) == 3 and shown[0][0] == 0
    for (_, prompt, generated), (cached, _, _) in itertools.pairwise(shown):
        assert cached >= prompt + generated - 2 * 64


def test_clear_command_keeps_only_the_instructions(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "def a", "", "def b", "/clear", "def a", "/help", "/quit", "def never")
    assert chat(server, "--system", "import os") == 0
    shown = turns_in(capsys.readouterr().out)
    prompts = [prompt for _, prompt, _ in shown]
    assert len(shown) == 3 and prompts[0] == prompts[2] < prompts[1]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_chat_command_ends_at_the_end_of_input(
    end: type[BaseException],
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typing(monkeypatch, "def a", end)
    assert chat(server) == 0
    assert len(turns_in(capsys.readouterr().out)) == 1


def test_interrupted_reply_is_cancelled_but_stays_in_the_conversation(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = ChatClient.stream
    asked: list[list[str]] = []

    def interrupted(self: ChatClient, turn: Any, model: str, messages: Any, settings: Any) -> Iterator[str]:
        asked.append([message["content"] for message in messages])
        with closing(stream(self, turn, model, messages, settings)) as parts:
            for count, part in enumerate(parts):
                yield part
                if count == 3:
                    raise KeyboardInterrupt

    monkeypatch.setattr(ChatClient, "stream", interrupted)
    began = time.monotonic()
    assert chat(server, "--max-tokens", "3000", "--say", "def a", "--say", "def b") == 0
    assert capsys.readouterr().out.count("interrupted]") == 2
    assert [len(contents) for contents in asked] == [1, 3] and asked[1][1]
    server.assert_nothing_held()
    assert time.monotonic() - began < 15  # the complete replies would take a minute


def test_refused_turn_is_dropped_and_ends_the_chat_when_input_is_piped(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "x " * 9000, "def a", "/quit")
    assert chat(server) == 0
    captured = capsys.readouterr()
    assert f"{server.url} replied with status 400: " in captured.err and len(turns_in(captured.out)) == 1
    assert chat(server, "--say", "x " * 9000) == 1
    assert main(["chat", "--url", server.url, "--api-key", "wrong", "--say", "x"]) == 1
    assert f"{server.url} replied with status 401: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:9/v1"], "cannot connect to http://127.0.0.1:9: Connection refused\n"),
        ([], "cannot connect to http://127.0.0.1:5000: Connection refused; start a server with mamba-cache serve"),
    ],
)
def test_error_names_the_url_when_no_server_listens(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_mamba_cache.command_line.chat.DEFAULT_URL", "http://127.0.0.1:9")
    assert main(["chat", *flags]) == 1
    assert words.replace("5000", "9") in capsys.readouterr().err


@contextmanager
def foreign_server(body: bytes) -> Iterator[str]:
    """Yield the URL of a server that answers every request with the same bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"{}", b'{"data": ["a"]}', b"\xff"])
def test_error_names_the_url_of_a_server_with_another_api(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with foreign_server(body) as url:
        assert main(["chat", "--url", url, "--say", "a"]) == 1
        assert capsys.readouterr().err == f"{url} does not return a list of models in the format of OpenAI's API\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: {broken\n\n", "does not reply in the format of OpenAI's API"),
        (b"data: \xff\n\n", "does not reply in the format of OpenAI's API"),
        (b"data: 3\n\n", "does not reply in the format of OpenAI's API"),
        (b'data: {"error": "out of memory"}\n\n', "out of memory"),
    ],
)
def test_malformed_reply_from_the_server_gives_a_one_line_error(
    body: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with foreign_server(body) as url:
        assert main(["chat", "--url", url, "--model", "a", "--say", "a"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_chat_command_omits_token_counts_when_the_server_sends_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with foreign_server(b'data: {"choices": [{"delta": {"content": "b"}}]}\n\n') as url:
        assert main(["chat", "--url", url, "--model", "a", "--say", "a"]) == 0
    assert re.fullmatch(r"b\n\[first token after \d+ ms, cut off\]\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", "http://[x"), "--url is 'http://[x'; it must be http://HOST or http://HOST:PORT"),
        (("--url", "http://"), "--url is 'http://'; it must be"),
        (("--url", "http://a:99999"), "--url is 'http://a:99999'; it must be"),
        (("--api-key", "a\nb"), "--api-key must have only printable ASCII"),
        (("--api-key", "ключ"), "--api-key must have only printable ASCII"),
    ],
)
def test_chat_command_refuses_invalid_sampling_flags(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_chat_command_refuses_contradicting_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://a", "--load", "x"]) == 2
    assert main(["chat", "--url", "a:5000"]) == 2
    assert capsys.readouterr().err.count("--url") == 2


@pytest.mark.long
def test_chat_command_starts_and_stops_a_server_for_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBA_CACHE_CONFIG", "")
    flags = ("--model", SHIPPED_MODEL, "--device", "cpu", "--max-tokens", 3, "--say", "a")
    done = run_process("-m", "megatron_mamba_cache", "chat", *flags, cwd=REPOSITORY)
    assert done.status == 0, done.stderr
    assert len(turns_in(done.stdout)) == 1 and done.stderr == ""
    bad = run_process("-m", "megatron_mamba_cache", "chat", "--model", "no-folder", "--say", "a", cwd=REPOSITORY)
    assert bad.status == 2 and "--hf-model: no-folder is not a directory" in bad.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_signal_that_ends_the_chat_command_ends_its_server(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "megatron_mamba_cache", "chat", "--model", str(SHIPPED_MODEL), "--device", "cpu"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r" at (http://\S+): ", line) for line in process.stdout)))
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{found[1]}/health")
