"""Replies follow grammars with every kind of tokenizer."""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer

from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.server.parsers.families import ReplySyntax
from megatron_mamba_cache.server.reply_forms import FormMaker
from megatron_mamba_cache.server.tool_schemas import ChosenTools
from tests.models.tokenizer_kinds import CASES, KINDS, SPECIAL, save_kind, size_of

_MOST_TOKENS = 300
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["per day", "größe", ""]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
CHOICES = [" no, it is", "no, never", "größer", "</s> or <s>", "\n"]
SPELLED = ["lazy dog", " lazy", "a", "\n", "  x", "größe", '{"city": "', "e\n\n", "▁", "\t"]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return saved(tmp_path_factory.mktemp("kind"), *request.param)


def saved(directory: Path, kind: str, ends: str) -> HuggingFaceTokenizer:
    """Return a saved and reloaded tokenizer of this kind, for a model with a larger vocabulary."""
    save_kind(directory, kind, ends)
    found = load_tokenizer(directory, size_of(directory) + 3)
    assert found is not None
    return found


def reply_of(tokenizer: HuggingFaceTokenizer, grammars: Grammars, grammar: str, seed: int) -> str:
    """Return the text of a reply to a prompt, made of random tokens that the grammar allows."""
    matcher, rng, tokens = grammars.matcher(grammar), random.Random(seed), list[int]()
    while not matcher.is_stopped():
        mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((mask[:, None] >> torch.arange(8)) & 1).flatten().nonzero().flatten().tolist()
        assert allowed and not matcher.is_error(), (seed, tokens, matcher.get_error())
        token = tokenizer.eod if tokenizer.eod in allowed and rng.random() < 0.3 else rng.choice(allowed)
        assert matcher.consume_token(token) and len(tokens) < _MOST_TOKENS, (seed, tokens)
        tokens += [token] if token != tokenizer.eod else []
    prompt = tokenizer.tokenize("x", add_special_tokens=False)
    before, whole = (tokenizer.detokenize(found, skip_special_tokens=False) for found in (prompt, [*prompt, *tokens]))
    assert whole.startswith(before)
    return whole[len(before) :]


@cache
def grammars_of(tokenizer: HuggingFaceTokenizer) -> Grammars:
    grammars = Grammars(tokenizer.vocab_size)
    grammars.read(tokenizer)
    return grammars


def replies(tokenizer: HuggingFaceTokenizer, grammar: forms.Grammar | str, count: int) -> list[str]:
    """Return the texts of `count` replies that follow a grammar, with seeds 0, 1, ..."""
    grammars = grammars_of(tokenizer)
    text = grammar if isinstance(grammar, str) else grammar.text
    assert grammars.error_of(text) is None
    return [reply_of(tokenizer, grammars, text, seed) for seed in range(count)]


def test_replies_satisfy_their_json_schema(tokenizer: HuggingFaceTokenizer) -> None:
    for reply in replies(tokenizer, forms.json_grammar(CITY), 4):
        found = json.loads(reply)
        assert set(found) == {"city", "days", "unit"} and 1 <= found["days"] <= 14, reply
        assert len(found["city"]) <= 8 and found["unit"] in CITY["properties"]["unit"]["enum"], reply


def test_replies_match_their_regular_expression(tokenizer: HuggingFaceTokenizer) -> None:
    for pattern in ("(a|h){8}", "( |\n| [a-z]){3,9}", " ?lazy dogs?"):
        for reply in replies(tokenizer, forms.regex_grammar(pattern), 3):
            assert re.fullmatch(pattern, reply), (pattern, reply)


def test_replies_are_exactly_one_of_the_choices(tokenizer: HuggingFaceTokenizer) -> None:
    choices = [text for text in CHOICES if can_write(tokenizer, text)]
    found = set(replies(tokenizer, forms.choice_grammar(choices), 24))
    assert found <= set(choices) and " no, it is" in found and len(found) >= 3


@cache
def texts_of(tokenizer: HuggingFaceTokenizer) -> frozenset[bytes | None]:
    return frozenset(map(tokenizer.bytes_of, range(tokenizer.vocab_size)))


def can_write(tokenizer: HuggingFaceTokenizer, text: str) -> bool:
    """Return True if the vocabulary has a token for each character of a text, or for each byte."""
    known = texts_of(tokenizer)
    return all(c.encode() in known or all(bytes([byte]) in known for byte in c.encode()) for c in text)


def test_replies_with_a_required_tool_call_are_one_valid_tool_call(tokenizer: HuggingFaceTokenizer) -> None:
    syntax = ReplySyntax("hermes")
    form = FormMaker(syntax, tokenizer).chat(None, ChosenTools("required", TOOLS), may_call_several=False)
    assert form is not None
    for reply in replies(tokenizer, form.grammar_after(""), 4):
        parser = syntax.parser({"get_weather": CITY})
        parser.push(reply)
        parser.finish()
        assert parser.num_calls == parser.num_complete_calls == 1, reply
        call = json.loads(reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call["name"] == "get_weather" and set(call["arguments"]) == {"city", "days", "unit"}


def test_bytes_of_a_token_equal_the_text_that_it_decodes_to(tokenizer: HuggingFaceTokenizer) -> None:
    rng = random.Random(1)
    start = tokenizer.tokenize("x", add_special_tokens=False)
    before = tokenizer.detokenize(start, skip_special_tokens=False)
    for _ in range(300):
        tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 5))]
        text = b"".join(tokenizer.bytes_of(token) or b"" for token in tokens)
        found = tokenizer.detokenize([*start, *tokens], skip_special_tokens=False)
        try:
            assert found == before + text.decode(), tokens
        except UnicodeDecodeError:  # decoders differ in the number of U+FFFD for invalid bytes
            assert "\ufffd" in found, tokens


def test_tokens_for_spaces_and_single_bytes_have_the_right_bytes(tokenizer: HuggingFaceTokenizer) -> None:
    found = {tokenizer.token_of(token): tokenizer.bytes_of(token) for token in range(tokenizer.vocab_size)}
    assert [found[name] for name in SPECIAL] == [name.encode() for name in SPECIAL]
    assert found["<tool_call>"] == b"<tool_call>" and found[None] == b""
    spaced = {name: content for name, content in found.items() if name and name[0] in "▁Ġ" and len(name) > 1}
    assert len(spaced) > 20
    for name, content in spaced.items():
        assert content == name.replace("▁", " ").encode() if name[0] == "▁" else content[:1] == b" ", (name, content)
    fallbacks = {name: content for name, content in found.items() if name and re.fullmatch("<0x..>", name)}
    assert fallbacks in ({}, {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)})


def test_text_of_a_single_choice_is_generated_exactly(tokenizer: HuggingFaceTokenizer) -> None:
    texts = [text for text in SPELLED if can_write(tokenizer, text)]
    assert len(texts) >= 8
    for text in texts:
        assert replies(tokenizer, forms.choice_grammar([text]), 1) == [text]


@pytest.mark.parametrize("text", ["x </s>", "<s>", "<|im_start|>a"])
def test_special_token_name_in_a_grammar_is_matched_as_plain_text(text: str, tmp_path: Path) -> None:
    for number, kind in enumerate(("byte-level BPE", "SentencePiece BPE", "unigram with bytes")):
        tokenizer = saved(tmp_path / str(number), kind, "both")
        assert replies(tokenizer, forms.choice_grammar([text]), 2) == [text, text]


@pytest.mark.parametrize("kind", ["unigram", "unigram, never", "unigram with bytes", "SentencePiece BPE"])
def test_text_that_the_vocabulary_cannot_encode_is_refused_early(kind: str, tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, kind, "begin")
    named = {"type": "object", "properties": {"a日": {"type": "null"}}, "required": ["a日"]}
    named["additionalProperties"] = False
    described = {"type": "string", "enum": ["größe"], "description": "日", "title": "🙂"}
    refused = [forms.choice_grammar(["ab", "a日"]), *map(forms.json_grammar, ({"enum": ["a", ["日"]]}, named))]
    for grammar in refused:
        error = grammars_of(tokenizer).error_of(grammar.text)
        if KINDS[kind].covers_all:
            assert error is None and "日" in "".join(replies(tokenizer, grammar, 8))
        else:
            assert error is not None and "the model has no token for '日'" in error and "\n" not in error
    assert replies(tokenizer, forms.json_grammar(described), 1) == ['"größe"']


OBJECT: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "null"}}, "required": ["q"]}


@pytest.mark.parametrize(
    ("missing", "refused"),
    [
        ("{", [forms.json_grammar(OBJECT)]),
        ("]", [forms.json_grammar({"type": "array", "items": {"type": "integer"}})]),
        (":", [forms.json_grammar(OBJECT)]),
        ('"', [forms.json_grammar({"enum": ["a", "b"]}), forms.json_grammar({"type": "string"})]),
        ("\n", [forms.choice_grammar(["a", "a\n"])]),
        ("4", [forms.json_grammar({"const": 42})]),
    ],
)
def test_character_missing_from_the_vocabulary_is_refused_early(
    missing: str, refused: list[forms.Grammar], tmp_path: Path
) -> None:
    tokenizer = saved_without(tmp_path, missing)
    for grammar in refused:
        error = grammars_of(tokenizer).error_of(grammar.text)
        assert error is not None and f"the model has no token for {missing!r}" in error and len(error.splitlines()) == 1
    assert set(replies(tokenizer, forms.choice_grammar(["a", "lazy dog"]), 8)) == {"a", "lazy dog"}
    expression = forms.regex_grammar('("[^]{:\n4]|a)b')  # it contains missing characters, but does not need them
    assert all(reply[-1] == "b" for reply in replies(tokenizer, expression, 4))


def saved_without(directory: Path, missing: str, *added: str) -> HuggingFaceTokenizer:
    """Return a unigram tokenizer without the pieces that contain `missing`, but with the pieces `added`."""
    state = json.loads(KINDS["unigram"].make().to_str())
    kept = [scored for scored in state["model"]["vocab"] if missing not in scored[0]]
    state["model"]["vocab"] = kept + [[piece, -10.0] for piece in added]
    (directory / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2]}))
    found = load_tokenizer(directory, 1000)
    assert found is not None
    return found


@pytest.mark.parametrize("piece", ["▁{", "a{", "}{"])
def test_grammar_is_refused_early_when_no_token_can_start_a_reply(piece: str, tmp_path: Path) -> None:
    tokenizer = saved_without(tmp_path, "{", piece)
    for grammar in (forms.json_grammar(OBJECT), forms.choice_grammar(["{a", "{b"])):
        error = grammars_of(tokenizer).error_of(grammar.text)
        assert error == "the model has no token with which a reply in this format can start"
    assert set(replies(tokenizer, forms.choice_grammar(["a", ""]), 8)) == {"a", ""}


def save_byt5(directory: Path) -> None:
    ByT5Tokenizer(extra_ids=0).save_pretrained(directory)


def save_old_files(directory: Path) -> None:
    """Write a byte-level BPE tokenizer as `vocab.json` and `merges.txt`, as for GPT-2."""
    save_kind(directory, "byte-level BPE", "plain")
    model = Tokenizer.from_file(str(directory / "tokenizer.json")).model
    (directory / "tokenizer.json").unlink()
    model.save(str(directory))
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0]}
    config = {"tokenizer_class": "GPT2Tokenizer", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("save", [save_byt5, save_old_files])
def test_replies_follow_grammars_with_tokenizers_loaded_by_transformers(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    tokenizer = load_tokenizer(tmp_path, 1000)
    assert tokenizer is not None
    single = {content for content in map(tokenizer.bytes_of, range(1000)) if content and len(content) == 1}
    assert single == {bytes([byte]) for byte in range(256)}
    assert replies(tokenizer, forms.choice_grammar([" größe\n日"]), 2) == [" größe\n日"] * 2
    for reply in replies(tokenizer, forms.json_grammar(CITY), 3):
        assert set(json.loads(reply)) == {"city", "days", "unit"}


class Beginning:
    """Tokenizer of another package, which adds a special token before and after each text."""

    eod, bos, special_ids, vocab_size = 256, 257, (257,), 258

    def tokenize(self, text: str) -> Sequence[int]:
        return [self.bos, *text.encode(), self.eod]

    def bytes_of(self, token: int) -> bytes | None:
        return bytes([token]) if token < 256 else None


def test_text_forced_by_a_grammar_is_encoded_without_special_tokens() -> None:
    grammars, text = Grammars(Beginning.vocab_size), "größe\n"
    grammars.read(Beginning())
    matcher, forced = grammars.matcher(forms.choice_grammar([text]).text), list(text.encode())
    assert matcher.compute_ff_tokens() == forced
    assert matcher.try_consume_tokens(forced) == len(forced) and matcher.is_accepting()
