"""The chat client of the examples, against the running server."""

import itertools
import re

from tests.command_line.command_runs import REPOSITORY, run_process
from tests.server.running_server import RED, RunningServer

_SHOWN = re.compile(r"\[(\d+) of (\d+) prompt tokens cached .* first token after \d+ ms, (\d+) tokens at")


def test_each_turn_shows_what_was_cached_of_the_turns_before(server: RunningServer) -> None:
    first = r"# file: bridge.py\n" + r"import time\n" * 40 + "class Bridge"
    turns = ("--say", first, "--say", r"\n\n\nclass Quay", "--say", r"\n\n\ndef main")
    script = REPOSITORY / "examples" / "chat_session.py"
    flags = ("--url", f"{server.url}/v1", "--api-key", RED, "--max-tokens", 60, "--seed", 1)
    done = run_process(script, *flags, *turns, cwd=REPOSITORY)
    assert done.status == 0, done.stderr
    shown = [tuple(map(int, found)) for found in _SHOWN.findall(done.stdout)]
    assert len(shown) == 3 and shown[0][0] == 0
    for (_, prompt, generated), (cached, _, _) in itertools.pairwise(shown):
        assert cached >= prompt + generated - 2 * 64


def test_an_endpoint_that_is_not_there_is_named() -> None:
    done = run_process(REPOSITORY / "examples" / "chat_session.py", "--url", "http://127.0.0.1:9/v1", cwd=REPOSITORY)
    assert done.status == 1 and "http://127.0.0.1:9/v1" in done.stderr
    assert "Traceback" not in done.stderr
