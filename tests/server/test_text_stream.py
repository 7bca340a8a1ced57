"""Streamed text for every kind of tokenizer."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_mamba_cache.models.tokenizers.token_reader import REPLACEMENT, TokenReader
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.reply import Reply, ReplyPrompt
from megatron_mamba_cache.server.text_stream import IncrementalText, StopStrings, common_length, text_after
from tests.models.tokenizer_kinds import KINDS, SCRIPTS, saved_form

BYTES = ByteTokenizer()
SHIPPED = load_tokenizer(SHIPPED_MODEL, 2048)
TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n�"), max_size=60)
CHARACTERS = "".join(SCRIPTS.values()) + " \n�" + "á̂"
_DECODERS = {
    "WordPiece": decoders.WordPiece("▁"),
    "bytes one by one": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
"""Further ways to decode the vocabulary of SentencePiece BPE."""
JOINING = ("SentencePiece BPE", "SentencePiece BPE, never", "unigram with bytes")


def loaded(kind: str, directory: Path) -> HuggingFaceTokenizer:
    """Return a tokenizer of this kind; the model's vocabulary is larger than the tokenizer's."""
    backend = Tokenizer.from_str(saved_form(kind if kind in KINDS else "SentencePiece BPE", "begin"))
    if kind in _DECODERS:
        backend.decoder = _DECODERS[kind]
    backend.save(str(directory / "tokenizer.json"))
    found = load_tokenizer(directory, backend.get_vocab_size() + 5)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=[*KINDS, *_DECODERS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return loaded(request.param, tmp_path_factory.mktemp("kind"))


@pytest.fixture(scope="module", params=JOINING)
def joining(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return loaded(request.param, tmp_path_factory.mktemp("kind"))


def sampled(tokenizer: HuggingFaceTokenizer, rng: random.Random) -> list[int]:
    """Return random tokens: of a text in several scripts, arbitrary, or mostly single bytes."""
    match rng.randrange(3):
        case 0:
            return tokenizer.tokenize("".join(rng.choices(CHARACTERS, k=rng.randrange(40))))
        case 1:
            return rng.choices(range(tokenizer.vocab_size), k=rng.randrange(60))
    single = byte_tokens(tokenizer) or [*range(tokenizer.vocab_size)]
    some = tokenizer.tokenize(rng.choice([*SCRIPTS.values()]))
    return [rng.choice(single if rng.random() < 0.7 else some) for _ in range(rng.randrange(60))]


def byte_tokens(tokenizer: HuggingFaceTokenizer) -> list[int]:
    """Return the tokens for single bytes that are not a complete character."""
    spelled = [(token, tokenizer.bytes_of(token) or b"") for token in range(tokenizer.vocab_size)]
    return [token for token, content in spelled if len(content) == 1 and not content.isascii()]


def decoded(tokenizer: HuggingFaceTokenizer, tokens: Sequence[int], *, shows_all: bool) -> str:
    """Return the text of tokens, decoded with the tokenizers package."""
    backend: Any = tokenizer._codec
    known = [token for token in tokens if token <= backend.largest_id]
    return backend._tokenizer.decode(known, skip_special_tokens=not shows_all)  # type: ignore[no-any-return]


def less(whole: str, head: str) -> str:
    """Return a text without the prefix that it shares with an earlier text."""
    return whole[common_length(whole, head) :]


def pieces_of(tokens: list[int], tokenizer: object) -> list[str]:
    stream = IncrementalText(TokenReader(tokenizer))
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("shows_all", [False, True])
def test_reply_text_is_the_full_text_without_the_prompt_text(tokenizer: HuggingFaceTokenizer, shows_all: bool) -> None:
    num_exact = 0
    for seed in range(200):
        rng = random.Random(seed)
        tokens = sampled(tokenizer, rng)
        cut = rng.randrange(len(tokens) + 1)
        head, whole = (decoded(tokenizer, part, shows_all=shows_all) for part in (tokens[:cut], tokens))
        stream = IncrementalText(TokenReader(tokenizer, None if shows_all else ()), tokens[:cut])
        text = "".join([*map(stream.push, tokens[cut:]), stream.finish()])
        assert text == less(whole, head), (seed, tokens, cut)
        num_exact += head + text == whole
        assert len(stream.ends) == len(tokens) - cut and (cut == len(tokens) or stream.ends[-1] == len(text)), seed
    assert num_exact > 120  # all cases except prompts that end inside a character


def test_text_is_held_back_only_while_it_may_change(tokenizer: HuggingFaceTokenizer) -> None:
    single = byte_tokens(tokenizer)
    plain = tokenizer.tokenize("a.")
    num_held = 0
    for seed in range(40):
        rng = random.Random(seed)
        tokens = sampled(tokenizer, rng)[:20]
        stream, given = IncrementalText(TokenReader(tokenizer)), ""
        for count, token in enumerate(tokens, 1):
            given += stream.push(token)
            now = decoded(tokenizer, tokens[:count], shows_all=False)
            assert now.startswith(given), (seed, tokens[:count])
            tried = single if now != given else rng.sample(single, min(len(single), 8))
            probes = [plain, *([token] * number for token in tried for number in (1, 2, 3))]
            later = [decoded(tokenizer, [*tokens[:count], *probe], shows_all=False) for probe in probes]
            assert all(text.startswith(given) for text in later), (seed, tokens[:count])
            if now != given:
                num_held += 1
                assert not all(text.startswith(now) for text in later), (seed, tokens[:count], now, given)
    assert bool(num_held) == bool(single)


def test_each_new_token_decodes_a_bounded_number_of_tokens(tokenizer: HuggingFaceTokenizer) -> None:
    class Counting(TokenReader):
        num_decoded = 0

        def text(self, tokens: Sequence[int]) -> str:
            self.num_decoded += len(tokens)
            return super().text(tokens)

    tokens = tokenizer.tokenize("The lazy dog, größer and 42 others. " * 90)
    for before in ([], tokens * 8, [t for t in range(tokenizer.vocab_size) if not tokenizer.detokenize([t])] * 9):
        reader = Counting(tokenizer)
        stream = IncrementalText(reader, before)
        assert "".join([*map(stream.push, tokens), stream.finish()])
        assert reader.num_decoded < 40 * len(tokens)


@pytest.mark.parametrize("split", [1, 2])
def test_character_split_between_prompt_and_reply_is_part_of_the_reply(
    tokenizer: HuggingFaceTokenizer, split: int
) -> None:
    single = {tokenizer.bytes_of(token): token for token in reversed(range(tokenizer.vocab_size))}
    parts = [single.get(bytes([byte])) for byte in "日".encode()]
    if None in parts or tokenizer.detokenize(parts) != "日":
        pytest.skip("this tokenizer has no tokens of bytes")
    before = tokenizer.tokenize("a lazy dog")
    assert text_after(tokenizer, [*before, *parts[:split]], [*parts[split:], *parts]) == "日日"
    assert text_after(tokenizer, before, parts * 2) == "日日"


@pytest.mark.parametrize(
    ("kind", "piece"), [("SentencePiece BPE", "▁lazy"), ("unigram", "▁lazy"), ("byte-level BPE", "Ġlazy")]
)
def test_leading_space_of_a_reply_is_kept(kind: str, piece: str, tmp_path: Path) -> None:
    tokenizer = loaded(kind, tmp_path)
    token = tokenizer.id_of(piece)
    assert token is not None
    for before in (tokenizer.tokenize("The"), [*tokenizer.tokenize("The"), *[tokenizer.id_of("</s>")] * 20]):
        assert text_after(tokenizer, before, [token, token]) == " lazy lazy"
        assert Reply(tokenizer, prompt=ReplyPrompt(before)).take(Progress((token,), end="length")).text == " lazy"


def test_tokenizer_space_cleanup_does_not_retract_streamed_text(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "do", "n", "'", "t", "##t", ".", ",", "!", "s", "ve", "##ld"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    settings = {"tokenizer_class": "BertTokenizer", "clean_up_tokenization_spaces": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, rng = load_tokenizer(tmp_path, len(words)), random.Random(1)
    assert tokenizer is not None
    for _ in range(100):
        tokens = rng.choices(range(len(words)), k=30)
        cut = rng.randrange(30)
        text = text_after(tokenizer, tokens[:cut], tokens[cut:])
        assert tokenizer.detokenize(tokens[:cut]) + text == tokenizer.detokenize(tokens), (tokens, cut)


def test_stop_string_made_of_byte_tokens_ends_a_reply_immediately(joining: HuggingFaceTokenizer) -> None:
    stop = [joining.id_of(f"<0x{byte:02X}>") for byte in "本\n".encode()]
    first = [joining.id_of(f"<0x{byte:02X}>") for byte in "日".encode()]
    reply, text = Reply(joining, ("\n",), prompt=ReplyPrompt(joining.tokenize("a"))), ""
    for token in [*first, *stop]:
        assert reply.finish_reason is None
        text += reply.take(Progress((token,))).text
    assert (reply.finish_reason, text) == ("stop", "日本") and reply.is_whole
    assert reply.exact() == ("日本", [*first, *stop[:3]])


def test_bytes_that_are_not_utf8_are_not_held_back(joining: HuggingFaceTokenizer) -> None:
    lead, letter = joining.id_of("<0xE6>"), joining.id_of("<0x41>")
    stream = IncrementalText(TokenReader(joining), joining.tokenize("a"))
    assert [stream.push(token) for token in [letter, lead, letter, *[lead] * 100]] == ["", "", "���", *"�" * 100]
    assert (stream.push(joining.id_of("a")), stream.finish()) == ("a", "")


def test_replacement_characters_written_by_the_model_are_kept(tokenizer: HuggingFaceTokenizer) -> None:
    before, tokens = tokenizer.tokenize("a"), tokenizer.tokenize("a�b��")
    whole = decoded(tokenizer, [*before, *tokens], shows_all=False)
    assert text_after(tokenizer, before, tokens) == less(whole, decoded(tokenizer, before, shows_all=False))
    if "byte" in repr(tokenizer._codec._tokenizer.decoder).lower():  # type: ignore[attr-defined]
        assert whole.count("�") == 3


@given(TEXTS)
def test_streamed_pieces_concatenate_to_the_text_and_split_no_character(text: str) -> None:
    pieces = pieces_of(BYTES.tokenize(text), BYTES)
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


@given(st.lists(st.integers(0, 300), max_size=200))
@example([0xE2, 0x82] * 60)
@example([0x80] * 90)
def test_streamed_pieces_of_random_bytes_concatenate_to_the_text(tokens: list[int]) -> None:
    assert "".join(pieces_of(tokens, BYTES)) == BYTES.detokenize(tokens)


@given(st.lists(st.integers(0, 2047), max_size=80))
def test_streamed_pieces_of_random_tokens_concatenate_to_the_text(tokens: list[int]) -> None:
    assert "".join(pieces_of(tokens, SHIPPED)) == SHIPPED.detokenize(tokens)


def test_character_is_returned_as_soon_as_it_is_complete() -> None:
    stream = IncrementalText(TokenReader(BYTES))
    assert [stream.push(token) for token in "a€�b".encode()] == ["a", "", "", "€", "", "", "�", "b"]
    assert not stream.holds_back


@given(TEXTS, st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5), max_size=60))
def test_text_ends_at_the_first_stop_string_however_it_is_split(text: str, stops: list[str], sizes: list[int]) -> None:
    ends = [(position + len(stop), position) for stop in stops if (position := text.find(stop)) >= 0]
    matcher, given_out, start = StopStrings(stops), "", 0
    for size in [*sizes, len(text)]:
        given_out += matcher.push(text[start : start + size])
        start += size
        if matcher.found is not None:
            break
    given_out += matcher.finish()
    if not ends:
        assert (given_out, matcher.found) == (text, None)
    else:
        end, start = min(ends)  # the stop string that is complete first
        assert (given_out, matcher.found) == (text[:start], text[start:end])


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["abc"])
    assert [matcher.push(piece) for piece in ("xa", "b", "d", "ab", "c", "z")] == ["x", "", "abd", "", "", ""]
    assert matcher.found == "abc" and matcher.finish() == ""
