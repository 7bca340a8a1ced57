"""Prompts that end within reasoning, after reasoning or without reasoning, for each reasoning parser."""

from typing import Any

import pytest

from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron_mamba_cache.server.conversation import Conversation
from megatron_mamba_cache.server.parsers.families import REASONING_PARSERS, ReplySyntax
from megatron_mamba_cache.server.parsers.reasoning import PromptReasoning
from megatron_mamba_cache.server.prompts import Prompt, PromptReader
from megatron_mamba_cache.server.tenants import Tenant
from megatron_mamba_cache.server.transcripts import Transcripts
from tests.server.parsers.tagged_replies import KINDS, Tag, tagged_tokenizer, tokens_of

TENANT = Tenant("", "")
_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "closes when asked to": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "opens when asked to": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is undefined or not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}",
    "opens": _TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "opens within its line": "{% for m in messages %}{{ m.role }}: {{ m.content | trim }} {% endfor %}"
    "assistant: <think> ",
    "opens with a first sentence": _TURNS + "{% if add_generation_prompt %}[/INST]<think>\nOkay,{% endif %}",
    "shows earlier reasoning": "{% for m in messages %}[{{ m.role }}]\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}\n{% endfor %}[assistant]\n",
}
QUOTED = "What do <think> and </think> mean, and <think>?"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], HuggingFaceTokenizer]:
    folder = tmp_path_factory.mktemp("begun")
    return {
        (kind, name): tagged_tokenizer(folder / f"{kind} {name}", kind, template)
        for kind in KINDS
        for name, template in TEMPLATES.items()
    }


OPEN, ALLOWED, DONE = PromptReasoning


def reasoning_after(
    tokenizer: HuggingFaceTokenizer, reasoning: str, conversation: Conversation, reader: PromptReader | None = None
) -> PromptReasoning:
    form = REASONING_PARSERS[reasoning]
    reader = reader or PromptReader(tokenizer, Transcripts(0), 4096)
    begun = reader.begun_reply(reader.read_chat(TENANT, conversation))
    return begun.reasoning(form, ReplySyntax(None, form).tag_ids(tokenizer), tokenizer)


def asked(*contents: str, **fields: Any) -> Conversation:
    """Return a conversation with these turns, beginning with a user turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    continues = len(contents) % 2 == 0
    return Conversation(messages, adds_prompt=not continues, continues=continues, values=fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quoted", ["Hi", QUOTED, "It ends with <think>", "It ends with </think>", "<think>", " "])
@pytest.mark.parametrize(
    ("template", "values", "found", "found_if_begun_open"),
    [
        ("closes when asked to", {}, ALLOWED, OPEN),
        ("closes when asked to", {"enable_thinking": False}, DONE, DONE),
        ("opens when asked to", {}, DONE, DONE),
        ("opens when asked to", {"enable_thinking": True}, OPEN, OPEN),
        ("opens", {}, OPEN, OPEN),
        ("opens within its line", {}, OPEN, OPEN),
        ("opens with a first sentence", {}, OPEN, OPEN),
        ("shows earlier reasoning", {}, ALLOWED, OPEN),
    ],
)
def test_template_text_can_open_or_close_reasoning(
    tokenizers: dict[tuple[str, str], HuggingFaceTokenizer],
    kind: str,
    quoted: str,
    template: str,
    values: dict[str, Any],
    found: PromptReasoning,
    found_if_begun_open: PromptReasoning,
) -> None:
    """Tags in user messages and earlier turns do not count. `deepseek_r1` is open unless the prompt closes it."""
    for turns in ((quoted,), (quoted, quoted, quoted)):
        conversation = asked(*turns, **values)
        assert reasoning_after(tokenizers[kind, template], "think", conversation) is found
        assert reasoning_after(tokenizers[kind, template], "deepseek_r1", conversation) is found_if_begun_open
        assert reasoning_after(tokenizers[kind, template], "granite", conversation) is ALLOWED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["closes when asked to", "opens", "shows earlier reasoning"])
@pytest.mark.parametrize(
    ("prefill", "found", "found_if_begun_open"),
    [
        ("<think>\nHm, I", OPEN, OPEN),
        ("<think>\nHm.\n</think>\n\nIt is", DONE, DONE),
        ("<think>Hm.</think>", DONE, DONE),
        ("<think>\nHm.\n</think>\n<think>\nAgain", OPEN, OPEN),
        ("It is", DONE, OPEN),
    ],
)
def test_prefilled_reply_text_can_open_or_close_reasoning(
    tokenizers: dict[tuple[str, str], HuggingFaceTokenizer],
    kind: str,
    template: str,
    prefill: str,
    found: PromptReasoning,
    found_if_begun_open: PromptReasoning,
) -> None:
    for quoted in ("Hi", QUOTED):
        conversation = asked(quoted, prefill)
        assert reasoning_after(tokenizers[kind, template], "think", conversation) is found
        assert reasoning_after(tokenizers[kind, template], "deepseek_r1", conversation) is found_if_begun_open


def test_prefilled_reply_text_may_mention_reasoning_tags(
    tokenizers: dict[tuple[str, str], HuggingFaceTokenizer],
) -> None:
    tokenizer = tokenizers["plain", "closes when asked to"]
    for prefill, found in (
        ("<think>\nThe user writes `</think>` here", OPEN),
        ("<think>\nThe user writes </think> here", OPEN),
        ("The tag <think> means", DONE),
        ("<think>\nDone\n</think>\nThe tag <think> means", DONE),
    ):
        assert reasoning_after(tokenizer, "think", asked("Hi", prefill)) is found, prefill


@pytest.mark.parametrize("kind", ["special", "added"])
def test_tags_in_a_continued_reply_count_only_when_they_are_tokens(
    tokenizers: dict[tuple[str, str], HuggingFaceTokenizer], kind: str
) -> None:
    """The text of the reply contains a tag, but none of its tokens is the tag."""
    tokenizer = tokenizers[kind, "closes when asked to"]
    reader, first = PromptReader(tokenizer, Transcripts(2**20), 4096), asked("Hi")
    pieces = [Tag("<think>"), "\nThe user writes </think> in"]
    prompt: Prompt = reader.read_chat(TENANT, first)
    reader.remember(TENANT, prompt, "".join(pieces), tokens_of(tokenizer, pieces))
    continued = asked("Hi", "".join(pieces))
    assert reasoning_after(tokenizer, "think", continued, reader) is OPEN
    assert reasoning_after(tokenizer, "think", continued) is DONE  # tokenizing the text gives the tag's token
