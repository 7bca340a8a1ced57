"""Engines that share experts, each in a thread, launch the same steps in the same order under any load.

The model has no experts, so nothing is exchanged but what the hosts agree on; a step that one rank launches early and
another later, or never, would make ranks with experts wait for each other forever.
"""

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.inference.engines import dynamic_engine

from megatron_mamba_cache import build
from megatron_mamba_cache.mcore import engine_loop
from megatron_mamba_cache.mcore.served_model import HybridInferenceWrapper
from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.mcore.engine_runs import EngineRun, Hybrid, add_fields, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.step.meetings import Meeting

NUM_REQUESTS = 7
ASKED: list[dict[str, Any]] = [
    {},
    {"logits": {"logit_bias": [[5, 1e-30]]}},  # which changes no token
    {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 2},
]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="threads of one process cannot capture on a GPU at the same time"
)


def _num_exchanged(wrapper: Any) -> int:
    return wrapper.inference_context.step.batch.num_exchanged


class Launches:
    """Forwards that each thread launches: a graph's shape, or the number of exchanged tokens; and the early ones."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._mine = threading.local()
        self._note(patch, StepGraph, "forward", lambda graph: graph.shape)
        self._note(patch, HybridInferenceWrapper, "compute_step", _num_exchanged)
        self._note(patch, StepGraph, "launch_next", lambda graph: "early")

    def _note(self, patch: pytest.MonkeyPatch, owner: type, name: str, what: Any) -> None:
        call = getattr(owner, name)

        def noted(self_of_call: Any, *args: Any) -> Any:
            if hasattr(self._mine, "noted"):
                self._mine.noted.append(what(self_of_call))
            return call(self_of_call, *args)

        patch.setattr(owner, name, noted)

    def begin(self) -> list[Any]:
        """Record this thread's launches from now on."""
        self._mine.noted = []
        return self._mine.noted


@pytest.fixture(autouse=True)
def one_loop_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of several threads run in their own event loops; Megatron keeps one per process."""
    for module in (dynamic_engine, engine_loop):
        monkeypatch.setattr(module, "get_asyncio_loop", lambda loop=None: loop or asyncio.get_event_loop())


def in_threads(num_ranks: int, serve_rank: Callable[[int], Any]) -> list[Any]:
    """Return each rank's results, each in its own thread and event loop."""

    def served(rank: int) -> Any:
        asyncio.set_event_loop(asyncio.new_event_loop())
        try:
            return serve_rank(rank)
        finally:
            asyncio.get_event_loop().close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(served, range(num_ranks)))


def serve(
    subject: Hybrid, rank: int, seed: int, meeting: Meeting, launches: Launches, drafts: int, *, asks: bool = False
) -> tuple[EngineRun, list[Any]]:
    """Serve this rank's requests in step with the other ranks; return its launches.

    Args:
        asks: True if requests ask for more than tokens.
    """
    rng = random.Random(100 * seed + rank)
    settings = {"num_cuda_graphs": 3, "cuda_graph_prefill_tokens": 40, "max_requests": 4, "max_tokens": 96}
    run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=drafts, **settings))
    arrivals = {}
    for _ in range(rng.randrange(1, NUM_REQUESTS)):
        arrivals[rng.randrange(40)] = (rng.randrange(5, 60), rng.randrange(1, 50))
    noted, step = launches.begin(), 0
    while True:
        due = [(count, step) for step_due, count in arrivals.items() if step_due == step]
        for (num_prompt, num_tokens), request_id in due:
            sampling = greedy(num_tokens)
            add_fields(sampling, **(ASKED[request_id % len(ASKED)] if asks else {}))
            run.add(request_id, some_tokens(num_prompt, seed=request_id), sampling)
        is_busy = bool(run.engine.requests) or any(step_due > step for step_due in arrivals)
        if not run.engine.owes_step and not meeting.greatest([is_busy])[0]:
            break
        if run.engine.requests:
            run.step()
        else:
            run.engine.controller.dummy_forward()
        step += 1
    run.engine.close()
    return run, noted


@pytest.mark.parametrize(
    ("seed", "num_ranks", "drafts", "asks"),
    [
        (0, 2, 0, False),
        (1, 3, 0, True),
        (3, 2, 2, False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((0, 2, 0, True), (1, 3, 0, False), (3, 2, 2, True))),
    ],
)
def test_expert_parallel_ranks_launch_the_same_steps_in_order(
    seed: int, num_ranks: int, drafts: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    launches, meeting = Launches(monkeypatch), Meeting(num_ranks)
    subjects = [tiny_hybrid(seed=rank + 1) for rank in range(num_ranks)]
    monkeypatch.setattr(build, "expert_peers_of_process", lambda: meeting)
    done = in_threads(num_ranks, lambda rank: serve(subjects[rank], rank, seed, meeting, launches, drafts, asks=asks))
    shapes = [[what for what in noted if what != "early"] for _, noted in done]
    assert all(mine == shapes[0] for mine in shapes) and any(isinstance(what, StepShape) for what in shapes[0])
    for run, _ in done:
        run.assert_matches_oracle()
    numbers = [noted.count("early") for _, noted in done]
    print(len(shapes[0]), "steps,", numbers, "early")
    if not drafts:
        assert sum(numbers)


def test_closing_rank_joins_the_step_that_another_rank_launched_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_without_cuda(monkeypatch)
    launches, meeting = Launches(monkeypatch), Meeting(2)
    subjects = [tiny_hybrid(seed=rank + 1) for rank in range(2)]
    monkeypatch.setattr(build, "expert_peers_of_process", lambda: meeting)

    def closed(rank: int) -> list[Any]:
        subject = subjects[rank]
        settings = {"num_cuda_graphs": 2, "cuda_graph_prefill_tokens": 40, "max_requests": 2}
        run = EngineRun.start(subject, replace(cache_config(subject.sizes, **settings), run_ahead=rank == 0))
        run.add(0, some_tokens(9), greedy(40))
        noted = launches.begin()
        while not run.context.runner.sharing.is_owed:
            run.step()
        assert (run.context.overlapped_step is not None) is (rank == 0)
        run.engine.close()
        return [what for what in noted if what != "early"]

    first, second = in_threads(2, closed)
    assert first == second and first
