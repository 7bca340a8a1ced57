"""Prompts are scored exactly in bounded memory if only the last logits are materialized, without affecting others."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from megatron_mamba_cache.mcore.request_spec import PROMPT_SCORES
from megatron_mamba_cache.step import prompt_log_probs
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.oracle_log_probs import assert_log_probs, assert_top_n, oracle_log_probs

SCORED: dict[str, Any] = {"return_log_probs": True, "skip_prompt_log_probs": False}


def start_run(**settings: Any) -> EngineRun:
    """Return an engine that materializes only the last logits and scores prompts."""
    subject = tiny_hybrid()
    return EngineRun.start(subject, cache_config(subject.sizes, **settings), scores_prompts=True)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("most_logits", [1, 7 * 96, 2**25])
@pytest.mark.parametrize("max_tokens", [9, 24, 64])
def test_prompt_log_probs_match_the_oracle_for_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, most_logits: int, drafts: int
) -> None:
    monkeypatch.setattr(prompt_log_probs, "_MOST_LOGITS", most_logits)
    run = start_run(max_tokens=max_tokens, num_speculative_tokens=drafts)
    run.add(0, some_tokens(20, seed=1), 12)
    run.add(1, some_tokens(50), greedy(6, **SCORED, top_n_logprobs=2))
    run.add(2, some_tokens(33, seed=2), greedy(6, **SCORED))
    run.add(3, some_tokens(1, seed=3), greedy(6, **SCORED))
    run.add(4, some_tokens(40, seed=4), greedy(6, return_log_probs=True, skip_prompt_log_probs=True))
    run.finish()
    for request_id in (1, 2, 3):
        assert_log_probs(run, request_id)
    assert not run.finished[4].prompt_log_probs and len(run.finished[4].generated_log_probs) == 6
    assert not run.finished[0].prompt_log_probs and not run.finished[2].prompt_top_n_logprobs
    run.assert_matches_oracle().assert_few_stops()


@pytest.mark.parametrize("max_tokens", [9, 64])
@pytest.mark.parametrize(("top_n", "prompt_top_n"), [(0, 0), (0, 3), (2, 1), (1, 4)])
def test_token_rank_is_the_number_of_more_probable_tokens(top_n: int, prompt_top_n: int, max_tokens: int) -> None:
    run = start_run(max_tokens=max_tokens)
    ranked = greedy(5, **SCORED, top_n_logprobs=top_n)
    add_fields(ranked, prompt_top_n=prompt_top_n)
    run.add(0, some_tokens(30, seed=1), greedy(5, **SCORED, top_n_logprobs=3))
    run.add(1, some_tokens(40), ranked)
    run.finish()
    assert_log_probs(run, 1)
    assert not hasattr(run.finished[0].sampling_params, PROMPT_SCORES)
    scores = getattr(run.finished[1].sampling_params, PROMPT_SCORES)
    after = oracle_log_probs(run, 1).cpu()[:39]
    own = after.gather(1, torch.tensor(some_tokens(40)[1:])[:, None])
    assert [score.rank for score in scores] == (1 + (after > own).sum(-1)).tolist()
    assert [list(score.best_ids) for score in scores] == after.topk(prompt_top_n).indices.tolist()
    if top_n:
        assert {len(best) for best in run.finished[1].prompt_top_n_logprobs} == {top_n}
    assert run.finished[1].prompt_log_probs == [score.log_prob for score in scores]


def test_top_n_lists_all_tokens_even_if_their_texts_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    monkeypatch.setattr(run.engine.controller.tokenizer, "detokenize", lambda tokens, **_: "x" * len(tokens))
    by_id = greedy(3, **SCORED, top_n_logprobs=4)
    add_fields(by_id, top_n_by_id=True)
    run.add(0, some_tokens(30), greedy(3, **SCORED, top_n_logprobs=4))
    run.add(1, some_tokens(30), by_id)
    run.finish()
    for name in ("prompt_top_n_logprobs", "generated_top_n_logprobs"):
        by_text, expected = (getattr(run.finished[request_id], name) for request_id in (0, 1))
        assert len(by_text) == len(expected) >= 3
        for texts, ids in zip(by_text, expected, strict=True):
            assert list(texts) == ["x", *(f"token_id:{token}" for token in list(ids)[1:])] and len(ids) == 4
            assert list(texts.values()) == pytest.approx(list(ids.values()), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "settings", "words"),
    [
        (-1, SCORED, "between 0 and the vocabulary size"),
        (97, SCORED, "between 0 and the vocabulary size 96"),
        (True, SCORED, "must be an int"),
        (2, {}, "needs return_log_probs=True"),
        (2, {"return_log_probs": True, "skip_prompt_log_probs": True}, "skip_prompt_log_probs=False"),
    ],
)
def test_invalid_prompt_top_n_is_refused(count: Any, settings: dict[str, Any], words: str) -> None:
    run = start_run()
    ranked = greedy(2, **settings)
    add_fields(ranked, prompt_top_n=count)
    run.add(0, some_tokens(5), ranked)
    run.finish()
    assert words in str(run.finished[0].events[0].payload)


def test_token_ranks_are_refused_if_the_engine_materializes_all_logits() -> None:
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes), materialize_only_last_token_logits=False)
    ranked = greedy(2, **SCORED)
    add_fields(ranked, prompt_top_n=0)
    run.add(0, some_tokens(5), ranked)
    run.finish()
    assert "scores_prompts=True" in str(run.finished[0].events[0].payload)


def test_prompt_with_log_probs_is_computed_in_full_and_cached() -> None:
    run = start_run()
    assert run.run(0, some_tokens(50), greedy(4, **SCORED)) == 50
    assert run.run(1, some_tokens(50)) == 2
    assert run.run(2, some_tokens(50), greedy(4, **SCORED)) == 50
    assert_log_probs(run, 2)


def _suspend(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.resume()


def _fail_a_step(run: EngineRun) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, run.context.runner, "land")
        with pytest.raises(InjectedError):
            run.step()


def _fail_bookkeeping(run: EngineRun) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, run.engine.controller.tokenizer, "detokenize")
        with suppress(InjectedError):
            run.step()


@pytest.mark.parametrize("interrupt", [None, _suspend, _fail_a_step, _fail_bookkeeping])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5])
def test_top_n_log_probs_match_the_oracle_after_an_interruption(
    steps_before: int, interrupt: Callable[[EngineRun], None] | None
) -> None:
    run = start_run(max_tokens=16)
    run.add(1, some_tokens(40), greedy(5, **SCORED, top_n_logprobs=3))
    if interrupt is not None:
        for _ in range(steps_before):
            run.step()
        interrupt(run)
    run.finish()
    assert_log_probs(run, 1)
    log_probs = oracle_log_probs(run, 1).cpu()
    assert_top_n(run.finished[1].prompt_top_n_logprobs, log_probs[:39])
    assert_top_n(run.finished[1].generated_top_n_logprobs, log_probs[39:-1])


def test_prompt_logits_are_computed_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_log_probs, "_MOST_LOGITS", 10 * 96)
    run = start_run()
    sizes = []
    wrapper = run.engine.controller.inference_wrapped_model
    logits_of = wrapper.logits_of

    def noting(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits_of(hidden)

    monkeypatch.setattr(wrapper, "logits_of", noting)
    run.run(0, some_tokens(50))
    assert not sizes
    run.run(1, some_tokens(50), greedy(3, **SCORED))
    assert sum(sizes) == 49 and max(sizes) == 10
    assert not run.context.is_computing  # and its hidden states are gone with it
