"""Draft steps launched before the previous one is reported: their conditions, and events in between."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.overlapped_runs import (
    EVENTS_DURING_A_STEP,
    assert_nothing_is_copied_for,
    is_ahead,
    penalized,
    start,
    step_until_ahead,
)

NUM_TOKENS, NUM_DRAFTS, VOCAB_SIZE = 60, 3, 96
FORMS = ("replay", pytest.param("window", marks=pytest.mark.long))
in_either_form = pytest.mark.usefixtures("either_form")


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


class MostlyRight:
    """Drafts the replies with some wrong tokens, and sometimes nothing, by the position in the text.

    Args:
        is_sampled: True if drafts come with distributions, of which each token is sure.
    """

    def __init__(self, replies: Sequence[Sequence[int]], *, is_sampled: bool = False) -> None:
        self._replies = replies
        self._is_sampled = is_sampled

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        request_id, start = request.running.request_id, request.running.length - len(request.running.spec.prompt)
        start += request.running.spec.num_replayed
        reply = self._replies[request_id % len(self._replies)]
        draw = random.Random(1000 * request_id + start)
        count = 0 if draw.random() < 0.1 else request.num_tokens
        tokens = [(token + (draw.random() < 0.1)) % VOCAB_SIZE for token in reply[start : start + count]]
        if not tokens or not self._is_sampled:
            return Draft(tuple(tokens))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return Draft(
            tuple(tokens), torch.nn.functional.one_hot(torch.tensor(tokens, device=device), VOCAB_SIZE).float()
        )

    def forget(self, request_id: int) -> None:
        """Do nothing."""


@cache
def replies() -> list[list[int]]:
    plain = start(3, NUM_TOKENS, run_ahead=False)
    plain.finish()
    return [plain.tokens(request_id) for request_id in range(3)]


def start_drafted(*, is_sampled: bool = False, **settings: Any) -> EngineRun:
    drafter = MostlyRight(replies(), is_sampled=is_sampled)
    return start(3, NUM_TOKENS, drafter=drafter, num_speculative_tokens=NUM_DRAFTS, **settings)


def finish(run: EngineRun) -> int:
    """Run all requests to their end, and return the number of overlapped draft steps."""
    num_early = 0
    while run.engine.has_unfinished_requests():
        was_ahead, before = is_ahead(run), run.counters.draft_tokens
        run.step()
        run.context.check_integrity()
        num_early += was_ahead and run.counters.draft_tokens > before
    run.assert_exact()
    run.assert_nothing_held()
    return num_early


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_steps_with_drafts_overlap(form: str, is_sampled: bool) -> None:
    run = start_drafted(draft_states=form, is_sampled=is_sampled, block_size_tokens=64)
    assert finish(run) > 8 and run.counters.accepted_tokens > NUM_TOKENS


@pytest.mark.parametrize(
    ("checkpoints", "is_sampled"),
    [
        ("rolling", True),
        ("all", False),
        pytest.param("rolling", False, marks=pytest.mark.long),
        pytest.param("all", True, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_overlapped_draft_steps_cache_the_same_states_as_plain_steps(
    form: str, is_sampled: bool, checkpoints: str
) -> None:
    runs = [
        start_drafted(
            draft_states=form,
            is_sampled=is_sampled,
            run_ahead=run_ahead,
            decode_checkpoints=checkpoints,
            cached_states=80,
        )
        for run_ahead in (True, False)
    ]
    num_reached = 0
    while runs[0].engine.has_unfinished_requests():
        runs[0].step()
        num_reached += is_ahead(runs[0]) and any(request.reserved for request in runs[0].context.running_requests)
    assert num_reached >= 6
    for run in runs:
        finish(run)
        for request_id in range(3):
            for number, point in enumerate((20, NUM_TOKENS)):
                text = [*run.prompts[request_id], *run.tokens(request_id)[:point], *some_tokens(5)]
                run.run(10 + 2 * request_id + number, text, 20)
        run.assert_exact()
    ahead, plain = ([run.engine.cached_tokens(10 + number) for number in range(6)] for run in runs)
    assert ahead == plain
    assert ahead[1] > 3 * 16


@pytest.mark.parametrize("form", FORMS)
def test_no_boundary_state_is_copied_for_a_requeued_draft_request(form: str) -> None:
    """Its slot may belong to another request by then."""
    run = start_drafted(draft_states=form, decode_checkpoints="all", cached_states=80)
    while not (is_ahead(run) and run.context.running_requests[0].reserved):
        run.step()
    assert_nothing_is_copied_for(run.context.running_requests[0], run)
    run.finish()
    run.assert_matches_oracle([1, 2]).assert_few_stops()


@pytest.mark.parametrize("settings", [{"run_ahead": False}, {"rank_digest_steps": 1}], ids=str)
def test_draft_steps_do_not_overlap_when_disabled_or_when_ranks_are_compared(settings: dict[str, Any]) -> None:
    run = start_drafted(block_size_tokens=64, **settings)
    assert finish(run) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "is_sampled"),
    [
        pytest.param(name, is_sampled, marks=() if point % 2 == at else pytest.mark.long)
        for point, name in enumerate(EVENTS_DURING_A_STEP)
        for at, is_sampled in enumerate((False, True))
    ],
)
def test_flush_suspend_or_warmup_during_verification_changes_no_token(name: str, form: str, is_sampled: bool) -> None:
    run = start_drafted(draft_states=form, is_sampled=is_sampled, block_size_tokens=64)
    for _ in range(4):
        step_until_ahead(run)
        EVENTS_DURING_A_STEP[name](run)
        run.context.check_integrity()
        run.step()
        run.context.check_integrity()
    finish(run)


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gone", [[0], [1], [0, 2]], ids=str)
def test_cancelling_a_request_does_not_affect_others(form: str, gone: list[int], is_sampled: bool) -> None:
    run = start_drafted(draft_states=form, is_sampled=is_sampled, block_size_tokens=64)
    step_until_ahead(run)
    for request_id in gone:
        assert run.engine.cancel_request(request_id)
    run.context.check_integrity()
    finish(run)
    left = [request_id for request_id in range(3) if request_id not in gone]
    assert [run.tokens(request_id) for request_id in left] == [replies()[request_id] for request_id in left]


@in_either_form
def test_new_request_joins_after_the_overlapped_step() -> None:
    run = start_drafted(block_size_tokens=64)
    step_until_ahead(run)
    run.add(3, some_tokens(25, seed=3), 20)
    run.step()
    assert len(run.context.running_requests) == 3 and not is_ahead(run)
    run.step()
    assert len(run.context.running_requests) == 4
    finish(run)


@in_either_form
def test_no_step_overlaps_while_another_request_is_paused() -> None:
    drafter = MostlyRight(replies())
    run = start(1, 22, drafter=drafter, num_speculative_tokens=NUM_DRAFTS, kv_blocks=5, paused_blocks=2)
    run.add(1, some_tokens(23, seed=1), 30)  # it needs a third block while the first request has three of the five
    was_paused = False
    while 0 in run.engine.requests:
        was_paused = any(request.is_paused for request in run.context.running_requests)
        run.step()
    assert was_paused and not is_ahead(run)
    finish(run)


LOOKED_AT: dict[str, Callable[[], SamplingParams]] = {
    "penalties": lambda: penalized(40),
    "log-probs": lambda: greedy(40, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2),
    "stop words": lambda: greedy(40, stop_words=["95 95 95"]),
}


@in_either_form
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_inspecting_requests_between_steps_changes_no_output(name: str, is_cancelled: bool) -> None:
    found = []
    for overlaps in (False, True):
        run = start_drafted(block_size_tokens=64, run_ahead=overlaps)
        run.add(3, some_tokens(20, seed=9), LOOKED_AT[name]())
        for _ in range(6):
            run.step()
        if is_cancelled:
            assert is_ahead(run) is overlaps
            run.engine.cancel_request(0)
        assert (finish_any(run) > 3) is overlaps
        request = run.finished[3]
        found.append((run.tokens(3), request.generated_log_probs, request.generated_top_n_logprobs))
    (tokens, log_probs, best), (tokens_ahead, log_probs_ahead, best_ahead) = found
    assert tokens == tokens_ahead
    # A cancelled request leaves at another step, and on a GPU a product's bits depend on how many requests it has.
    rel = 1e-5 if is_cancelled and torch.cuda.is_available() else 1e-6
    assert log_probs == pytest.approx(log_probs_ahead, rel=rel) if log_probs else not log_probs_ahead
    assert [*map(set, best or ())] == [*map(set, best_ahead or ())]
    for token, token_ahead in zip(best or (), best_ahead or (), strict=True):
        assert token == pytest.approx(token_ahead, rel=rel)


def finish_any(run: EngineRun) -> int:
    """Run all requests to their end, and return the number of overlapped steps; some requests sample."""
    num_early = 0
    while run.engine.has_unfinished_requests():
        num_early += is_ahead(run)
        run.step()
        run.context.check_integrity()
    run.assert_nothing_held()
    return num_early


ERRORS: dict[str, Callable[[EngineRun], tuple[Any, str]]] = {
    "proposing": lambda run: (run.context.cache, "schedule_decode"),
    "sending": lambda run: (run.context.memory.step_buffers, "send"),
    "launching": lambda run: (run.context.runner.overlapped_steps, "launch_drafts"),
    "landing": lambda run: (run.context.cache, "advance"),
    "verifying": lambda run: (run.context.overlapped_step, "verify"),
    "taking": lambda run: (run.context.overlapped_step, "lay_out"),
    "scheduling": lambda run: (run.engine, "schedule_waiting_requests"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", ERRORS)
def test_error_during_an_overlapped_step_loses_no_token(point: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_drafted(draft_states=form, block_size_tokens=64)
    for _ in range(3):
        step_until_ahead(run)
        with monkeypatch.context() as patch:
            raise_once(patch, *ERRORS[point](run))
            with pytest.raises(InjectedError):
                for _ in range(4):
                    run.step()
        run.context.check_integrity()
        run.step()
    finish(run)


@in_either_form
def test_reports_are_the_same_with_and_without_overlapped_steps() -> None:
    reports = []
    for overlaps in (False, True):
        run = start_drafted(block_size_tokens=64, run_ahead=overlaps)
        reports.append([])
        while run.engine.has_unfinished_requests():
            entries = dict(run.engine.requests)
            report = run.engine.step_modern()
            kept = [list(entry.record[-1].generated_tokens) for entry in entries.values()]
            ended = [record.request_id for record in report["finished_request_records"]]
            counts = [run.engine.draft_counts(request_id) for request_id in range(3)]
            reports[-1].append([report["active_request_ids"], ended, report["cuda_graph_request_count"], kept, counts])
    assert reports[0] == reports[1]


@in_either_form
@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("only_last", [False, True])
def test_log_probs_are_correct_when_another_request_leaves(only_last: bool, gone: int) -> None:
    found = []
    for overlaps in (False, True):
        subject = tiny_hybrid()
        config = cache_config(
            subject.sizes, num_speculative_tokens=NUM_DRAFTS, block_size_tokens=64, run_ahead=overlaps
        )
        config = replace(config, num_cuda_graphs=3, cuda_graph_prefill_tokens=40)
        drafter = MostlyRight(replies())
        run = EngineRun.start(subject, config, drafter=drafter, materialize_only_last_token_logits=only_last)
        for request_id in range(3):
            sampling = greedy(60, return_log_probs=True, skip_prompt_log_probs=True)
            run.add(request_id, some_tokens(20 + 3 * request_id, seed=request_id), sampling)
        for _ in range(5):
            run.step()
        assert is_ahead(run) is overlaps
        run.engine.cancel_request(gone)
        run.finish()
        found.append([run.finished[left].generated_log_probs for left in {0, 1, 2} - {gone}])
    for plain, ahead in zip(*found, strict=True):
        assert ahead == pytest.approx(plain)
