"""Runs of an engine whose decode steps overlap, and events during a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.speculation.drafter import Drafter
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_hybrid

RUNS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "with drafts": {"num_speculative_tokens": 3, "drafter": PromptLookupDrafter(3)},
    "one step at a time": {"run_ahead": False},
}
"""Arguments of `start`, by how steps run."""

MAMBA2: dict[str, Any] = {}


def start(
    num_requests: int = 3,
    num_tokens: int = 40,
    drafter: Drafter | None = None,
    ends: dict[int, int] | None = None,
    model: dict[str, Any] = MAMBA2,
    **settings: Any,
) -> EngineRun:
    """Return an engine whose requests are prefilled; `ends` are the termination ids of some."""
    subject = tiny_hybrid(**model)
    config = replace(cache_config(subject.sizes, **settings), num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
    run = EngineRun.start(subject, config, drafter=drafter)
    for request_id in range(num_requests):
        sampling = greedy(num_tokens, termination_id=(ends or {}).get(request_id, -1))
        run.add(request_id, some_tokens(20 + 3 * request_id, seed=request_id), sampling)
    while not run.context.running_requests or any(request.is_prefilling for request in run.context.running_requests):
        run.step()
    return run


def penalized(num_tokens: int) -> SamplingParams:
    """Return parameters of a request sampled from logits that depend on its text."""
    sampling = SamplingParams(num_tokens_to_generate=num_tokens, temperature=1.0, termination_id=-1)
    add_fields(sampling, logits={"presence_penalty": 0.5})
    return sampling


def is_ahead(run: EngineRun) -> bool:
    return run.context.overlapped_step is not None


def step_until_ahead(run: EngineRun) -> None:
    while not is_ahead(run):
        run.step()


def suspend_and_resume(run: EngineRun) -> None:
    run.engine.suspend()
    assert not is_ahead(run)
    run.engine.resume()


def pause_and_resume(run: EngineRun) -> None:
    run.engine.pause()
    run.engine.resume_generation()


EVENTS_DURING_A_STEP: dict[str, Callable[[EngineRun], None]] = {
    "flush": lambda run: run.engine.flush(),
    "flush of another version": lambda run: run.engine.flush("new"),
    "suspend and resume": suspend_and_resume,
    "pause and resume": pause_and_resume,
    "warmup": lambda run: run.engine.warmup() and None,
    "graphs captured again": lambda run: run.engine.create_cuda_graphs(),
    "one request sent back": lambda run: run.engine._send_back([1]),
    "two requests sent back": lambda run: run.engine._send_back([0, 2]),
    "all requests sent back": lambda run: run.engine._send_back([0, 1, 2]),
}


def recapture(run: EngineRun) -> None:
    run.engine.create_cuda_graphs()


def assert_nothing_is_copied_for(request: RunningRequest, run: EngineRun) -> None:
    """Send back a request whose boundary step runs already; assert that the step does not write its slot."""
    slot = request.reserved[0].slot
    run.engine._send_back([request.request_id])
    states = run.context.memory.state_pool.tensor("ssm")[:, slot]
    states.fill_(7.0)
    run.step()
    assert bool((states == 7.0).all())
