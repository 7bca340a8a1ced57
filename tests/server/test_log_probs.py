"""Log-probs of tokens that are parts of characters: their bytes are the reply's, and their offsets fit its text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.models.tokenizers.token_bytes import token_bytes
from megatron_mamba_cache.server.backend import GenerationRequest, Progress
from megatron_mamba_cache.server.formats import ChatFormat, CompletionFormat, StreamSettings, _best
from megatron_mamba_cache.server.job import Choice
from megatron_mamba_cache.server.reply import Reply, TokenInfo

SHIPPED = load_tokenizer(SHIPPED_MODEL, 2048)
TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n"), min_size=1, max_size=20)
REQUEST = GenerationRequest((1,), 100, num_log_probs=1)


def described(tokenizer: Any, tokens: list[int], kind: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return a reply's text and the log-probs of all its events."""
    choice = Choice(0, 0, REQUEST, Reply(tokenizer))
    form = kind("m", StreamSettings())
    events = []
    for index, token in enumerate(tokens):
        end = "length" if index == len(tokens) - 1 else None
        progress = Progress((token,), log_probs=(-1.0,), alternatives=({"\ufffd": -1.0, "a": -2.0},), end=end)
        events.append(form.chunk(choice, choice.reply.take(progress))["choices"][0]["logprobs"])
    return choice.reply.text, events


@pytest.mark.parametrize("tokenizer", [SHIPPED, ByteTokenizer()], ids=["shipped", "bytes"])
@given(text=TEXTS)
def test_the_bytes_of_a_chats_tokens_are_those_of_its_text(tokenizer: Any, text: str) -> None:
    found, events = described(tokenizer, tokenizer.tokenize(text), ChatFormat)
    content = [token for event in events for token in event["content"]]
    assert found == text and b"".join(bytes(token["bytes"]) for token in content) == text.encode()
    assert [best["bytes"] for best in content[0]["top_logprobs"]] == [None, [97]]


@pytest.mark.parametrize("tokenizer", [SHIPPED, ByteTokenizer()], ids=["shipped", "bytes"])
@given(text=TEXTS)
def test_the_offset_of_a_token_is_that_of_its_first_character(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.tokenize(text)
    _, events = described(tokenizer, tokens, CompletionFormat)
    offsets = [offset for event in events for offset in event["text_offset"]]
    before = [b"".join(tokenizer.bytes_of(token) for token in tokens[:count]) for count in range(len(tokens))]
    assert offsets == [len(content.decode(errors="ignore")) for content in before]


NAMES: list[tuple[str, str, bytes | None]] = [
    ("ab", "ab", b"ab"),
    ("<0xE2>", "\ufffd", b"\xe2"),
    ("âĤ", "\ufffd", b"\xe2\x82"),
    ("\ufffd", "\ufffd", b"\xef\xbf\xbd"),
    ("中?", "\ufffd", None),
]


@pytest.mark.parametrize(("name", "text", "expected"), NAMES)
def test_bytes_come_from_the_tokens_name_where_its_text_tells_none(
    name: str, text: str, expected: bytes | None
) -> None:
    assert token_bytes(name, text) == expected


def test_ids_without_a_meaning_have_no_bytes_and_those_without_a_tokenizer_their_digits() -> None:
    assert ByteTokenizer(300).bytes_of(299) is None
    assert TokenIdTokenizer(300).bytes_of(299) == b"299"


def test_a_token_keeps_its_place_among_the_best_though_another_reads_like_it() -> None:
    token = TokenInfo(7, "\ufffd", None, 0, -4.0, {"\ufffd": -0.5, "a": -2.0})
    assert _best(token) == {"\ufffd": -4.0, "another:\ufffd": -0.5, "a": -2.0}
    assert _best(TokenInfo(7, "b", None, 0, -2.0, {"b": -2.0})) == {"b": -2.0}
