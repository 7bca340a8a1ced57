"""In memory shared by KV blocks and states, stale bytes of one are never read by the other."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.step.memory import CacheMemory
from megatron_mamba_cache.step.runner import StepRunner
from megatron_mamba_cache.step.step import Step
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_hybrid, with_one_budget
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, make_workload, run_workload
from tests.recurrences.toy import on_cpu

NUM_SEEDS = 4


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[SlabSpace]:
    """Fill all memory with NaN first, as if every slab had held states; return the spaces."""
    spaces: list[SlabSpace] = []
    initialise = CacheMemory.__init__

    def spoil(memory: CacheMemory, *args: Any, **settings: Any) -> None:
        initialise(memory, *args, **settings)
        space = memory.pools.space
        assert isinstance(space, SlabSpace)
        for states in memory.state_pool.tensors:
            states.fill_(math.nan)
        memory.kv_buffer[:, :, : memory.dummy_block] = math.nan
        space._slabs.held_states[:] = [True] * space.num_slabs
        spaces.append(space)

    monkeypatch.setattr(CacheMemory, "__init__", spoil)
    return spaces


@pytest.fixture
def num_checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Assert at the start of each step that its requests' KV blocks hold no NaN; return the number of blocks."""
    looked_at: Counter[str] = Counter()
    begin = StepRunner.begin

    def checked(runner: StepRunner, step: Step) -> Step:
        begun = begin(runner, step)
        for request in step.requests:
            blocks = runner.memory.kv_buffer[:, :, request.block_ids]
            assert not blocks.isnan().any(), f"blocks {request.block_ids} of request {request.request_id}"
            looked_at["blocks"] += len(request.block_ids)
        return begun

    monkeypatch.setattr(StepRunner, "begin", checked)
    return looked_at


@pytest.mark.parametrize(
    ("name", "num_drafts", "form"),
    [
        ("one_budget", 3, "dense"),
        pytest.param("one_budget", 0, "dense", marks=pytest.mark.long),
        ("disturbed_budget", 0, "dense"),
        pytest.param("disturbed_budget", 3, "dense", marks=pytest.mark.long),
        pytest.param("one_budget", 3, "toy", marks=[on_cpu, pytest.mark.long]),
        pytest.param("disturbed_budget", 0, "toy", marks=[on_cpu, pytest.mark.long]),
        pytest.param("one_budget", 3, "gated delta", marks=pytest.mark.long),
        ("disturbed_budget", 0, "gated delta"),
    ],
)
def test_tokens_match_the_oracle_when_freed_memory_is_filled_with_nan(
    name: str, num_drafts: int, form: str, spoiled: list[SlabSpace], num_checked: Counter[str]
) -> None:
    num_compared = 0
    for seed in range(20, 20 + NUM_SEEDS):
        work = make_workload(FLAVOURS[name], seed, num_drafts, models=MODEL_FORMS[form])
        num_compared += run_workload(work).tally.num_compared
    print(f"{num_compared} tokens compared, {len(spoiled)} memories, {num_checked}")
    assert num_compared > 200 and len(spoiled) >= NUM_SEEDS and num_checked["blocks"] > 500


def test_overlapped_steps_read_no_stale_memory_in_new_blocks(
    spoiled: list[SlabSpace], num_checked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    subject = tiny_hybrid()
    config = replace(cache_config(subject.sizes), num_cuda_graphs=3)
    run = EngineRun.start(subject, with_one_budget(config, subject.shape, 30))
    for request_id in range(3):
        run.add(request_id, some_tokens(20 + 3 * request_id, seed=request_id), 100)
    num_ahead = 0
    while run.engine.has_unfinished_requests():
        run.step()
        num_ahead += run.context.overlapped_step is not None
    print(f"{num_ahead} steps overlapped, {len(spoiled)} memories, {num_checked}")
    assert num_ahead > 90 and num_checked["blocks"] > 500
    run.assert_exact()
