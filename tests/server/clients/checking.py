"""Shared code of the client scripts: arguments, replies without a client, printed checks.

The scripts run alone too, against any server: python with_litellm.py http://127.0.0.1:5000 [KEY [MODEL_DIRECTORY]].
Those with `replies` need that of tests/server/scripted_model.py.
"""

import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).resolve().parents[3] / "megatron_mamba_cache" / "models" / "small_python_model"

PLAIN = "plain HTTP"  # the user agent of requests without a client
PROMPT = "import os\n\n\ndef main"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
STOP = "sys"
TOO_LONG = "x = 1\n" * 20_000


@dataclass(frozen=True, slots=True)
class Served:
    """A server and its model.

    Args:
        directory: Of the model, for clients that want its tokenizer.
    """

    url: str
    key: str
    directory: str

    @classmethod
    def of_arguments(cls) -> "Served":
        """Return the server that the command line names."""
        url, key, directory = (*sys.argv[1:], *("no-key", str(SHIPPED))[len(sys.argv) - 2 :])
        return cls(url, key, directory)

    @property
    def model(self) -> str:
        """The model's name."""
        return self.answer("/v1/models")["data"][0]["id"]

    def text(self, prompt: Any = PROMPT, **settings: Any) -> str:
        """Return the reply to a prompt, greedy unless `settings` say otherwise."""
        return self.answer("/v1/completions", {"prompt": prompt, **GREEDY, **settings})["choices"][0]["text"]

    def chat(self, messages: Any = MESSAGES, **settings: Any) -> str:
        """Return the reply to a conversation, greedy unless `settings` say otherwise."""
        body = {"messages": messages, **GREEDY, **settings}
        return self.answer("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    def answer(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the server's answer, without a client library."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "User-Agent": PLAIN}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as reply:
            return json.load(reply)


def check(what: str, found: Any, wanted: Any = True) -> None:
    """Print what holds, or end the script with status 1."""
    if found != wanted:
        sys.exit(f"not so: {what}\n  found  {found!r}\n  wanted {wanted!r}")
    print("holds:", what)


def replies(*texts: str) -> str:
    """Return a message that makes the server of tests/server/scripted_model.py reply with these texts, one a turn."""
    return "Replies: " + json.dumps(texts).replace("<", "\\u003c")


def call(name: str, /, **arguments: Any) -> str:
    """Return the text by which that server's model calls a tool."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def thought(text: str) -> str:
    """Return the text by which that server's model reasons before it replies."""
    return f"<think>\n{text}\n</think>\n\n"
