"""A server with the example model whose replies are scripted in the conversation.

A message contains `Replies: ["first", "second"]`, and the engine generates one of these texts per turn, constrained by
a grammar that allows nothing else; tokens, cache, usage and parsers work as for any reply. If the request has a
grammar, the scripted reply must follow it. A conversation without such a list gets the model's own replies.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.grammars.forms import choice_grammar
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.server.app import Server
from megatron_mamba_cache.server.backend import Progress, Ticket
from tests.server.family_templates import FAMILIES
from tests.server.running_server import made_server

_MARK = "Replies: "
_OPENS_REPLY = "<|im_start|>assistant\n"
_MAX_LENGTH = 32_768  # agents write long prompts


class ScriptedModel:
    """A `Backend` that constrains each request to the reply in its prompt and forwards it."""

    def __init__(self, backend: Any, tokenizer: Any) -> None:
        self._backend = backend
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, request: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        """Queue a request and deliver its scripted reply."""
        reply = scripted_reply(self._tokenizer.detokenize(request.prompt.tolist(), skip_special_tokens=False))
        if reply is not None:
            self._check(reply, request.sampling.grammar)
            request = replace(request, sampling=replace(request.sampling, grammar=choice_grammar([reply]).text))
        return self._backend.submit(request, deliver)

    def _check(self, reply: str, grammar: str) -> None:
        if grammar:
            matcher, tokens = self._backend.grammars.matcher(grammar), self._tokenizer.tokenize(reply)
            allowed = self._tokenizer.detokenize(tokens[: matcher.validate_tokens(tokens)])
            if allowed != reply or not (matcher.consume_tokens(tokens) and matcher.is_accepting()):
                raise ValueError(f"the grammar {grammar} allows only {allowed!r} of the reply {reply!r}")


def scripted_reply(prompt: str) -> str | None:
    """Return this turn's reply from the last list in a prompt; None if the prompt has no list.

    Raises:
        IndexError: If the list has fewer replies than the conversation has turns.
    """
    start = prompt.rfind(_MARK)
    if start < 0:
        return None
    replies = json.JSONDecoder().raw_decode(prompt, start + len(_MARK))[0]
    return replies[prompt.count(_OPENS_REPLY, start) - 1]


def scripted_model_server(folder: Path, *flags: str) -> Server:
    """Return a server with the example model and a chat template for reasoning and tools.

    Args:
        folder: Folder to which the modified copy of the model is written.
    """
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen 3"], encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _MAX_LENGTH}))
    server = made_server("--hf-model", str(folder), *flags)
    return Server(ScriptedModel(server.backend, server.settings.tokenizer), server.settings)
