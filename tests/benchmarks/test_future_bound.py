"""The upper bound with knowledge of the future is exact in simple cases and never below a real cache."""

import random
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from megatron_mamba_cache.planning.plan import BlockText, replay
from megatron_mamba_cache.policy.identifiers import BlockKey
from tests.command_line.command_runs import REPOSITORY

pytest.importorskip("scipy")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return import_module("loads.future_bound")


def text(*keys: int, prompt_len: int | None = None) -> BlockText:
    """Return a text in blocks of 10 tokens; the last token of the text never completes a block."""
    length = 10 * len(keys) + 1
    return BlockText([BlockKey(key) for key in keys], length if prompt_len is None else prompt_len, length)


def most(bound: ModuleType, texts: list[BlockText], budget: int) -> float:
    """Return the bound for blocks of 1 byte and states of 4 bytes."""
    return bound.future_bound(texts, budget, 10, 1, 4)


def test_bound_counts_no_savings_before_a_prefix_is_computed(bound: ModuleType) -> None:
    assert most(bound, [text(1, 2), text(3, 4)], 1000) == 0
    assert most(bound, [text(1, 2), text(1, 2, 3), text(1, 5)], 1000) == pytest.approx(20 + 10)


def test_bound_never_skips_the_last_prompt_token(bound: ModuleType) -> None:
    again = text(1, 2, prompt_len=20)
    assert most(bound, [again, again], 1000) == pytest.approx(10)


def test_bound_limits_cached_bytes_while_a_request_runs(bound: ModuleType) -> None:
    texts = [text(1, 2), text(8, 9), text(1, 2)]
    takes = 3 + 4  # the running request's blocks and its live state
    assert most(bound, texts, takes + 2 + 4) == pytest.approx(20)
    assert most(bound, texts, takes + 3) == pytest.approx(10)  # half of the blocks and half of the state
    assert most(bound, texts, takes) == pytest.approx(0)


def test_bound_keeps_as_much_text_as_fits(bound: ModuleType) -> None:
    texts = [text(1, 2, 3, 4), text(8), text(1, 2, 3, 4), text(8)]
    with_short, with_long = 12 - 6, 12 - 9
    assert most(bound, texts, 12) == pytest.approx(40 * with_short / 8 + 10 * with_long / 5)
    assert most(bound, texts, 1000) == pytest.approx(50)


def test_bound_ignores_a_request_that_does_not_fit(bound: ModuleType) -> None:
    long = text(*range(1, 21))
    assert most(bound, [long, long, text(30), text(30)], 20) == pytest.approx(10)


def test_no_eviction_rule_or_split_exceeds_the_bound(bound: ModuleType) -> None:
    sizes = import_module("loads.sized_cache").MODELS["8b"]
    texts = _conversations(random.Random(0))
    prompt_tokens = sum(text.prompt_len for text in texts)
    for budget in (2 * 10**9, 4 * 10**9):
        limit = bound.future_bound(texts, budget, 256, sizes.block_bytes, sizes.state_bytes)
        spaces = [sizes.slabs(budget), *(sizes.split(budget, share) for share in (0.2, 0.5, 0.8))]
        for space in spaces:
            saved = replay(texts, sizes.make_cache(space, "cost", 1), 8192)
            assert 0 < saved.skipped_tokens <= limit * (1 + 1e-9)
            assert saved.prompt_tokens == prompt_tokens
    unlimited = replay(texts, sizes.make_cache(sizes.slabs(10**12), "cost", 1), 8192)
    limit = bound.future_bound(texts, 10**12, 256, sizes.block_bytes, sizes.state_bytes)
    assert 0.8 * limit < unlimited.skipped_tokens <= limit * (1 + 1e-9)


def test_recorded_bound_needs_scipy(bound: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("recorded_hit_rates")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    part = import_module("loads.recorded_texts").RecordedPart(Path("unread"))
    assert module.bound_share(module.Case(part, "8b", 1.0)) is None


def _conversations(random: random.Random) -> list[BlockText]:
    """Return turns of conversations in random order; some conversations begin with the same text."""
    numbers = iter(range(1, 10**6))
    histories = [[BlockKey(next(numbers)) for _ in range(4)] for _ in range(3)]
    texts = []
    for _ in range(200):
        history = random.choice(histories)
        prompt_len = len(history) * 256 + random.randrange(1, 2000)
        length = prompt_len + random.randrange(1, 600)
        keys = history + [BlockKey(next(numbers)) for _ in range(length // 256 - len(history))]
        texts.append(BlockText(keys, prompt_len, length))
        if random.random() < 0.3:
            histories.append(keys)
        elif len(keys) < 60:
            histories[histories.index(history)] = keys
    return texts
