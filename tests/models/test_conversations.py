"""Conversations match transformers token by token under all settings of the engine."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.noisy_drafter import NoisyDrafter
from tests.models.conversations import DRAFTS, Subject, asked, converse
from tests.models.tiny_checkpoints import tiny_checkpoint

SMALLEST = "qwen3_5-5"
CASES = ("qwen3_next-7", "qwen3_5-3", "qwen3_5_moe-1", "qwen3_5_whole-1", "qwen3_5_moe_whole-3")
# dense layers among those with experts, key heads shared by 1 to 4 value heads, tied and not
PREFILL_TOKENS = (5, 97, *(pytest.param(count, marks=pytest.mark.long) for count in (31, 63, 64, 65, 130)))
"""Most tokens of a step: prompts are cut at all kinds of offsets, within chunks of the scan and at their ends."""
FEW = {"kv_blocks": 11, "cached_states": 3, "max_requests": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "without a cache": {"prefix_caching": False},
    "cached": {"boundary_stride": 1},
    "drafted": DRAFTS,
    "drafted without a cache": {**DRAFTS, "prefix_caching": False},
    "drafted and chunked": {**DRAFTS, "max_tokens": 37, "align_prefill_chunks": False},
    "evicted": FEW,
    "drafted and evicted": {**DRAFTS, **FEW},
}
OF_WHOLE_MODELS = ("cached", "drafted and evicted")
"""Settings of multimodal checkpoints, whose layers equal those of text-only ones; the others are long tests."""


def is_default(case: str, name: str) -> bool:
    """Return False for a long test. Drafted conversations are evicted with every model, others with one of experts."""
    return name in OF_WHOLE_MODELS if "whole" in case else name != "evicted" or "moe" in case


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Write and load each checkpoint once."""
    return Subject.load(tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        pytest.param(case, name, marks=() if is_default(case, name) else pytest.mark.long)
        for case in CASES
        for name in SETTINGS
    ],
    indirect=["subject"],
    scope="module",
)
def test_multi_turn_conversations_match_transformers(subject: Subject, name: str) -> None:
    settings = SETTINGS[name]
    run, is_short = subject.start(**settings), "kv_blocks" in settings
    converse(subject, run, num_others=2 if is_short else 0)
    subject.assert_as_in_transformers(run)
    counters = run.context.snapshot().counters
    assert (counters.draft_tokens > 0) is ("num_speculative_tokens" in settings)
    if is_short:
        assert counters.states_evicted > 0 and counters.kv_blocks_evicted > 0
    else:
        assert (counters.prompt_tokens_skipped > 0) is settings.get("prefix_caching", True)


def test_partly_wrong_drafts_do_not_change_tokens(subject: Subject) -> None:
    plain = subject.start()
    converse(subject, plain)
    texts = {request_id: [*prompt, *plain.tokens(request_id)] for request_id, prompt in plain.prompts.items()}
    drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=subject.case.vocab_size)
    run = subject.start(drafter=drafter, **DRAFTS)
    converse(subject, run)
    subject.assert_as_in_transformers(run)
    assert 0.4 < run.counters.acceptance_rate < 0.9 and run.counters.decode_states_published > 0


@pytest.mark.parametrize("max_tokens", PREFILL_TOKENS)
def test_prompts_split_into_chunks_at_any_offset_match_transformers(subject: Subject, max_tokens: int) -> None:
    run = subject.start(max_tokens=max_tokens, align_prefill_chunks=False)
    rng, vocab, block = random.Random(100 + max_tokens), subject.case.vocab_size, subject.case.block_size
    text = [rng.randrange(vocab) for _ in range(2 * block + 23)]
    run.run(0, text, asked())
    run.run(1, text, asked())
    run.run(2, [*text[: block + 40], *text[:50]], asked())
    assert run.engine.cached_tokens(1) == (len(text) - 1) // block * block
    subject.assert_as_in_transformers(run)
    run.assert_nothing_held()


@pytest.mark.long
def test_prefill_chunk_size_does_not_change_tokens(tmp_path: Path) -> None:
    subject = Subject.load(tiny_checkpoint(SMALLEST), tmp_path)
    rng, vocab, block = random.Random(1), subject.case.vocab_size, subject.case.block_size
    text = [rng.randrange(vocab) for _ in range(block + 11)]
    whole = subject.start(max_tokens=2 * block)
    whole.run(0, text, asked())
    subject.assert_as_in_transformers(whole)
    for max_tokens in range(1, block + 11):
        run = subject.start(max_tokens=max_tokens, align_prefill_chunks=False, max_requests=1)
        run.run(0, text, asked())
        assert run.tokens(0) == whole.tokens(0), max_tokens
        assert run.finished[0].generated_log_probs == pytest.approx(whole.finished[0].generated_log_probs, abs=1e-4)
        run.run(1, text, asked())
        assert run.engine.cached_tokens(1) == block and run.tokens(1) == whole.tokens(0), max_tokens
