"""A tag in a reply counts where the model uses it as a tag; a mention of a tag is text."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron_mamba_cache.server.parsers.families import REASONING_PARSERS, ReplySyntax
from megatron_mamba_cache.server.parsers.parts import ParsedReply, assembled
from megatron_mamba_cache.server.reply import Reply
from tests.server.parsers.tagged_replies import KINDS, TAGS, Tag, reply_of, tagged_tokenizer

PARAMETERS: dict[str, Any] = {
    "look_up": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
    "größe": {"properties": {}},
}
CALL_FORMS = ("hermes", "qwen3_coder", "nemotron_nano_v2", "granite")
REASONING_FORMS = ("think", "deepseek_r1", "granite")
MENTIONED = (*TAGS, "<function=look_up>", "</function>", "</parameter>", "<function=", "Here is my response:")
SENTENCES = (
    "The user writes {} in the text, so I leave it.",
    "In quotes: \"{}\" is a tag.",
    "In code `{}` it is one too, and ({}) as well.",
    "- `{} and more`",
    "Das Wort \u201e{}\u201c steht im Text, \u201a{}\u2018 auch, und \u2039{}\u203a.",
    "\u300e{}\u300f\u3068\uff08{}\uff09\u3068\u3010{}\u3011\u306f\u5f15\u7528\u3067\u3059\u3002",
    "As code:\n```xml\n{}\n```\nThat is all.",
    "```\nA line\n{}\nas <parameter=text>\n```",
)  # fmt: skip
Sample = list[str]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HuggingFaceTokenizer]:
    folder = tmp_path_factory.mktemp("tags")
    return {kind: tagged_tokenizer(folder / kind, kind) for kind in KINDS}


def written_call(form: str, name: str, arguments: dict[str, Any]) -> Sample:
    """Return a call in the format of a model family."""
    described = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    match form:
        case "hermes":
            return [Tag("<tool_call>"), f"\n{described}\n", Tag("</tool_call>")]
        case "nemotron_nano_v2":
            return [Tag("<TOOLCALL>"), f"[{described}]", Tag("</TOOLCALL>")]
        case "granite":
            return [Tag("<|tool_call|>"), f"[{described}]"]
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return [Tag("<tool_call>"), f"\n<function={name}>\n{values}</function>\n", Tag("</tool_call>")]


def markers(reasoning: str) -> tuple[Tag, Tag]:
    form = REASONING_PARSERS[reasoning]
    return Tag(form.open), Tag(form.close)


def calls_of(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reasoning", REASONING_FORMS)
@pytest.mark.parametrize("calls", CALL_FORMS)
def test_tags_that_are_only_mentioned_are_parsed_as_text(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, reasoning: str, calls: str
) -> None:
    syntax, (opening, closing) = ReplySyntax(calls, REASONING_PARSERS[reasoning]), markers(reasoning)
    rng = random.Random(f"{calls} {reasoning} {kind}")
    for sentence in SENTENCES:
        for tag in rng.sample(MENTIONED, 2):
            mention = sentence.replace("{}", tag)
            if reasoning == "granite" and tag == closing and sentence == SENTENCES[0]:
                continue  # this marker is a sentence, so it ends reasoning within a line
            arguments = {"text": f"x {mention} y", "count": 3}
            is_open = reasoning == "deepseek_r1"
            pieces = [
                *([] if is_open else [opening]), f"\n{mention}\n", closing, f"\n\n{mention}\n",
                *written_call(calls, "look_up", arguments), "\n", *written_call(calls, "größe", {}),
            ]  # fmt: skip
            reply = reply_of(tokenizers[kind], syntax, PARAMETERS, pieces, is_open=is_open)
            found = reply.parsed()
            assert (found.reasoning, found.content) == (mention, mention), (pieces, found)
            assert calls_of(found) == [("look_up", arguments), ("größe", {})]
            assert reply.finish_reason == "tool_calls"


def samples(calls: str, reasoning: str) -> st.SearchStrategy[Sample]:
    """Return random replies made of mentions, tags at any position, calls and pieces of calls."""
    opening, closing = markers(reasoning)
    tags = st.sampled_from([*map(Tag, TAGS), opening, closing]).map(lambda tag: [tag])
    words = st.sampled_from([*MENTIONED, "a", "é\U0001f600", "\n", " ", "```", "\n```\n", '"', "`", ". ", "\n\n", "{"])
    arguments = st.fixed_dictionaries({"text": st.sampled_from(["", "a\nb", *MENTIONED]), "count": st.integers(0, 9)})
    names = st.sampled_from([*PARAMETERS, "x"])
    whole = st.builds(lambda name, chosen: written_call(calls, name, chosen), names, arguments)
    pieces = st.one_of(tags, words.map(lambda word: [word]), whole)
    return st.lists(pieces, max_size=12).map(lambda found: [piece for group in found for piece in group])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("calls", "reasoning"), [*((form, "think") for form in CALL_FORMS), ("granite", "granite")])
def test_parsing_does_not_depend_on_how_tokens_are_grouped(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, calls: str, reasoning: str
) -> None:
    syntax, tokenizer = ReplySyntax(calls, REASONING_PARSERS[reasoning]), tokenizers[kind]

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(pieces=samples(calls, reasoning), is_open=st.booleans(), stop=st.sampled_from(["", "\n\n", "</tool", "a"]))
    def check(pieces: Sample, is_open: bool, stop: str) -> None:
        def reply(num_at_once: int) -> Reply:
            stops = [stop] if stop else []
            return reply_of(
                tokenizer, syntax, PARAMETERS, pieces, is_open=is_open, stops=stops, num_at_once=num_at_once
            )

        streamed, halved, whole = reply(1), reply(7), reply(9999)
        assert streamed.parsed() == halved.parsed() == whole.parsed() == assembled(streamed.parts)
        assert streamed.text == whole.text and streamed.finish_reason == whole.finish_reason
        assert streamed.num_reasoning_tokens == whole.num_reasoning_tokens <= len(streamed.token_ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", CALL_FORMS)
def test_random_content_and_calls_round_trip_through_the_parser(
    tokenizers: dict[str, HuggingFaceTokenizer], kind: str, calls: str
) -> None:
    syntax, rng = ReplySyntax(calls, REASONING_PARSERS["think"]), random.Random(f"{calls} {kind} round trip")
    for _ in range(15):
        thoughts, content = (
            "\n".join(rng.choice(SENTENCES).replace("{}", rng.choice(MENTIONED)) for _ in range(rng.randrange(3)))
            for _ in range(2)
        )
        wanted = [
            ("look_up", {"text": rng.choice(["", "a", "a\n\nb", *MENTIONED[:8]]), "count": rng.randrange(99)})
            for _ in range(rng.randrange(3))
        ]
        has_thoughts = bool(thoughts) or rng.random() < 0.5
        written = [piece for name, arguments in wanted for piece in [*written_call(calls, name, arguments), "\n"]]
        before = [Tag("<think>"), f"\n{thoughts}\n", Tag("</think>"), "\n\n"] if has_thoughts else []
        pieces = [*before, *([f"{content}\n"] if content else []), *written]
        found = reply_of(tokenizers[kind], syntax, PARAMETERS, pieces, num_at_once=rng.choice([1, 3])).parsed()
        assert (found.reasoning, found.content.strip()) == (thoughts, content), pieces
        assert calls_of(found) == wanted, pieces
