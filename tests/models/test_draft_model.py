"""Properties of a draft model: its drafts are its own continuation, and all of its memory is released."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.mcore.mixers.mamba2 import CachingMambaMixer
from megatron_mamba_cache.models.drafting import draft_model
from megatron_mamba_cache.models.drafting.draft_model import DraftModelDrafter
from megatron_mamba_cache.policy.request_settings import SamplingSettings
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import TINY_VOCAB, EngineRun, Hybrid, cache_config, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.random_workloads import MODEL_FORMS
from tests.speculation.running_requests import request_of

BLOCK = 16


@pytest.fixture(params=[0, 3], ids=["eager", "graphs"], autouse=True)
def num_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run every draft model with CUDA graphs, then without."""
    capture_without_cuda(monkeypatch)
    monkeypatch.setattr(CheckedDraftModel, "num_cuda_graphs", request.param)
    count: int = request.param
    return count


GREEDY = SamplingSettings(top_k=1)


def small_model() -> Hybrid:
    """Return another model with the tiny one's vocabulary."""
    return tiny_hybrid(pattern="M*", hidden_size=16, num_attention_heads=2, num_query_groups=1, seed=5)


def start_run(drafter: DraftModelDrafter, num_drafts: int = 4, **settings: Any) -> EngineRun:
    """Return an engine of the tiny model that verifies the drafts of `drafter`."""
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, num_speculative_tokens=num_drafts, **settings)
    return EngineRun.start(subject, config, drafter=drafter)


def propose(
    drafter: DraftModelDrafter,
    texts: dict[int, Sequence[int]],
    num_tokens: int = 4,
    sampling: SamplingSettings = GREEDY,
) -> dict[int, Draft]:
    """Return the drafts of requests with these texts."""
    requests = [
        DraftRequest(request_of(text, request_id=i, sampling=sampling), num_tokens) for i, text in texts.items()
    ]
    return dict(zip(texts, drafter.propose(requests), strict=True))


def acceptance(run: EngineRun) -> float:
    """Return the share of drafts that were accepted."""
    return run.counters.accepted_tokens / run.counters.draft_tokens


# What is drafted.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_greedy_drafts_are_the_draft_models_greedy_continuation(length: int) -> None:
    subject, text = small_model(), some_tokens(length)
    draft = propose(CheckedDraftModel.start(subject), {0: text}, 8)[0]
    assert len(draft.tokens) == 8 and draft.distributions is None
    assert subject.oracle.check_greedy(text, list(draft.tokens), 1e-5).first_mismatch is None


def test_drafts_continue_the_verified_text_after_rejections() -> None:
    subject, drafter = small_model(), CheckedDraftModel.start(small_model())
    text = some_tokens(13)
    for seed in range(12):
        draft = propose(drafter, {0: text}, 1 + seed % 5)[0].tokens
        assert subject.oracle.check_greedy(text, list(draft), 1e-5).first_mismatch is None
        num_accepted = min(seed % 4, len(draft))
        text = [*text, *draft[:num_accepted], (seed * 7) % TINY_VOCAB]
    assert drafter.context.counters.prefill_tokens_computed < len(text), "each verified token is computed once"


def test_drafts_do_not_depend_on_the_batch() -> None:
    texts = {i: some_tokens(5 + 9 * i, seed=i) for i in range(5)}
    together = propose(CheckedDraftModel.start(small_model(), max_tokens=256), texts)
    for i, text in texts.items():
        assert propose(CheckedDraftModel.start(small_model()), {i: text})[i].tokens == together[i].tokens


def test_each_request_gets_the_requested_number_of_drafts() -> None:
    drafter = CheckedDraftModel.start(small_model())
    requests = [
        DraftRequest(request_of(some_tokens(5, seed=i), request_id=i, sampling=GREEDY), 1 + i) for i in range(5)
    ]
    assert [len(draft.tokens) for draft in drafter.propose(requests)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}])
def test_sampled_drafts_come_with_their_distributions(settings: dict[str, float]) -> None:
    text, counts, drafter = some_tokens(9), torch.zeros(3, TINY_VOCAB), CheckedDraftModel.start(small_model())
    for seed in range(40):
        sampling = SamplingSettings(seed=seed, **settings)
        draft = propose(drafter, {seed: text}, 3, sampling)[seed]
        drafter.forget(seed)
        assert draft.distributions is not None and draft.distributions.shape == (3, TINY_VOCAB)
        distributions = draft.distributions.cpu()
        assert torch.allclose(distributions.sum(dim=1), torch.ones(3, dtype=torch.float64))
        assert (distributions[range(3), list(draft.tokens)] > 0).all()
        assert ((distributions > 0).sum(dim=1) <= (settings.get("top_k") or TINY_VOCAB)).all()
        counts[range(3), list(draft.tokens)] += 1
    assert (counts[0] > 0).sum() > 2, "seeds draw different tokens"


def test_greedy_request_among_sampled_ones_is_drafted_greedily() -> None:
    drafter, text = CheckedDraftModel.start(small_model()), some_tokens(9)
    settings = [GREEDY, SamplingSettings(seed=3), SamplingSettings(temperature=0.0)]
    rows = [request_of(text, request_id=i, sampling=sampling) for i, sampling in enumerate(settings)]
    drafts = drafter.propose([DraftRequest(row, 3) for row in rows])
    alone = propose(CheckedDraftModel.start(small_model()), {0: text}, 3)[0]
    assert drafts[0].tokens == drafts[2].tokens == alone.tokens
    assert [draft.distributions is None for draft in drafts] == [True, False, True]


# Engines.


def test_drafts_from_the_target_model_itself_are_accepted() -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    run = start_run(drafter)
    for request_id in range(5):
        run.add(request_id, some_tokens(30 + 15 * request_id), 60)
    run.finish()
    run.assert_exact()
    drafter.assert_nothing_held()
    assert run.counters.draft_tokens > 200 and acceptance(run) > 0.95


def test_drafts_are_correct_again_after_a_rejection() -> None:
    class SometimesWrong(CheckedDraftModel):
        calls = 0

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            drafts = super().propose(requests)
            self.calls += 1
            if self.calls % 3:
                return drafts
            return [Draft((*d.tokens[:1], *((t + 1) % TINY_VOCAB for t in d.tokens[1:]))) for d in drafts]

    drafter = SometimesWrong.start(tiny_hybrid())
    run = start_run(drafter)
    run.add(0, some_tokens(20), 150)
    run.finish()
    run.assert_exact()
    at, right = run.counters.drafts_at, run.counters.accepted_at
    assert right[0] >= 0.95 * at[0], "the first draft of a round is never tampered with"
    assert 0.3 < acceptance(run) < 0.95


def test_sampled_drafts_from_the_target_model_itself_are_accepted() -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    run = start_run(drafter)
    for request_id in range(4):
        run.add(request_id, some_tokens(30), sampled_params(60), seed=request_id)
    run.finish()
    run.assert_nothing_held()
    assert run.counters.draft_tokens > 150 and acceptance(run) > 0.95


def sampled_params(num_tokens: int) -> SamplingParams:
    """Return parameters of a sampled request."""
    return SamplingParams(temperature=0.9, top_p=0.9, num_tokens_to_generate=num_tokens, termination_id=-1)


def test_different_draft_model_does_not_change_tokens() -> None:
    drafter = CheckedDraftModel.start(small_model(), block_size_tokens=8)
    run = start_run(drafter)
    for request_id in range(5):
        run.add(request_id, some_tokens(30 + 15 * request_id), 40)
    run.finish()
    run.assert_exact()
    drafter.assert_nothing_held()
    assert run.counters.draft_tokens > 0


def test_evicted_and_suspended_requests_are_forgotten_and_drafted_again() -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    run = start_run(drafter, kv_blocks=9, paused_blocks=0, cached_states=30)
    for request_id in range(4):
        run.add(request_id, some_tokens(20, seed=request_id), 60)
    for _ in range(8):
        run.step()
    run.engine.suspend()
    drafter.assert_nothing_held()
    run.engine.resume()
    run.finish()
    run.assert_exact()
    drafter.assert_nothing_held()
    assert run.counters.requests_evicted and acceptance(run) > 0.95


def test_draft_model_with_another_vocabulary_is_refused() -> None:
    subject, other = tiny_hybrid(), tiny_hybrid(vocab_size=64)
    config = cache_config(subject.sizes, num_speculative_tokens=2)
    with pytest.raises(ValueError, match="vocabulary of 64 tokens, but the model's vocabulary has 96"):
        build_engine(subject.model, config, drafter=CheckedDraftModel.start(other))


def test_draft_model_with_sharded_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid(**MODEL_FORMS["experts"][0])
    assert len(propose(CheckedDraftModel.start(subject), {0: some_tokens(5)})[0].tokens) == 4
    monkeypatch.setattr(draft_model, "num_expert_ranks", lambda: 2)
    with pytest.raises(ValueError, match="is an MoE model, and 2 expert-parallel ranks"):
        CheckedDraftModel.start(subject)
    assert propose(CheckedDraftModel.start(small_model()), {0: some_tokens(5)})[0].tokens


def test_non_hybrid_draft_model_is_refused() -> None:
    with pytest.raises(TypeError, match="MambaModel"):
        DraftModelDrafter(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be a multiple of the recurrence's chunk"):
        CheckedDraftModel.start(small_model(), block_size_tokens=12)


# Its graphs.


def test_forward_passes_that_fit_a_captured_shape_replay_graphs(num_graphs: int) -> None:
    drafter = CheckedDraftModel.start(small_model(), cuda_graph_prefill_tokens=48, max_tokens=128)
    texts = {i: some_tokens(5 + i, seed=i) for i in range(4)}
    for round_index in range(3):
        drafts = propose(drafter, texts, 3)
        texts = {i: [*text, *drafts[i].tokens[:i], round_index] for i, text in texts.items()}
    counters, graphs = drafter.snapshot().counters, drafter.context.graphs
    assert counters.steps == 9 and counters.graph_steps == (9 if num_graphs else 0)
    propose(drafter, {9: some_tokens(70)}, 1)
    assert drafter.snapshot().counters.graph_steps == counters.graph_steps, "70 tokens are more than any shape has"
    if graphs is not None:
        print(f"{len(graphs.shapes)} shapes: {sorted(graphs.shapes)}")
        assert all(shape.num_decode_requests == 0 and shape.num_tokens <= 64 for shape in graphs.shapes)
        assert {(1, 1), (1, 4), (1, 8), (8, 8), (8, 48)} <= {
            (s.num_prefill_requests, s.num_tokens) for s in graphs.shapes
        }


def move_weights(model: Any) -> None:
    """Move all weights, and fill their old memory with NaN."""
    for parameter in model.parameters():
        old, parameter.data = parameter.data, parameter.data.clone()
        old.fill_(torch.nan)


@pytest.mark.parametrize("flushed", ["drafter", "engine", "both"])
def test_graphs_are_recaptured_when_weights_move(
    flushed: str, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = tiny_hybrid(seed=8)
    capture_without_cuda(monkeypatch, subject.model)
    drafter = CheckedDraftModel.start(subject)
    run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=4), drafter=drafter)
    graphs = drafter.context.graphs
    drafter.flush("1")
    run.engine.flush("1")
    run.run(0, some_tokens(20), 30)
    assert drafter.context.graphs is graphs, "none has moved"
    move_weights(subject.model)
    for owner in {"drafter": [drafter], "engine": [run.engine], "both": [run.engine, drafter]}[flushed]:
        owner.flush("2")
    assert drafter.context.graphs is None, "nothing is replayed from where they were"
    run.run(1, some_tokens(25), 30)
    assert (drafter.context.graphs is not None) == bool(num_graphs)
    run.assert_exact()
    assert acceptance(run) > 0.95


def test_graphs_are_recaptured_when_weights_move_during_suspend(
    num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = tiny_hybrid(seed=8)
    capture_without_cuda(monkeypatch, subject.model)
    drafter = CheckedDraftModel.start(subject)
    run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=4), drafter=drafter)
    run.add(0, some_tokens(20), 60)
    for _ in range(4):
        run.step()
    run.engine.suspend()
    tensors = [parameter.data for parameter in subject.model.parameters()]
    for parameter in subject.model.parameters():
        parameter.data = parameter.data[:0]
    drafter.flush("1")
    for parameter, data in zip(subject.model.parameters(), tensors, strict=True):
        parameter.data = data.clone()
    run.engine.resume()
    run.finish()
    assert (drafter.context.graphs is not None) == bool(num_graphs)
    run.assert_exact()
    assert acceptance(run) > 0.95


def test_drafter_can_be_reused_after_its_engine_closes(num_graphs: int) -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    for number in range(2):
        run = start_run(drafter)
        run.add(0, some_tokens(20), 30)
        for _ in range(4):
            run.step()
        assert (drafter.context.graphs is not None) == bool(num_graphs)
        run.engine.close()
        run.engine.close()
        assert drafter.context.graphs is None, "they may hold collectives of groups that are to be destroyed"
        drafter.assert_nothing_held()
        assert acceptance(run) > 0.95 and not run.counters.drafting_failures, number


@pytest.mark.parametrize("num_graphs", [3], indirect=True)
def test_drafter_runs_without_graphs_when_recapture_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    run = start_run(drafter)
    assert drafter.context.graphs is not None
    drafter.drop_graphs()
    monkeypatch.setattr(draft_model, "capture_graphs", _fail)
    run.run(0, some_tokens(20), 30)
    assert acceptance(run) > 0.95 and drafter.context.graphs is None
    assert "runs without CUDA graphs: InjectedError" in caplog.text


def _fail(*_: Any) -> None:
    raise InjectedError


@pytest.mark.parametrize("num_graphs", [3], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}])
def test_graph_and_eager_drafts_have_the_same_tokens(
    settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for count in (0, 3):
        monkeypatch.setattr(CheckedDraftModel, "num_cuda_graphs", count)
        drafter = CheckedDraftModel.start(small_model())
        texts = {seed: some_tokens(5 + seed, seed=seed) for seed in range(5)}
        samplings = [SamplingSettings(seed=seed, **settings) for seed in texts]
        for _ in range(2):
            rows = [request_of(texts[seed], request_id=seed, sampling=samplings[seed]) for seed in texts]
            drafts = drafter.propose([DraftRequest(row, 3) for row in rows])
            texts = {seed: [*texts[seed], *draft.tokens[:1], 2] for seed, draft in enumerate(drafts)}
            found.append([(draft.tokens, draft.distributions) for draft in drafts])
        assert bool(drafter.counters.graph_steps) == bool(count)
    for before, after in zip(found[:2], found[2:], strict=True):
        for (tokens, distributions), (again, distributions_again) in zip(before, after, strict=True):
            assert tokens == again
            torch.testing.assert_close(distributions, distributions_again, rtol=1e-5, atol=1e-6)


# Its cache.


def test_draft_model_skips_a_cached_prompt_prefix() -> None:
    drafter, prefix = CheckedDraftModel.start(small_model(), max_tokens=256), some_tokens(4 * BLOCK)
    first = propose(drafter, {0: [*prefix, 1]})
    drafter.forget(0)
    later = propose(drafter, {1: [*prefix, 2], 2: [*prefix, 3, 4]})
    counters = drafter.snapshot().counters
    assert counters.prompt_tokens_skipped == 2 * len(prefix) and counters.states_restored == 2
    for text, draft in (([*prefix, 1], first[0]), ([*prefix, 2], later[1]), ([*prefix, 3, 4], later[2])):
        assert len(draft.tokens) == 4
        assert propose(CheckedDraftModel.start(small_model(), max_tokens=256), {9: text})[9].tokens == draft.tokens


def test_request_waits_while_another_prefills_the_same_prefix() -> None:
    drafter, prefix = CheckedDraftModel.start(small_model(), max_tokens=256), some_tokens(4 * BLOCK)
    texts = {i: [*prefix, 2 + i] for i in range(2)}
    assert [bool(draft.tokens) for draft in propose(drafter, texts).values()] == [True, False]
    assert propose(drafter, texts)[1].tokens
    assert drafter.snapshot().counters.prompt_tokens_skipped == len(prefix)


def test_draft_model_skips_generated_tokens_in_the_next_turn() -> None:
    drafter, text = CheckedDraftModel.start(small_model()), some_tokens(20)
    for _ in range(10):
        text = [*text, *propose(drafter, {0: text}, 3)[0].tokens, 7]
    drafter.forget(0)
    propose(drafter, {1: [*text, 1, 2, 3]})
    skipped = drafter.snapshot().counters.prompt_tokens_skipped
    assert skipped == len(text) // BLOCK * BLOCK > 20


def test_draft_model_does_not_share_prefixes_between_tenants() -> None:
    drafter, text = CheckedDraftModel.start(small_model()), some_tokens(40)
    for index, tenant in enumerate(["", "other"]):
        drafter.propose([DraftRequest(request_of(text, request_id=index, tenant=tenant, sampling=GREEDY), 2)])
    assert drafter.snapshot().counters.prompt_tokens_skipped == 0


def test_flush_drops_cached_prefixes_and_restarts_prefill() -> None:
    drafter, text = CheckedDraftModel.start(small_model()), some_tokens(40)
    before = propose(drafter, {0: text})[0]
    drafter.flush("1")
    drafter.check_integrity()
    assert propose(drafter, {0: text})[0].tokens == before.tokens
    counters = drafter.snapshot().counters
    assert counters.prompt_tokens_skipped == 0 and counters.prefill_tokens_computed == 80


# Prompts longer than a step, and short memory.


def test_drafts_are_empty_until_a_long_prompt_is_prefilled() -> None:
    subject, text = small_model(), some_tokens(100)
    drafter = CheckedDraftModel.start(subject, max_tokens=40)
    drafts = [propose(drafter, {0: text})[0].tokens for _ in range(3)]
    assert [len(draft) for draft in drafts] == [0, 0, 4]  # chunks of 32, 32 and 36 tokens
    assert subject.oracle.check_greedy(text, list(drafts[-1]), 1e-5).first_mismatch is None


def test_long_and_short_prompts_do_not_starve_each_other() -> None:
    drafter = CheckedDraftModel.start(small_model(), max_tokens=20, max_requests=8)
    texts = {i: some_tokens(60 if i >= 5 else 3, seed=i) for i in range(8)}
    num_drafted = dict.fromkeys(texts, 0)
    for _ in range(60):
        drafts = propose(drafter, texts, 3)
        for i, draft in drafts.items():
            num_drafted[i] += bool(draft.tokens)
            texts[i] = [*texts[i], *draft.tokens, i]
    assert min(num_drafted.values()) > 10, num_drafted


def test_unchanged_text_is_not_drafted_twice() -> None:
    drafter, text = CheckedDraftModel.start(small_model()), some_tokens(9)
    assert propose(drafter, {0: text})[0].tokens and not propose(drafter, {0: text})[0].tokens
    assert propose(drafter, {0: [*text, 5]})[0].tokens


def test_reused_request_id_with_shorter_text_is_prefilled_again() -> None:
    drafter = CheckedDraftModel.start(small_model())
    propose(drafter, {0: some_tokens(30)})
    fresh = propose(CheckedDraftModel.start(small_model()), {0: some_tokens(9, seed=2)})
    assert propose(drafter, {0: some_tokens(9, seed=2)})[0].tokens == fresh[0].tokens


@pytest.mark.parametrize(
    "tight",
    [{"kv_blocks": 4}, {"kv_blocks": 1}, {"max_requests": 2}, {"cached_states": 1}, {"kv_blocks": 7, "max_tokens": 9}],
    ids=str,
)
def test_requests_finish_with_fewer_drafts_when_memory_is_short(tight: dict[str, int]) -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid(), **tight)
    run = start_run(drafter)
    for request_id in range(6):
        run.add(request_id, some_tokens(5 + 6 * request_id, seed=request_id), 40)
    run.finish()
    run.assert_exact()
    drafter.assert_nothing_held()
    assert run.counters.draft_tokens and acceptance(run) > 0.95


def test_least_recently_drafted_request_is_evicted_first() -> None:
    drafter = CheckedDraftModel.start(small_model(), max_requests=2)
    texts = {i: some_tokens(9, seed=i) for i in range(3)}
    propose(drafter, {0: texts[0]})
    propose(drafter, {1: texts[1]})
    assert propose(drafter, {2: texts[2]})[2].tokens
    assert sorted(request.request_id for request in drafter.context.running_requests) == [1, 2]
    drafts = propose(drafter, {i: [*text, 1] for i, text in texts.items()})
    assert [bool(drafts[i].tokens) for i in range(3)] == [False, True, True]


def test_text_beyond_the_draft_models_length_limit_gets_no_drafts() -> None:
    drafter = CheckedDraftModel.start(small_model(), max_sequence_length=32)
    text = some_tokens(30)
    assert [len(propose(drafter, {0: [*text, *range(n)]}, 4)[0].tokens) for n in range(5)] == [3, 2, 1, 0, 0]
    assert not drafter.context.running_requests


# Errors.


def test_drafter_stays_usable_after_an_error(num_graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if num_graphs and torch.cuda.is_available():
        pytest.skip("a replay calls no layer")
    subject = small_model()
    drafter, text = CheckedDraftModel.start(subject), some_tokens(20)
    mixer = next(module for module in subject.model.modules() if isinstance(module, CachingMambaMixer))
    for call in (1, 2, 3, 4):
        drafter.forget(0)
        with monkeypatch.context() as patch:
            raise_once(patch, mixer, "forward", call=call)
            with pytest.raises(InjectedError):
                propose(drafter, {0: text})
        assert not drafter.context.running_requests
        draft = propose(drafter, {0: text})[0]
        assert subject.oracle.check_greedy(text, list(draft.tokens), 1e-5).first_mismatch is None
        assert len(draft.tokens) == 4


@pytest.mark.parametrize("method", ["lay_out", "publish_prompts", "logits_on_all_ranks"])
def test_engine_continues_after_an_error_of_its_drafter(
    method: str, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = CheckedDraftModel.start(tiny_hybrid())
    run = start_run(drafter)
    for request_id in range(3):
        run.add(request_id, some_tokens(20 + request_id), 40)
    owner: Any = drafter.context.runner
    if num_graphs and method != "publish_prompts":
        owner, method = StepGraph, "verify" if method == "logits_on_all_ranks" else method
    while run.engine.has_unfinished_requests():
        num_failed = run.counters.drafting_failures
        with monkeypatch.context() as patch:
            if run.num_steps % 3 == 1 and num_failed < 5:
                raise_once(patch, owner, method, call=1 + num_failed)
            run.step()
    assert run.counters.drafting_failures >= 1
    run.assert_exact()
    drafter.assert_nothing_held()
    assert acceptance(run) > 0.95
