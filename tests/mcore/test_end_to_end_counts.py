"""Counts of computed prompt tokens, in runs whose tokens match the oracle."""

import random
from collections.abc import Sequence

import pytest

from megatron_mamba_cache.step.step import Step
from tests.mcore.engine_runs import EngineRun, cache_config, tiny_hybrid

VOCAB = 512


def distinct_tokens(num_tokens: int, seed: int) -> list[int]:
    """Return tokens without repetition."""
    return random.Random(seed).sample(range(VOCAB), num_tokens)


def start_run(block_size: int, *, ssm_chunk_size: int | None = None, **settings: object) -> EngineRun:
    """Return an engine whose blocks are one SSM chunk each by default."""
    subject = tiny_hybrid(vocab_size=VOCAB, ssm_chunk_size=ssm_chunk_size or block_size)
    roomy = {"max_tokens": 2048, "max_sequence_length": 2048} | settings
    return EngineRun.start(subject, cache_config(subject.sizes, block_size_tokens=block_size, **roomy))


def computed_tokens(run: EngineRun, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Run prompts one after another and return the number of prompt tokens computed for each."""
    return [run.run(index, prompt, 4) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("ssm_chunk_size", [64, 256])
def test_requests_that_share_a_prefix_compute_2008_of_3800_tokens(ssm_chunk_size: int) -> None:
    a, b = distinct_tokens(512, 0)[:256], distinct_tokens(512, 0)[256:]
    r1, r2, r3 = (distinct_tokens(288, seed) for seed in (1, 2, 3))
    prompts = [a + r3[:44], a + b + r1, a + b + r2, a + b + r3, a + b + r1[:256] + distinct_tokens(332, 4)]
    run = start_run(256, ssm_chunk_size=ssm_chunk_size)
    assert computed_tokens(run, prompts) == [300, 544, 544, 288, 332]
    assert run.counters.prefill_tokens_computed == 2008
    assert sum(map(len, prompts)) == 3800
    run.assert_exact()


def test_simultaneous_requests_that_share_a_prefix_compute_1752_tokens() -> None:
    a, b = distinct_tokens(512, 0)[:256], distinct_tokens(512, 0)[256:]
    r1, r2, r3 = (distinct_tokens(288, seed) for seed in (1, 2, 3))
    prompts = [a + r3[:44], a + b + r1, a + b + r2, a + b + r3, a + b + r1[:256] + distinct_tokens(332, 4)]
    run = start_run(256, ssm_chunk_size=64)
    for index, prompt in enumerate(prompts):
        run.add(index, prompt, 4)
    run.finish()
    assert run.counters.prefill_tokens_computed == 1752
    run.assert_exact()


@pytest.mark.parametrize("max_tokens", [2048, 300])
def test_8_simultaneous_requests_compute_their_shared_prefix_once(max_tokens: int) -> None:
    shared = distinct_tokens(512, 0)
    run = start_run(64, max_tokens=max_tokens)
    for index in range(8):
        run.add(index, shared + distinct_tokens(40, 1 + index), 4)
    run.finish()
    assert run.counters.prefill_tokens_computed == 512 + 8 * 40
    run.assert_exact()


def test_repeated_prompts_of_whole_blocks_compute_1024_of_1536_tokens() -> None:
    a, b = distinct_tokens(512, 0)[:256], distinct_tokens(512, 0)[256:]
    run = start_run(256, ssm_chunk_size=64)
    assert computed_tokens(run, [a, a, a + b, a + b]) == [256, 256, 256, 256]
    run.assert_exact()


def test_repeated_prompt_computes_only_tokens_after_its_last_full_block() -> None:
    prompt = distinct_tokens(4 * 32 + 5, 0)
    run = start_run(32)
    assert computed_tokens(run, [prompt, prompt]) == [133, 5]
    assert [run.engine.cached_tokens(index) for index in (0, 1)] == [0, 128]
    run.assert_exact()


def test_repeated_prompt_of_whole_blocks_computes_one_block() -> None:
    prompt = distinct_tokens(3 * 32, 0)
    run = start_run(32)
    assert computed_tokens(run, [prompt, prompt]) == [96, 32]
    run.assert_exact()


def test_prefill_resumes_at_the_last_cached_state_even_if_more_kv_is_cached() -> None:
    prompt = distinct_tokens(3 * 32 + 5, 0)
    run = start_run(32, boundary_stride=1)
    run.add(0, prompt)
    run.step()
    blocks = run.context.running_requests[0].block_ids[:3]
    run.finish()
    allocator = run.context.mamba_slot_allocator
    assert [allocator.has_state(block) for block in blocks] == [True, True, True]
    for block in blocks[1:]:
        allocator.invalidate_block(block)
    assert run.run(1, prompt) == 2 * 32 + 5
    assert run.engine.cached_tokens(1) == 32
    run.assert_exact()


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_prompt_shorter_than_the_convolution_window_is_served(num_tokens: int) -> None:
    run = start_run(32)
    prompt = distinct_tokens(num_tokens, 0)
    assert num_tokens < run.subject.shape.recurrent[0].recurrence.d_conv
    assert computed_tokens(run, [prompt, prompt]) == [num_tokens, num_tokens]
    run.assert_exact()


@pytest.mark.parametrize("carry", [0, 1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("align", [True, False])
def test_splitting_a_prompt_into_prefill_chunks_changes_no_token(carry: int, align: bool) -> None:
    run = start_run(32, ssm_chunk_size=16, max_tokens=64, align_prefill_chunks=align)
    run.add(0, distinct_tokens(64 - carry, 0))
    run.add(1, distinct_tokens(101, 1))
    run.step()
    assert [request.computed for request in run.context.running_requests] == ([64 - carry, carry] if carry else [64])
    run.finish()
    run.assert_exact()


def test_ten_identical_prompts_share_one_copy_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = distinct_tokens(3 * 32, 0)
    run = start_run(32, max_requests=10)
    for index in range(10):
        run.add(index, prompt)
    run.step()
    assert [request.request_id for request in run.context.running_requests] == [0]
    kv, after_first = run.context.cache.kv, run.context.snapshot().kv_blocks
    shared = run.context.running_requests[0].block_ids[:3]
    plan = run.context.runner.plan
    seen = []

    def look() -> Step:
        seen.append((run.context.snapshot().kv_blocks, [kv.num_refs(block) for block in shared]))
        return plan()

    monkeypatch.setattr(run.context.runner, "plan", look)
    run.step()
    assert seen == [(after_first, [10, 10, 10])]
    run.finish()
    assert run.counters.prefill_tokens_computed == 96 + 9 * 32
    assert len({tuple(run.tokens(index)) for index in range(10)}) == 1
    run.assert_exact()


@pytest.mark.parametrize("align", [True, False])
def test_chunked_prefill_caches_the_state_after_the_last_full_block(align: bool) -> None:
    prompt = distinct_tokens(400, 0) + distinct_tokens(400, 1)
    run = start_run(256, ssm_chunk_size=64, max_tokens=300, align_prefill_chunks=align)
    run.add(0, prompt)
    ends = []
    while not ends or ends[-1] < 800:
        run.step()
        ends.append(run.context.running_requests[0].computed)
    assert ends == ([256, 512, 800] if align else [300, 600, 800])
    assert run.context.mamba_slot_allocator.has_state(run.context.running_requests[0].block_ids[2])
    run.finish()
    assert run.run(1, prompt) == 800 - 768
    run.assert_exact()
