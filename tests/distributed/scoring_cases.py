"""Functions that run on a rank: prompts scored by a sharded model."""

import torch

from megatron_mamba_cache.mcore.request_spec import PROMPT_SCORES
from megatron_mamba_cache.policy.request_settings import ScoredToken
from megatron_mamba_cache.step import prompt_log_probs
from tests.distributed.rank_models import Layout, parallel
from tests.mcore import engine_runs
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_sizes
from tests.mcore.oracle_log_probs import assert_log_probs, oracle_log_probs


def scores(layout: Layout, most_logits: int) -> tuple[list[float], list[dict[str, float]], list[ScoredToken]]:
    """Return a prompt's log-probs, best tokens and ranks after comparing them with the oracle."""
    prompt_log_probs._MOST_LOGITS = most_logits
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes())
        run = EngineRun.start(subject, cache_config(subject.sizes, max_tokens=24), scores_prompts=True)
        run.add(0, some_tokens(20, seed=1), 6)
        requested = {"return_log_probs": True, "skip_prompt_log_probs": False, "top_n_logprobs": 2}
        ranked = greedy(4, **requested)
        add_fields(ranked, prompt_top_n=3)
        run.add(1, some_tokens(50), ranked)
        run.finish()
        assert_log_probs(run, 1)
        run.assert_matches_oracle()
        request = run.finished[1]
        found: list[ScoredToken] = getattr(request.sampling_params, PROMPT_SCORES)
        after = oracle_log_probs(run, 1).cpu()[:49]
        own = after.gather(1, torch.tensor(some_tokens(50)[1:])[:, None])
        assert [score.rank for score in found] == (1 + (after > own).sum(-1)).tolist()
        return request.prompt_log_probs, request.prompt_top_n_logprobs, found
