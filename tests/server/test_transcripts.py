"""Exact tokens of earlier turns: lookup by text, tenant isolation, limits, use in prompts."""

import random

import pytest

from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
from megatron_mamba_cache.models.tokenizers.hugging_face_tokenizer import load_tokenizer
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.errors import ApiError
from megatron_mamba_cache.server.prompts import Prompt, PromptReader
from megatron_mamba_cache.server.reply import Reply, ReplyReading
from megatron_mamba_cache.server.tenants import Tenant
from megatron_mamba_cache.server.transcripts import Transcript, Transcripts

TOKENIZER = load_tokenizer(SHIPPED_MODEL, 2048)
RED, BLUE, SALTED = Tenant("red"), Tenant("blue"), Tenant("red", "salt")


def test_longest_stored_prefix_is_found() -> None:
    kept = Transcripts(10_000)
    for text in ("ab", "abcd", "abcx", "b"):
        kept.remember(RED, text, [len(text)])
    assert kept.longest(RED, "abcde") == Transcript("abcd", (4,))
    assert kept.longest(RED, "abc") == Transcript("ab", (2,))
    assert kept.longest(RED, "a") is None


def test_tenants_find_only_their_own_texts() -> None:
    kept = Transcripts(10_000)
    kept.remember(RED, "abc", [1])
    assert kept.longest(BLUE, "abcd") is None and kept.longest(SALTED, "abcd") is None


def test_stored_transcripts_are_bounded_per_owner() -> None:
    kept, rng = Transcripts(4000), random.Random(1)
    kept.remember(BLUE, "blue", [1])
    for number in range(300):
        text = f"{number} " + "x" * rng.randrange(300)
        kept.remember(rng.choice([RED, SALTED]), text, range(rng.randrange(100)))
        assert kept.num_bytes("red") <= 4000
    assert kept.num_bytes("red") > 2000 and kept.longest(BLUE, "blue!") is not None
    kept.remember(RED, "y" * 5000, [1])
    assert kept.longest(RED, "y" * 5000) is None


def test_least_recently_used_transcript_is_evicted_first() -> None:
    kept = Transcripts(10_000, max_entries=2)
    kept.remember(RED, "a", [1])
    kept.remember(RED, "b", [2])
    kept.longest(RED, "a!")
    kept.remember(RED, "c", [3])
    assert kept.longest(RED, "b") is None and kept.longest(RED, "a") and kept.longest(RED, "c")


def odd_tokens(text: str) -> list[int]:
    """Return tokens for a text that the tokenizer would never produce: one for each byte."""
    return [token for character in text for token in TOKENIZER.tokenize(character)]


def test_stored_text_keeps_its_tokens_and_only_the_rest_is_tokenized() -> None:
    reader = PromptReader(TOKENIZER, Transcripts(10_000), 4096)
    prompt, reply = reader.read(RED, "import os\n"), "def main():\n    retu"
    odd = odd_tokens(reply)
    assert odd != TOKENIZER.tokenize(reply)
    reader.remember(RED, prompt, reply, odd)
    exact = [*prompt.token_ids, *odd]
    again = reader.read(RED, "import os\n" + reply)
    assert list(again.token_ids) == exact
    longer = reader.read(RED, "import os\n" + reply + "\n    # é\n")
    assert list(longer.token_ids) == exact + TOKENIZER.tokenize("\n    # é\n")
    assert TOKENIZER.detokenize(list(longer.token_ids)) == longer.text
    assert list(reader.read(BLUE, again.text).token_ids) == TOKENIZER.tokenize(again.text)


TYPED = "import os\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument"


def test_prompt_without_a_reply_is_not_stored() -> None:
    for cut in range(1, len(TYPED)):
        transcripts = Transcripts(10_000)
        reader = PromptReader(TOKENIZER, transcripts, 4096)
        reader.remember(RED, reader.read(RED, TYPED[:cut]), "", [])
        assert transcripts.num_bytes("red") == 0  # nothing to store without a reply
        assert list(reader.read(RED, TYPED).token_ids) == TOKENIZER.tokenize(TYPED), cut


def test_stored_text_is_not_reused_when_a_token_spans_its_end() -> None:
    fresh, used = TOKENIZER.tokenize(TYPED), set()
    for cut in range(5, len(TYPED) - 1):
        reader = PromptReader(TOKENIZER, Transcripts(10_000), 4096)
        odd = odd_tokens(TYPED[4:cut])
        reader.remember(RED, reader.read(RED, TYPED[:4]), TYPED[4:cut], odd)
        found = list(reader.read(RED, TYPED).token_ids)
        if found != fresh:
            used.add(cut)
            assert found == [*TOKENIZER.tokenize(TYPED[:4]), *odd, *fresh[len(TOKENIZER.tokenize(TYPED[:cut])) :]]
    ends = {len(TOKENIZER.detokenize(fresh[:count])) for count in range(len(fresh))}
    assert used <= ends and len(used) > len(ends) / 2


def test_text_that_differs_from_the_stored_text_is_tokenized_again() -> None:
    reader = PromptReader(TOKENIZER, Transcripts(10_000), 4096)
    reader.remember(RED, reader.read(RED, "import os\n"), "import re\n", odd_tokens("import re\n"))
    changed = "import os\nimport re # and more"
    assert list(reader.read(RED, "X" + changed).token_ids) == TOKENIZER.tokenize("X" + changed)


def test_prompt_of_token_ids_is_unchanged_and_not_stored() -> None:
    transcripts = Transcripts(10_000)
    reader = PromptReader(TOKENIZER, transcripts, 4096)
    assert reader.read(RED, [5, 6]) == Prompt((5, 6), None)
    reader.remember(RED, Prompt((5, 6), None), "x", [7])
    assert transcripts.num_bytes("red") == 0


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_prompt_without_tokens_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as found:
        PromptReader(TOKENIZER, Transcripts(0), 4096).read(RED, text)
    assert found.value.status == 400


def reply_of(
    tokens: list[int], stops: tuple[str, ...] = (), end: str = "length", reading: ReplyReading | None = None
) -> Reply:
    reply = Reply(TOKENIZER, stops, frozenset({0}), reading=reading)
    for token in tokens[:-1]:
        if reply.finish_reason is None:
            reply.take(Progress((token,)))
    if reply.finish_reason is None:
        reply.take(Progress(tuple(tokens[-1:]), end=end))
    return reply


def test_exact_tokens_of_a_reply_decode_to_its_text() -> None:
    tokens = TOKENIZER.tokenize("import os\n\n\ndef main():")
    assert reply_of(tokens).exact() == ("import os\n\n\ndef main():", tokens)
    assert reply_of([*tokens, 0], end="stop").exact() == ("import os\n\n\ndef main():", tokens)
    shown = reply_of([*tokens, 0], end="stop", reading=ReplyReading(shown=None))
    assert shown.text.endswith("main():<|endoftext|>") and not shown.is_whole
    assert shown.exact() == ("import os\n\n\ndef main():", tokens)


def test_stop_string_ends_both_the_exact_tokens_and_the_text() -> None:
    reply = reply_of(TOKENIZER.tokenize("import os\n\n\ndef main():"), ("ef m",))
    text, token_ids = reply.exact()
    assert reply.text == "import os\n\n\nd" and reply.finish_reason == "stop"
    assert reply.text.startswith(text) and TOKENIZER.detokenize(token_ids) == text and token_ids


def test_trailing_partial_character_is_in_both_text_and_exact_tokens() -> None:
    half = TOKENIZER.tokenize("x€")[:-1]
    reply = reply_of(half)
    assert reply.text == "x�" and reply.exact() == ("x�", half)
