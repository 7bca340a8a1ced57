"""Replies that follow a grammar are parsed into reasoning, then calls or an answer."""

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.grammars.forms import json_grammar
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron_mamba_cache.server.parsers.families import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplySyntax
from megatron_mamba_cache.server.parsers.reasoning import PromptReasoning
from megatron_mamba_cache.server.prompts import Prompt
from megatron_mamba_cache.server.reply_forms import FormMaker
from megatron_mamba_cache.server.tool_schemas import chosen_tools
from tests.grammars.allowed_tokens import tokens_of_mask
from tests.server.parsers.tagged_replies import KINDS, Tag, reply_of_tokens, tagged_tokenizer, tokens_of

OPEN, ALLOWED, DONE = PromptReasoning
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["count", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
WORDS = ("\n", "\n", "```\n", "\n```\n", '"', "`", "x", "so. ", " ", "<", '{"count": ', "\n<function=f>\n", "{")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceTokenizer]:
    folder = tmp_path_factory.mktemp("held")
    return {kind: tagged_tokenizer(folder / kind, kind) for kind in KINDS}


def random_tokens(
    grammars: Grammars, grammar: str, tokenizer: HuggingFaceTokenizer, rng: random.Random, words: list[list[int]]
) -> list[int]:
    """Return random tokens that a grammar allows, with the end token if the text is complete."""
    matcher, tokens = grammars.matcher(grammar), list[int]()
    while len(tokens) < 300 and tokens[-1:] != [tokenizer.eod]:
        if rng.random() < 0.6:
            tokens += (word := rng.choice(words))[: matcher.try_consume_tokens(word)]
        allowed = tokens_of_mask(matcher.compute_bitmask(), tokenizer.vocab_size)
        assert allowed, tokenizer.detokenize(tokens)
        tokens.append(tokenizer.eod if tokenizer.eod in allowed and rng.random() < 0.06 else rng.choice(allowed))
        assert matcher.consume_token(tokens[-1])
    return tokens


def words_of(tokenizer: HuggingFaceTokenizer, markers: Sequence[str]) -> list[list[int]]:
    """Return the tokens of the words in random replies, including markers as tags and as mentions."""
    tags = [Tag(marker) for marker in markers]
    words = [tokens_of(tokenizer, [word]) for word in (*WORDS, *tags, *tags, *map(str, tags))]
    return words + [tokens_of(tokenizer, ["\n", tag]) for tag in tags]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("calls", "reasoning"),
    [("hermes", "think"), ("qwen3_coder", "think"), ("nemotron_nano_v2", "deepseek_r1"), ("granite", "granite")],
)
@pytest.mark.parametrize("asks", ["required", "answer", "strict"])
def test_constrained_replies_are_parsed_into_the_required_answers_and_calls(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, calls: str, reasoning: str, asks: str
) -> None:
    tokenizer, form = tokenizers[kind], REASONING_PARSERS[reasoning]
    syntax, rng = ReplySyntax(calls, form), random.Random(f"{kind} {calls} {asks}")
    answer = ("response_format", json_grammar(SCHEMA)) if asks == "answer" else None
    chosen = chosen_tools("required" if asks == "required" else None, TOOLS)
    held = FormMaker(syntax, tokenizer).chat(answer, chosen, None)
    assert held is not None
    grammars, num_whole, num_calls = Grammars(tokenizer.vocab_size), 0, 0
    markers = TOOL_CALL_PARSERS[calls]({}).open
    grammars.read(tokenizer)
    words = words_of(tokenizer, (form.open, form.close, form.close, *markers))
    for _ in range(16):
        is_open = rng.random() < 0.7
        grammar = held.grammar_after(Prompt((1,), None, reasoning=OPEN if is_open else ALLOWED))
        tokens = random_tokens(grammars, grammar, tokenizer, rng, words)
        if tokens[-1:] != [tokenizer.eod]:
            continue
        num_whole += 1
        reply = reply_of_tokens(tokenizer, syntax, {"f": SCHEMA}, tokens[:-1], is_open=is_open, is_constrained=True)
        found, text = reply.parsed(), reply.text
        if asks != "strict":
            assert bool(found.calls) is (asks == "required" or not found.content), text
        for call in found.calls:
            assert call.name == "f" and jsonschema_rs.is_valid(SCHEMA, json.loads(call.arguments)), text
        if asks == "answer" and not found.calls:
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(found.content)), text
        if asks == "required":
            assert found.content == "", text
        if asks == "strict":
            assert not any(marker in found.content for marker in markers), text
        num_calls += len(found.calls)
    print(f"{num_whole} replies are whole, with {num_calls} calls")
    assert num_whole > 2
    assert num_calls or asks == "answer"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", TOOL_CALL_PARSERS)
@pytest.mark.parametrize("reasoning", REASONING_PARSERS)
@pytest.mark.parametrize("asks", ["required", "answer"])
def test_grammar_allows_no_reasoning_when_the_prompt_closes_the_reasoning(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, calls: str, reasoning: str, asks: str
) -> None:
    tokenizer, form = tokenizers[kind], REASONING_PARSERS[reasoning]
    answer = ("response_format", json_grammar(SCHEMA)) if asks == "answer" else None
    chosen = chosen_tools("required" if asks == "required" else None, TOOLS if asks == "required" else [])
    held = FormMaker(ReplySyntax(calls, form), tokenizer).chat(answer, chosen, None)
    assert held is not None
    grammars = Grammars(tokenizer.vocab_size)
    grammars.read(tokenizer)
    opening = tokens_of(tokenizer, [Tag(form.open)])
    for before in (ALLOWED, DONE):
        matcher = grammars.matcher(held.grammar_after(Prompt((1,), None, reasoning=before)))
        assert (matcher.validate_tokens(opening) == len(opening)) is (before is ALLOWED)
    tokens, rng = list[int](), random.Random(f"{kind} {calls} {reasoning} {asks}")
    while tokens[-1:] != [tokenizer.eod]:
        grammar = held.grammar_after(Prompt((1,), None, reasoning=DONE))
        tokens = random_tokens(grammars, grammar, tokenizer, rng, words_of(tokenizer, (form.open, form.close)))
    reply = reply_of_tokens(
        tokenizer, ReplySyntax(calls, form), {"f": SCHEMA}, tokens[:-1], is_constrained=True
    ).parsed()
    assert not reply.reasoning and bool(reply.calls) is (asks == "required") is not reply.content


@pytest.mark.parametrize("kind", ["added", "plain"])
@pytest.mark.parametrize("calls", ["qwen3_coder", "hermes"])
@pytest.mark.parametrize("choice", ["required", None])
def test_tool_call_within_reasoning_ends_the_reasoning(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, calls: str, choice: Any
) -> None:
    """Of 200 random replies, many call a tool before they close their reasoning, or never close it."""
    tokenizer, form = tokenizers[kind], REASONING_PARSERS["think"]
    syntax, rng = ReplySyntax(calls, form), random.Random(f"{kind} {calls} {choice} within")
    held = FormMaker(syntax, tokenizer).chat(None, chosen_tools(choice, TOOLS), None)
    assert held is not None
    grammars, num_whole, num_within = Grammars(tokenizer.vocab_size), 0, 0
    grammars.read(tokenizer)
    grammar = held.grammar_after(Prompt((1,), None, reasoning=OPEN))
    words = words_of(tokenizer, (form.close, *TOOL_CALL_PARSERS[calls]({}).open[:1] * 3))
    while num_whole < 25:
        tokens = random_tokens(grammars, grammar, tokenizer, rng, words)
        if tokens[-1] != tokenizer.eod:
            continue
        num_whole += 1
        reply = reply_of_tokens(tokenizer, syntax, {"f": SCHEMA}, tokens[:-1], is_open=True, is_constrained=True)
        found, text = reply.parsed(), reply.text
        assert choice is None or (found.calls and not found.content), text
        assert reply.finish_reason == ("tool_calls" if found.calls else "stop"), text
        for call in found.calls:
            assert call.name == "f" and jsonschema_rs.is_valid(SCHEMA, json.loads(call.arguments)), text
        num_within += text.lstrip().removeprefix(found.reasoning).lstrip().startswith("<tool_call>")
    print(f"{num_within} of {num_whole} replies call within reasoning")
    assert num_within > 5
