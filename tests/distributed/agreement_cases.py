"""Functions that run on a rank: agreement of ranks on decisions, and detection of ranks that diverge."""

from dataclasses import replace
from json import JSONDecodeError
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.errors import CacheBudgetError, CacheCapacityError, CacheIntegrityError, HostBudgetError
from megatron_mamba_cache.mcore import model_reading
from megatron_mamba_cache.step import memory as cache_memory
from megatron_mamba_cache.step import runner as runner_module
from tests.distributed.rank_models import Layout, parallel
from tests.mcore import engine_runs
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_sizes

STEPS_TOGETHER = 7


def capacities(layout: Layout, pattern: str, kv_blocks: list[int], states: list[int], requests: list[int]) -> tuple:
    """Return an engine's capacities where ranks can afford different ones, before a suspend and after it."""
    rank = dist.get_rank()
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes(pattern=pattern))
        bought = {"kv_blocks": kv_blocks[rank], "cached_states": states[rank], "max_requests": requests[rank]}
        run = EngineRun.start(subject, cache_config(subject.sizes, **bought))
        found = [_capacity(run)]
        run.engine.suspend()
        run.engine.resume()
        run.run(0, some_tokens(20))
        run.assert_exact()
        return *found, _capacity(run)


def _capacity(run: EngineRun) -> tuple[int, int, int, int]:
    context = run.context
    pools = context.cache.kv.num_blocks, context.block_allocator.paused_count, context.cache.slots.num_slots
    return *pools, context.max_requests


def error_of_settings(layout: Layout, settings: list[dict]) -> str:
    """Return the error that refuses an engine whose ranks have different settings.

    Args:
        settings: Of each rank; with "cache_gb", one budget.
    """
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        try:
            mine = dict(settings[dist.get_rank()])
            cache_gb = mine.pop("cache_gb", None)
            config = cache_config(subject.sizes, **mine)
            if cache_gb is not None:
                config = replace(config, cache_gb=cache_gb, num_blocks=None)
            build_engine(subject.model, config)
        except (ValueError, CacheCapacityError) as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def error_of_one_rank(layout: Layout, broken: str) -> str:
    """Return the error of an engine that the second rank alone cannot build."""
    with parallel(layout), pytest.MonkeyPatch.context() as patch:
        subject = engine_runs.hybrid(tiny_sizes())
        model = subject.model
        if dist.get_rank() == 1:
            if broken == "no model":
                model = torch.nn.Linear(1, 1)
            elif broken == "sequence_parallel":
                patch.setattr(model.config, "sequence_parallel", True)
            else:
                owner, name, error = ERRORS_OF_ONE_RANK[broken]
                patch.setattr(owner, name, Mock(side_effect=error))
        try:
            build_engine(model, cache_config(subject.sizes))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "none"


ERRORS_OF_ONE_RANK = {
    "the part's modules": (model_reading, "_part_of", ValueError("planted")),
    "attention": (cache_memory, "choose_attention", ValueError("planted")),
    "states": (cache_memory, "slab_tensors", RuntimeError("can't allocate memory")),
    "a budget": (cache_memory, "choose_attention", CacheBudgetError(1.0, 2.0, 512, num_live=4)),
    "the host's memory": (cache_memory, "choose_attention", HostBudgetError(3.0, 2**30)),
    "a file": (cache_memory, "choose_attention", FileNotFoundError(2, "No such file", "weights")),
    "another package's type": (model_reading, "_part_of", JSONDecodeError("planted", "{}", 1)),
    "step buffers": (cache_memory, "StepBuffers", RuntimeError("can't allocate memory")),
}


def error_of_a_part(layout: Layout, every: int, part: str) -> tuple[str, int]:
    """Make the second rank decide differently once; return the resulting error and the number of steps before it."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        config: CacheConfig = cache_config(subject.sizes, rank_digest_steps=every)
        run = EngineRun.start(subject, config)
        run.add(0, some_tokens(40), 60)
        run.add(1, some_tokens(25, seed=1), 60)
        for _ in range(STEPS_TOGETHER):
            run.step()
        if dist.get_rank() == 1:
            _part(run, part)
        for num_steps in range(1, 30):
            try:
                run.engine.step_modern()
            except CacheIntegrityError as error:
                return str(error), num_steps
    return "none", 0


def error_of_a_missing_request(layout: Layout, num_on_both: int) -> str:
    """Give the first rank one request more than the second; return the error that ends the step."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        run = EngineRun.start(subject, cache_config(subject.sizes, rank_digest_steps=1))
        for request_id in range(num_on_both + (dist.get_rank() == 0)):
            run.add(request_id, some_tokens(20, seed=request_id), 4)
        try:
            run.step()
        except CacheIntegrityError as error:
            return str(error)
    return "none"


def _part(run: EngineRun, how: str) -> None:
    cache = run.context.cache
    if how == "another block":
        free = cache.kv._indices._free
        free[-1], free[-2] = free[-2], free[-1]
    elif how == "another token":
        original = runner_module.advance_requests

        def advance(rows: list, kept: list, *settings: object) -> None:
            runner_module.advance_requests = original
            original(rows, [tuple(token ^ 1 for token in new) for new in kept], *settings)

        runner_module.advance_requests = advance
    else:
        cache.slots.reserve()  # which is never cancelled


def failures_of_one_drafter(layout: Layout) -> tuple[int, int]:
    """Let only the second rank's drafter fail sometimes; return the counts of failures and accepted drafts."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        config = cache_config(subject.sizes, rank_digest_steps=1, num_speculative_tokens=2)
        run = EngineRun.start(subject, config)
        drafter, calls = run.context.planner._drafter, iter(range(1, 1000))
        propose = drafter.propose

        def failing(requests: list) -> list:
            if dist.get_rank() == 1 and next(calls) % 4 == 0:
                raise RuntimeError("planted")
            return propose(requests)

        drafter.propose = failing
        run.add(0, some_tokens(8) * 3, 20)
        run.add(1, some_tokens(5, seed=1) * 4, 20)
        run.finish()
        run.assert_exact()
        return run.counters.drafting_failures, run.counters.accepted_tokens


def broadcast_outcomes(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the tokens of requests if only the first rank of the last stage samples correctly."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        found = []
        for falsified in (False, True):
            run = EngineRun.start(subject)
            if falsified:
                _falsify_elsewhere(run)
            run.add(0, some_tokens(20), 10)
            run.finish()
            found.append(run.tokens(0))
        return found[0], found[1]


def _falsify_elsewhere(run: EngineRun) -> None:
    ranks = run.context.ranks
    is_source = ranks.is_last_stage and ranks.index == ranks.num_ranks - ranks.num_ranks // ranks.num_stages
    if is_source:
        return
    wanted = run.context.runner.wanted_logits
    run.context.runner.wanted_logits = lambda step, logits: torch.roll(wanted(step, logits), 1, dims=-1)
