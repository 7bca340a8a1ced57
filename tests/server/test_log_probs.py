"""Log-probs of tokens that are parts of characters: their bytes join to the reply and offsets match its text."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.models.tokenizers.token_reader import token_bytes
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.formats import ChatFormat, CompletionFormat, StreamSettings, _best
from megatron_mamba_cache.server.job import Choice
from megatron_mamba_cache.server.reply import Reply, TokenInfo

SHIPPED = load_tokenizer(SHIPPED_MODEL, 2048)
TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n"), min_size=1, max_size=20)
REQUEST = RequestSpec(0, np.array([1]), 101, SamplingSettings())


def described(tokenizer: Any, tokens: list[int], kind: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a reply and the log-probs in all of its events."""
    choice = Choice(0, 0, REQUEST, Reply(tokenizer), num_log_probs=1)
    form = kind("m", StreamSettings())
    (letter,) = tokenizer.tokenize("a")
    events = []
    for index, token in enumerate(tokens):
        end = "length" if index == len(tokens) - 1 else None
        progress = Progress((token,), log_probs=(-1.0,), alternatives=({letter: -2.0} | {token: -1.0},), end=end)
        events.append(form.chunk(choice, choice.reply.take(progress))["choices"][0]["logprobs"])
    return choice.reply.text, events


@pytest.mark.parametrize("tokenizer", [SHIPPED, ByteTokenizer()], ids=["shipped", "bytes"])
@given(text=TEXTS)
def test_concatenated_token_bytes_in_chat_log_probs_are_the_text(tokenizer: Any, text: str) -> None:
    found, events = described(tokenizer, tokenizer.tokenize(text), partial(ChatFormat, includes_reasoning=True))
    content = [token for event in events for token in event["content"]]
    assert found == text and b"".join(bytes(token["bytes"]) for token in content) == text.encode()
    *others, own = content[0]["top_logprobs"]
    assert own == {name: content[0][name] for name in ("token", "logprob", "bytes")}
    assert others == ([] if own["token"] == "a" else [{"token": "a", "logprob": -2.0, "bytes": [97]}])


@pytest.mark.parametrize("tokenizer", [SHIPPED, ByteTokenizer()], ids=["shipped", "bytes"])
@given(text=TEXTS)
def test_token_offset_is_the_index_of_its_first_character(tokenizer: Any, text: str) -> None:
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
def test_token_bytes_come_from_its_vocabulary_entry_when_its_text_is_partial(
    name: str, text: str, expected: bytes | None
) -> None:
    assert token_bytes(name, text) == expected


def test_tokens_with_unknown_ids_have_no_bytes() -> None:
    assert ByteTokenizer(300).bytes_of(299) is None
    assert TokenIdTokenizer(300).bytes_of(299) == b"299"


def test_completion_keeps_alternatives_with_equal_texts() -> None:
    part, other, third = (TokenInfo(7 + number, "\ufffd", log_prob=-0.5 - number) for number in range(3))
    letter = TokenInfo(5, "a", log_prob=-2.0)
    chosen = replace(third, alternatives=(part, other, letter))
    assert _best(chosen) == {"\ufffd": -2.5, "token_id:7": -0.5, "token_id:8": -1.5, "a": -2.0}
    assert _best(replace(part, alternatives=(part, other))) == {"\ufffd": -0.5, "token_id:8": -1.5}
    assert _best(replace(letter, alternatives=(part, other))) == {"a": -2.0, "\ufffd": -0.5, "token_id:8": -1.5}
    assert _best(replace(letter, log_prob=None)) is None
