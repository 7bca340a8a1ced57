"""Text out of tokens: no half characters, nothing of a stop string, and all of the rest."""

from hypothesis import example, given
from hypothesis import strategies as st

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.models.tokenizers.token_bytes import REPLACEMENT
from megatron_mamba_cache.models.tokenizers.token_reader import TokenReader
from megatron_mamba_cache.server.text_stream import IncrementalText, StopStrings

BYTES = ByteTokenizer()
SHIPPED = load_tokenizer(SHIPPED_MODEL, 2048)
TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n�"), max_size=60)


def pieces_of(tokens: list[int], tokenizer: object) -> list[str]:
    stream = IncrementalText(TokenReader(tokenizer))
    return [*(stream.push(token) for token in tokens), stream.finish()]


@given(TEXTS)
def test_pieces_of_bytes_are_the_text_and_no_piece_has_half_a_character(text: str) -> None:
    pieces = pieces_of(BYTES.tokenize(text), BYTES)
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


@given(st.lists(st.integers(0, 255), max_size=200))
@example([0xE2, 0x82] * 60)
@example([0x80] * 90)
def test_pieces_of_any_bytes_are_the_text_of_all(tokens: list[int]) -> None:
    assert "".join(pieces_of(tokens, BYTES)) == BYTES.detokenize(tokens)


@given(st.lists(st.integers(0, 2047), max_size=80))
def test_pieces_of_any_tokens_are_the_text_of_all(tokens: list[int]) -> None:
    assert "".join(pieces_of(tokens, SHIPPED)) == SHIPPED.detokenize(tokens)


def test_a_complete_character_is_given_out_at_once() -> None:
    stream = IncrementalText(TokenReader(BYTES))
    assert [stream.push(token) for token in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert not stream.holds_back


@given(TEXTS, st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5), max_size=60))
def test_text_ends_where_the_first_complete_stop_string_begins_however_it_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
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
        end, start = min(ends)  # the one that is complete first
        assert (given_out, matcher.found) == (text[:start], text[start:end])


def test_nothing_of_a_stop_string_is_given_out_before_it_is_known_to_be_none() -> None:
    matcher = StopStrings(["abc"])
    assert [matcher.push(piece) for piece in ("xa", "b", "d", "ab", "c", "z")] == ["x", "", "abd", "", "", ""]
    assert matcher.found == "abc" and matcher.finish() == ""
