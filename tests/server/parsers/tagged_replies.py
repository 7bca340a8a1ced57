"""Replies with tags that are special tokens, added tokens or plain text in the same tokenizer."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.parsers.families import ReplySyntax
from megatron_mamba_cache.server.reply import Reply, ReplyPrompt, ReplyReading

KINDS = ("special", "added", "plain")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>")
VOCAB_SIZE = 2048 + len(TAGS)


class Tag(str):
    """Tag that the model uses as a tag; the same characters in other text are a mention."""

    __slots__ = ()


def tagged_tokenizer(folder: Path, kind: str, template: str = "", others: Sequence[str] = ()) -> HuggingFaceTokenizer:
    """Return the example tokenizer with tags of this kind and with other special tokens."""
    folder.mkdir(exist_ok=True)
    described = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    settings = {name: False for name in ("single_word", "lstrip", "rstrip", "normalized")}
    described["added_tokens"] += [
        {"id": 2048 + number, "content": tag, **settings, "special": kind == "special"}
        for number, tag in enumerate(TAGS if kind != "plain" else ())
    ]
    described["added_tokens"] += [
        {"id": VOCAB_SIZE + number, "content": name, **settings, "special": True} for number, name in enumerate(others)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text((SHIPPED_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(folder, VOCAB_SIZE + len(others))
    assert tokenizer is not None
    return tokenizer


def tokens_of(tokenizer: HuggingFaceTokenizer, pieces: Sequence[str]) -> list[int]:
    """Return the tokens of a reply: the token of a tag if it has one, otherwise one token per character."""
    found: list[int] = []
    for piece in pieces:
        number = tokenizer.id_of(piece) if isinstance(piece, Tag) else None
        spelled = [token for character in piece for token in tokenizer.tokenize(character)]
        found += spelled if number is None else [number]
    return found


def reply_of(
    tokenizer: HuggingFaceTokenizer,
    syntax: ReplySyntax,
    parameters: dict[str, Any] | None,
    pieces: Sequence[str],
    **settings: Any,
) -> Reply:
    """Return a complete reply made of pieces; see `reply_of_tokens`."""
    return reply_of_tokens(tokenizer, syntax, parameters, tokens_of(tokenizer, pieces), **settings)


def reply_of_tokens(
    tokenizer: HuggingFaceTokenizer,
    syntax: ReplySyntax,
    parameters: dict[str, Any] | None,
    tokens: Sequence[int],
    *,
    is_open: bool = False,
    stops: Sequence[str] = (),
    num_at_once: int = 1,
    is_constrained: bool = False,
) -> Reply:
    """Return a complete reply; its tokens arrive in groups of `num_at_once`."""
    ids = syntax.tag_ids(tokenizer)
    reading = ReplyReading(
        ids.keys(),
        partial(syntax.parser, parameters, is_constrained=is_constrained),
        {number: tag for tag, number in ids.items()},
    )
    reply = Reply(tokenizer, stops, reading=reading, prompt=ReplyPrompt(opens_reasoning=is_open))
    for start in range(0, len(tokens), num_at_once):
        if reply.finish_reason is None:
            reply.take(Progress(tokens=tuple(tokens[start : start + num_at_once])))
    if reply.finish_reason is None:
        reply.take(Progress(end="stop"))
    return reply
