"""Drafts of a multi-token prediction head cost no cache hit, given the same numbers of KV blocks and state slots."""

from dataclasses import replace

import pytest

from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_hybrid
from tests.mcore.mtp_drafters import CheckedMTPDrafter, with_head
from tests.mcore.noisy_drafter import noisy_texts
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, Workload, add_due, make_workload

COUNTERS = ("prompt_tokens_skipped", "prompt_tokens_matched", "states_restored", "states_published")
NUM_TOKENS = 20


def talk(run: EngineRun) -> None:
    """Run prompts one after another: repeats, branches and next turns, each of which finds some cached text."""
    first = some_tokens(70)
    prompts = [first, first, first[:40] + some_tokens(20, seed=1), some_tokens(33, seed=2)]
    for request_id, prompt in enumerate(prompts):
        run.run(request_id, prompt, NUM_TOKENS)
    for earlier in (0, 2, 3, 4):
        turn = run.prompts[earlier] + run.tokens(earlier) + some_tokens(7, seed=earlier)
        run.run(len(run.prompts), turn, NUM_TOKENS)


@pytest.mark.parametrize("form", ["window", "replay"])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_hits_are_those_without_drafts(form: str, accuracy: float) -> None:
    subject = tiny_hybrid()
    sizes = {"kv_blocks": 60, "cached_states": 24, "draft_states": form}
    plain = EngineRun.start(subject, cache_config(subject.sizes, **sizes))
    talk(plain)
    texts = {request_id: prompt + plain.tokens(request_id) for request_id, prompt in plain.prompts.items()}
    known = noisy_texts(texts, accuracy=accuracy, vocab_size=subject.sizes.vocab_size)
    drafter = CheckedMTPDrafter(with_head(subject), known=known, share=1.0)
    drafts = {"num_speculative_tokens": 3, "adaptive_drafts": False}
    run = EngineRun.start(subject, cache_config(subject.sizes, **sizes, **drafts), drafter=drafter)
    talk(run)
    drafter.assert_entries_are_right()
    assert run.counters.drafting_failures == 0
    assert (run.counters.accepted_tokens > 0) == (accuracy > 0)
    for name in COUNTERS:
        assert getattr(run.counters, name) == getattr(plain.counters, name) > 0
    for request_id in plain.prompts:
        assert run.tokens(request_id) == plain.tokens(request_id)
        assert run.engine.cached_tokens(request_id) == plain.engine.cached_tokens(request_id)


@pytest.mark.parametrize("form", ["dense", "gated delta", pytest.param("experts", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["strides", "tight_blocks"])
def test_each_request_in_turn_has_the_hits_without_drafts(name: str, form: str) -> None:
    """States are replayed, because draft windows take slots, of which there are few."""
    num_skipped = num_accepted = 0
    for seed in range(40, 44):
        work = make_workload(FLAVOURS[name], seed, 1 + seed % 5, models=MODEL_FORMS[form], replays=True, has_head=True)
        plain = in_turn(replace(work, config=replace(work.config, num_speculative_tokens=0)))
        texts = {request_id: prompt + plain.tokens(request_id) for request_id, prompt in plain.prompts.items()}
        known = noisy_texts(texts, accuracy=0.8, vocab_size=work.subject.sizes.vocab_size, seed=seed)
        drafter = CheckedMTPDrafter(work.subject, known=known)
        run = in_turn(work, drafter)
        assert not drafter.failures and run.counters.drafting_failures == 0
        for request_id in plain.prompts:
            assert run.tokens(request_id) == plain.tokens(request_id)
            assert run.engine.cached_tokens(request_id) == plain.engine.cached_tokens(request_id)
        num_skipped += run.counters.prompt_tokens_skipped
        num_accepted += run.counters.accepted_tokens
    assert num_skipped and num_accepted


def in_turn(work: Workload, drafter: CheckedMTPDrafter | None = None) -> EngineRun:
    """Run the requests of a workload one after another."""
    run = EngineRun.start(work.subject, work.config, drafter=drafter)
    for request_id, arrival in enumerate(work.arrivals):
        add_due(work, run, {request_id: replace(arrival, step=0)})
        run.finish()
    return run
