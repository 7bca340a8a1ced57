"""Drafts are counted per request over its whole life, and counts stay available after it leaves."""

from megatron_mamba_cache.mcore.request_states import DraftCounts
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_hybrid
from tests.mcore.noisy_drafter import NoisyDrafter

NUM_REQUESTS = 4
NUM_TOKENS = 40


def start(accuracy: float, **settings: int) -> EngineRun:
    """Start an engine that drafts the replies of an earlier run, a given share of them right."""
    subject = tiny_hybrid()
    plain = EngineRun.start(subject)
    for request_id in range(NUM_REQUESTS):
        plain.add(request_id, some_tokens(20 + request_id, seed=request_id), NUM_TOKENS)
    plain.finish()
    texts = {number: [*plain.prompts[number], *plain.tokens(number)] for number in range(NUM_REQUESTS)}
    drafter = NoisyDrafter(texts, accuracy=accuracy, vocab_size=96)
    config = cache_config(subject.sizes, num_speculative_tokens=4, **settings)
    run = EngineRun.start(subject, config, drafter=drafter)
    for request_id, prompt in plain.prompts.items():
        run.add(request_id, prompt, NUM_TOKENS)
    return run


def counts(run: EngineRun) -> list[DraftCounts]:
    return [run.engine.draft_counts(request_id) for request_id in range(NUM_REQUESTS)]


def test_correct_drafts_save_one_decode_step_per_accepted_token() -> None:
    run = start(accuracy=1.0)
    assert counts(run) == [DraftCounts()] * NUM_REQUESTS
    run.finish()
    # One token comes from the prefill and one from each decode request; all others were drafted.
    assert all(found.drafted == found.accepted for found in counts(run))
    assert sum(found.accepted for found in counts(run)) == NUM_REQUESTS * (NUM_TOKENS - 1) - run.counters.decode_rows


def test_rejected_drafts_are_counted_as_drafted_but_not_accepted() -> None:
    run = start(accuracy=0.0)
    run.finish()
    assert all(found.drafted > 0 == found.accepted for found in counts(run))


def test_draft_counts_survive_evictions_and_sum_to_the_engine_counters() -> None:
    run = start(accuracy=0.7, kv_blocks=10, paused_blocks=0)
    run.finish()
    run.assert_exact()
    assert run.counters.requests_evicted > 0
    assert sum(found.drafted for found in counts(run)) == run.counters.draft_tokens
    assert sum(found.accepted for found in counts(run)) == run.counters.accepted_tokens
    assert all(0 < found.accepted < found.drafted for found in counts(run))


def test_draft_counts_of_an_unknown_request_are_zero() -> None:
    assert EngineRun.start(tiny_hybrid()).engine.draft_counts(7) == DraftCounts()
