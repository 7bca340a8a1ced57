"""Code shared by the client scripts: arguments, requests without a client library, printed checks.

The scripts can run alone, against any server: python with_litellm.py http://127.0.0.1:5000 [KEY [MODEL_DIRECTORY]].
Scripts that use `replies` need the server from tests/server/scripted_model.py.
"""

import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).resolve().parents[3] / "megatron_mamba_cache" / "models" / "small_python_model"

PLAIN = "plain HTTP"  # user agent of requests without a client library
PROMPT = "import os\n\n\ndef main"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
STOP = "sys"
TOO_LONG = "x = 1\n" * 20_000


@dataclass(frozen=True, slots=True)
class Served:
    """Server under test and its model.

    Args:
        directory: Model directory, for clients that need the tokenizer.
    """

    url: str
    key: str
    directory: str

    @classmethod
    def of_arguments(cls) -> "Served":
        """Return the server named on the command line."""
        url, key, directory = (*sys.argv[1:], *("no-key", str(SHIPPED))[len(sys.argv) - 2 :])
        return cls(url, key, directory)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.answer("/v1/models")["data"][0]["id"]

    def text(self, prompt: Any = PROMPT, **settings: Any) -> str:
        """Return the reply to a prompt; `settings` override greedy sampling."""
        return self.answer("/v1/completions", {"prompt": prompt, **GREEDY, **settings})["choices"][0]["text"]

    def chat(self, messages: Any = MESSAGES, **settings: Any) -> str:
        """Return the reply to a conversation; `settings` override greedy sampling."""
        body = {"messages": messages, **GREEDY, **settings}
        return self.answer("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    def answer(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request without a client library; return the response."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "User-Agent": PLAIN}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as reply:
            return json.load(reply)


def check(what: str, found: Any, wanted: Any = True) -> None:
    """Print `what` if `found` equals `wanted`; otherwise exit with status 1."""
    if found != wanted:
        sys.exit(f"not so: {what}\n  found  {found!r}\n  wanted {wanted!r}")
    print("holds:", what)


def replies(*texts: str) -> str:
    """Return a message that makes the server in tests/server/scripted_model.py reply with one text per turn."""
    return "Replies: " + json.dumps(texts).replace("<", "\\u003c")


def call(name: str, /, **arguments: Any) -> str:
    """Return the text with which the scripted model calls a tool."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def thought(text: str) -> str:
    """Return the text with which the scripted model reasons before it replies."""
    return f"<think>\n{text}\n</think>\n\n"
