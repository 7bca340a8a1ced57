"""Functions that run on a rank: new weights are loaded while the engines of a model are suspended."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rank_models import Layout, parallel
from tests.mcore import engine_runs
from tests.mcore.engine_runs import EngineRun, Hybrid, cache_config, some_tokens, tiny_sizes
from tests.mcore.graph_stand_ins import capture_without_cuda

LENGTHS = (20, 25)
PROMPT_LEN = 50


@dataclass(frozen=True, slots=True)
class RefitOutcome:
    """Outcome of a refit on a rank.

    Args:
        computed: Prompt tokens of one prompt: before the refit, after it, and after it once more.
        before: Generated tokens of the requests that ran across the refit, before it.
        texts: All their generated tokens.
        graphs_kept, graphs_of_moved_kept: True if graphs outlived weights loaded in place, and weights that moved on
            the second rank alone.
    """

    computed: tuple[int, int, int]
    before: list[list[int]]
    texts: list[list[int]]
    graphs_kept: bool
    graphs_of_moved_kept: bool
    graph_steps: int


def refit(layout: Layout, resident_pools: bool) -> RefitOutcome:
    """Change the weights of a model between a suspend and a resume, with running requests and a waiting one."""
    with parallel(layout), pytest.MonkeyPatch.context() as patch:
        capture_without_cuda(patch)
        shares_experts = layout.expert > 1  # ranks that do may overlap steps; the others compare each step
        return _refit(resident_pools, "M*EM" if shares_experts else "M*M*", 0 if shares_experts else 1)


def _refit(resident_pools: bool, pattern: str, digest_steps: int) -> RefitOutcome:
    old, new = (engine_runs.hybrid(tiny_sizes(seed=seed, pattern=pattern)) for seed in (1, 2))
    settings = {"num_cuda_graphs": 2, "cuda_graph_prefill_tokens": 20, "max_requests": 3}
    settings["rank_digest_steps"] = digest_steps
    run = EngineRun.start(old, cache_config(old.sizes, resident_pools=resident_pools, **settings))
    computed = [run.run(0, some_tokens(PROMPT_LEN))]
    run.assert_exact()
    for request_id, num_tokens in enumerate(LENGTHS, start=1):
        run.add(request_id, some_tokens(20 + request_id, seed=request_id), num_tokens)
    for _ in range(6):
        run.step()
    graphs = run.context.graphs
    run.engine.suspend()
    before = [_generated(run, request_id) for request_id in (1, 2)]
    old.model.load_state_dict(new.model.state_dict())
    run.engine.resume("step-1")
    kept = run.context.graphs is graphs
    run.subject = Hybrid(old.sizes, old.model, new.oracle, old.shape)
    run.finish()
    computed += [run.run(request_id, some_tokens(PROMPT_LEN)) for request_id in (3, 4)]
    run.assert_matches_oracle([3, 4]).assert_few_stops()
    graphs = run.context.graphs
    _move_weights_of_the_second_rank(run)
    run.engine.flush()
    moved_kept = run.context.graphs is graphs
    run.run(5, some_tokens(PROMPT_LEN))
    if run.context.runner.sharing.is_shared:  # such ranks capture together, in the next step
        moved_kept = run.context.graphs is graphs
    run.assert_matches_oracle([5]).assert_few_stops()
    run.assert_nothing_held()
    for request_id, generated in zip((1, 2), before, strict=True):
        rest = run.tokens(request_id)[len(generated) :]
        check = new.oracle.check_greedy(run.prompts[request_id] + generated, rest, engine_runs.ORACLE_MARGIN)
        assert check.first_mismatch is None and check.num_compared
    texts = [run.tokens(request_id) for request_id in (1, 2)]
    return RefitOutcome(tuple(computed), before, texts, kept, moved_kept, run.counters.graph_steps)


def errors_of_versions(layout: Layout, versions: list[str | None], resident_pools: bool) -> tuple[str, str]:
    """Return the errors of a resume and a flush whose ranks were given different versions; then all agree."""
    mine = versions[dist.get_rank()]
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        run = EngineRun.start(subject, cache_config(subject.sizes, resident_pools=resident_pools))
        run.run(0, some_tokens(PROMPT_LEN))
        run.engine.suspend()
        errors = []
        for call in (run.engine.resume, run.engine.flush):
            with pytest.raises(ValueError) as error:
                call(mine)
            errors.append(str(error.value))
        assert run.engine.is_suspended and run.context.weights_version == "0"
        run.engine.resume("both")
        assert run.context.weights_version == "both"
        assert run.run(1, some_tokens(PROMPT_LEN)) == PROMPT_LEN
        run.assert_exact()
        return errors[0], errors[1]


def _generated(run: EngineRun, request_id: int) -> list[int]:
    return [token for part in run.engine.requests[request_id].record.requests for token in part.generated_tokens]


def _move_weights_of_the_second_rank(run: EngineRun) -> None:
    if dist.get_rank() == 1:
        with torch.no_grad():
            for parameter in run.subject.model.parameters():
                parameter.data = parameter.data.clone()
