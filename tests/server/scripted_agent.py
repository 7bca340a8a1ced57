"""A front end with scripted replies and the chat template of a model family."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.server.backend import Progress
from tests.server.front_end import FrontEnd, front_end, wait_until
from tests.server.parsers.tagged_replies import tokens_of

_START = (
    "{% if tools %}# tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
)
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_AS_JSON = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'

TEMPLATES = {
    "hermes": _START
    + "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    + _AS_JSON
    + "\n</tool_call>{% endfor %}"
    + _END,
    "qwen3_coder": _START + "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}" + _END,
    "nemotron_nano_v2": _START
    + "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}"
    + _AS_JSON
    + "{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}"
    + _END,
}
DROPS_REASONING = TEMPLATES["hermes"].replace("m.reasoning_content %}", "false and '</think>' %}")


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Weather?"}]
WRITTEN = {  # formatted as no template would write them
    "hermes": '<tool_call>{"name":"get_weather","arguments":{"days":3,  "city":"%s"}}</tool_call>',
    "qwen3_coder": (
        "<tool_call><function=get_weather><parameter=city>%s</parameter>\n\n<parameter=days>3</parameter></function>"
    ),
    "nemotron_nano_v2": '<TOOLCALL>\n[{"name":"get_weather","arguments":{"city":"%s","days":3}}]\n</TOOLCALL>',
}


def agent_tokenizer(folder: Path, template: str) -> HuggingFaceTokenizer:
    """Return the example tokenizer with another chat template."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(folder, 2048)
    assert tokenizer is not None
    return tokenizer


class Agent:
    """Client of a front end with scripted replies; each token is a few characters."""

    def __init__(self, server: FrontEnd, tokenizer: Any) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.client = openai.OpenAI(base_url=f"{server.listening.url}/v1", api_key="none", max_retries=0)

    def ask(self, reply: str, **fields: Any) -> Any:
        """Return a reply that is not streamed: its message and finish reason."""
        chat = self.answered(reply, **fields)
        return chat.choices[0]

    def ask_streamed(self, reply: str, **fields: Any) -> tuple[list[Any], str | None]:
        """Return a streamed reply: its deltas and finish reason."""
        chunks = self.answered(reply, stream=True, **fields)
        return [chunk.choices[0].delta for chunk in chunks], chunks[-1].choices[0].finish_reason

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the tokens of all prompts so far."""
        return [tuple(request.prompt.tolist()) for request in self.server.backend.asked]

    def tokens(self, text: str) -> list[int]:
        """Return tokens for a text that the tokenizer would not produce: one for each byte."""
        return [token for character in text for token in self.tokenizer.tokenize(character)]

    def answered(self, reply: str, *, end: str = "stop", **fields: Any) -> Any:
        """Return a chat completion, or all chunks of a streamed chat completion."""
        settings: Any = {"model": "scripted", "messages": ASKED, "tools": [TOOL]} | fields
        create = self.client.chat.completions.create
        with self.saying(reply, end):
            return list(create(**settings)) if settings.get("stream") else create(**settings)

    @contextmanager
    def saying(self, reply: str, end: str = "stop") -> Iterator[None]:
        """Context manager: set the reply to the request that is sent in its body."""
        refused = threading.Event()
        answer = threading.Thread(target=self._deliver, args=(reply, end, refused))
        answer.start()
        try:
            yield
        except BaseException:
            refused.set()
            raise
        finally:
            answer.join()
        assert not self.server.backend.running

    def _deliver(self, reply: str, end: str, refused: threading.Event) -> None:
        wait_until(lambda: self.server.backend.running or refused.is_set())
        if refused.is_set():
            return
        for token in self.tokens(reply):
            if self.server.backend.running:
                self.server.backend.deliver(Progress(tokens=(token,)))
        self.server.backend.deliver(Progress(end=end))  # type: ignore[arg-type]


class TagAgent(Agent):
    """Agent with a model that generates pieces, some of which are tags."""

    def tokens(self, text: Any) -> list[int]:
        return tokens_of(self.tokenizer, [text] if isinstance(text, str) else text)


@contextmanager
def agent_of(folder: Path, template: str) -> Iterator[Agent]:
    """Context manager: run a front end with a chat template; yield its agent."""
    tokenizer = agent_tokenizer(folder, template)
    with front_end(keys=(), tokenizer=tokenizer) as server:
        yield Agent(server, tokenizer)
