"""Steps that verify drafts: kept tokens, findable blocks, and the number of copies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.policy.align import plan_align_copy
from megatron_mamba_cache.recurrences.batches import AlignBatch
from megatron_mamba_cache.recurrences.interface import DraftStorage, LiveState
from megatron_mamba_cache.recurrences.replay.drafts import ReplayStorage
from megatron_mamba_cache.recurrences.window import WindowStorage
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from megatron_mamba_cache.step import runner as runner_module
from tests.mcore.engine_runs import (
    EngineRun,
    add_fields,
    cache_config,
    greedy,
    some_tokens,
    tiny_hybrid,
    with_one_budget,
)
from tests.mcore.injected_errors import InjectedError, raise_once
from tests.mcore.noisy_drafter import NoisyDrafter

BLOCK = 8
NUM_TOKENS = 40
LOG_PROB_TOLERANCE = 1e-4

CHANGES = {"frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.4, "min_p": 0.02, "min_tokens": 5}


def start_run(
    num_drafts: int, *, accuracy: float = 1.0, texts: dict[int, list[int]] | None = None, **settings: Any
) -> EngineRun:
    """Return an engine with blocks of 8 tokens whose drafter knows every greedy text, or `texts`."""
    subject = tiny_hybrid()
    keeps_all_logits = settings.pop("keeps_all_logits", False)
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, num_speculative_tokens=num_drafts, **settings)
    vocab = subject.sizes.vocab_size
    known = greedy_texts() if texts is None else texts
    drafter = NoisyDrafter(known, accuracy=accuracy, vocab_size=vocab) if num_drafts else None
    return EngineRun.start(subject, config, drafter=drafter, materialize_only_last_token_logits=not keeps_all_logits)


def prompt_of(request_id: int) -> list[int]:
    return some_tokens(13 + 5 * request_id, seed=request_id)


@cache
def greedy_texts() -> dict[int, list[int]]:
    """Return the texts of four requests without drafts: prompt and reply."""
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, prefix_caching=False))
    for request_id in range(4):
        run.add(request_id, prompt_of(request_id), 3 * NUM_TOKENS)
    run.finish()
    return {request_id: run.prompts[request_id] + run.tokens(request_id) for request_id in range(4)}


def _counted(original: Callable[..., None], counts: list[int]) -> Callable[..., None]:
    def counted(drafts: DraftStorage, stored: Any, replay: Any, requests: AlignBatch, block_size: int) -> None:
        fields = zip(
            requests.computed.tolist(),
            requests.scheduled.tolist(),
            requests.drafts.tolist(),
            requests.accepted.tolist(),
            requests.targets.tolist(),
            strict=True,
        )
        counts.append(
            sum(target >= 0 and plan_align_copy(*request, 0, block_size) is not None for *request, target in fields)
        )
        original(drafts, stored, replay, requests, block_size)

    return counted


@pytest.fixture
def align_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the number of requests of each align copy."""
    counts: list[int] = []
    for drafts in (WindowStorage, ReplayStorage):
        monkeypatch.setattr(drafts, "cache_boundaries", _counted(drafts.cache_boundaries, counts))
    yield counts


# How many tokens, and how many copies.


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_correct_drafts_are_all_accepted_in_one_step(num_drafts: int) -> None:
    run = start_run(num_drafts)
    run.run(0, prompt_of(0), NUM_TOKENS)
    assert run.tokens(0) == greedy_texts()[0][13 : 13 + NUM_TOKENS]
    counters = run.counters
    assert counters.accepted_tokens == counters.draft_tokens
    decoded = NUM_TOKENS - 1  # the first token comes with the prompt
    assert counters.decode_rows + counters.accepted_tokens == decoded
    assert counters.decode_rows < 1.5 * decoded / (1 + num_drafts) + 3
    run.assert_exact()


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 7])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 11, 12, 19, 40])
def test_decoding_makes_one_state_copy_per_completed_block(
    num_drafts: int, accuracy: float, num_tokens: int, align_copies: list[int]
) -> None:
    run = start_run(num_drafts, accuracy=accuracy, decode_checkpoints="all")
    run.run(0, prompt_of(0), num_tokens)
    computed = 13 + num_tokens - 1  # the last token is never fed
    crossed = computed // BLOCK - 13 // BLOCK
    assert sum(align_copies) == crossed
    assert run.counters.decode_states_published == crossed
    run.assert_exact()


def test_rejected_drafts_past_a_block_end_cache_no_state(align_copies: list[int]) -> None:
    run = start_run(7, accuracy=0.0)
    run.add(0, prompt_of(0), 2)  # 13 prompt tokens; drafts reach over 16, the accepted ones do not
    run.finish()
    assert run.counters.draft_tokens == 0 or sum(align_copies) == 0
    assert run.counters.decode_states_published == 0
    run.assert_exact()


# What is kept.


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("index", range(2, 16))
def test_stop_string_inside_accepted_drafts_ends_the_request(index: int, length: int) -> None:
    text = greedy_texts()[0]
    word = text[13 + index : 13 + index + length]
    run = start_run(7, decode_checkpoints="all")
    ending = {"termination_id": word[0]} if length == 1 else {"stop_words": [" ".join(map(str, word))]}
    run.run(0, prompt_of(0), greedy(NUM_TOKENS, **ending))
    reply = text[13:]
    end = next(end for end in range(length, NUM_TOKENS + 1) if reply[end - length : end] == word)
    assert run.tokens(0) == reply[:end]
    # A prompt that goes on as the text would have gone on finds nothing after the kept tokens.
    computed = run.run(1, text[: 13 + NUM_TOKENS], 1)
    kept = 13 + end
    assert 13 + NUM_TOKENS - computed <= kept // BLOCK * BLOCK
    run.assert_exact()


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_length_limit_inside_accepted_drafts_ends_the_request(num_tokens: int) -> None:
    run = start_run(7, max_sequence_length=13 + 9)
    run.run(0, prompt_of(0), min(num_tokens, 9))
    assert run.tokens(0) == greedy_texts()[0][13 : 13 + min(num_tokens, 9)]
    run.assert_exact()


@pytest.mark.parametrize("accuracy", [0.6, 1.0])
@pytest.mark.parametrize("keeps_all_logits", [False, True])
def test_every_accepted_token_has_its_log_prob(accuracy: float, keeps_all_logits: bool) -> None:
    run = start_run(4, accuracy=accuracy, keeps_all_logits=keeps_all_logits)
    skips = {"skip_prompt_log_probs": not keeps_all_logits}
    for request_id in range(3):
        requested = {"return_log_probs": True, "top_n_logprobs": 2, **skips} if request_id else {}
        run.add(request_id, prompt_of(request_id), greedy(NUM_TOKENS, **requested))
    run.finish()
    assert run.counters.accepted_tokens > 0
    for request_id in (1, 2):
        request, prompt = run.finished[request_id], prompt_of(request_id)
        text = prompt + run.tokens(request_id)
        log_probs = run.subject.oracle.logits(text).log_softmax(-1).cpu()
        wanted = log_probs[:-1].gather(1, torch.tensor(text)[1:, None])[:, 0].tolist()[len(prompt) - 1 :]
        assert request.generated_log_probs == pytest.approx(wanted, abs=LOG_PROB_TOLERANCE)
        best = log_probs[len(prompt) - 1 : -1].topk(2)
        assert len(request.generated_top_n_logprobs) == NUM_TOKENS
        for found, values, tokens in zip(request.generated_top_n_logprobs, best.values, best.indices, strict=True):
            assert list(found) == [str(token) for token in tokens.tolist()]
            assert list(found.values()) == pytest.approx(values.tolist(), abs=LOG_PROB_TOLERANCE)
    run.assert_exact()


@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("accuracy", [pytest.param(0.0, marks=pytest.mark.long), 0.8, 1.0])
@pytest.mark.parametrize("changes", [{}, CHANGES], ids=["plain", "changed"])
@pytest.mark.parametrize("top_k", [1, 30])
def test_drafts_change_no_sampled_token(num_drafts: int, accuracy: float, changes: dict[str, Any], top_k: int) -> None:
    sampling = SamplingParams(temperature=1.1, top_k=top_k, top_p=0.95, num_tokens_to_generate=30, termination_id=-1)
    add_fields(sampling, logits=changes)

    def sampled(run: EngineRun) -> dict[int, list[int]]:
        for request_id in range(4):
            run.add(request_id, prompt_of(request_id), sampling, seed=request_id)
        run.finish()
        run.assert_nothing_held()
        return {request_id: run.prompts[request_id] + run.tokens(request_id) for request_id in range(4)}

    plain = sampled(start_run(0, prefix_caching=False))
    run = start_run(num_drafts, accuracy=accuracy, texts=plain)
    assert sampled(run) == plain
    assert run.counters.draft_tokens > 0
    assert (run.counters.accepted_tokens > 0) == (accuracy > 0)


class HiddenStateDrafter(NoisyDrafter):
    """Records the hidden states of its draft requests, by request and length of the text."""

    hidden_size = 32

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: dict[tuple[int, int], torch.Tensor] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            assert request.hidden_state is not None
            self.seen[request.running.request_id, request.running.length] = request.hidden_state.clone()
        return super().propose(requests)


def test_drafter_gets_the_hidden_state_of_the_newest_token() -> None:
    subject = tiny_hybrid()
    drafter = HiddenStateDrafter(greedy_texts(), accuracy=0.8, vocab_size=96)
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, num_speculative_tokens=3, max_tokens=16)
    run = EngineRun.start(subject, config, drafter=drafter)
    for request_id in range(3):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS)
    run.finish()
    assert len(drafter.seen) > 20
    output = subject.model.output_layer.weight
    for (request_id, length), state in drafter.seen.items():
        assert int((output @ state).argmax()) == greedy_texts()[request_id][length - 1]
    run.assert_exact()


def test_drafter_for_another_hidden_size_is_refused() -> None:
    subject = tiny_hybrid(hidden_size=48)
    drafter = HiddenStateDrafter({}, accuracy=1.0, vocab_size=96)
    config = cache_config(subject.sizes, num_speculative_tokens=3)
    with pytest.raises(ValueError, match="size 32, but the model's hidden size is 48"):
        EngineRun.start(subject, config, drafter=drafter)
    with pytest.raises(ValueError, match="materialize_only_last_token_logits=True"):
        EngineRun.start(
            tiny_hybrid(),
            cache_config(tiny_hybrid().sizes, num_speculative_tokens=3),
            drafter=drafter,
            materialize_only_last_token_logits=False,
        )


@pytest.mark.parametrize("call", [1, 2, 5, 9, 14])
def test_decoding_error_in_top_n_tokens_loses_no_token(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(3)
    requested = {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 2}
    run.add(0, prompt_of(0), greedy(20, **requested))
    raise_once(monkeypatch, run.engine.controller.tokenizer, "detokenize", call=call)
    with pytest.raises(InjectedError):
        run.finish()
    run.finish()
    request = run.finished[0]
    assert len(request.generated_tokens) == 20
    assert len(request.generated_top_n_logprobs) == len(request.generated_log_probs) == 20
    run.assert_exact()


# Memory.


def test_paused_request_continues_from_its_last_accepted_state(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[int] = []
    resolve = WindowStorage.resolve

    def counted(drafts: WindowStorage, states: Sequence[LiveState]) -> None:
        resolved.extend(state.accepted - 1 for state in states)
        resolve(drafts, states)

    monkeypatch.setattr(WindowStorage, "resolve", counted)
    for kv_blocks in range(9, 16):
        run = start_run(5, accuracy=0.9, kv_blocks=kv_blocks, paused_blocks=kv_blocks - 1, max_sequence_length=64)
        for request_id in range(3):
            run.add(request_id, prompt_of(request_id), 30)
        while run.engine.requests:
            run.step()
            assert not any(request.cursor.draft_slots for request in run.context.running_requests if request.is_paused)
        run.assert_exact()
    assert len(set(resolved)) > 2, resolved


def test_interrupted_request_resumes_at_its_decode_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(3, accuracy=0.9)
    run.add(0, prompt_of(0), NUM_TOKENS)
    for _ in range(12):
        run.step()
    (request,) = run.context.running_requests
    length, before = request.length, run.counters.prefill_tokens_computed
    raise_once(monkeypatch, runner_module, "verify_step")
    with pytest.raises(InjectedError):
        run.step()
    assert not run.context.running_requests and length > 2 * BLOCK
    run.finish()
    assert run.counters.prefill_tokens_computed - before == length - (length - 1) // BLOCK * BLOCK
    run.assert_exact()


@pytest.mark.parametrize(("checkpoints", "num_left"), [("rolling", 1), ("all", 5), ("none", 0)])
def test_request_keeps_the_configured_number_of_decode_checkpoints(checkpoints: str, num_left: int) -> None:
    run = start_run(3, accuracy=0.8, decode_checkpoints=checkpoints)
    run.run(0, prompt_of(0), NUM_TOKENS)
    prompt_states = 1  # the last boundary of 13 tokens
    assert run.context.snapshot().state_slots["cached"] == prompt_states + num_left
    run.assert_exact()


def test_checkpoint_reused_by_another_request_is_not_retired() -> None:
    run = start_run(0)
    run.add(0, prompt_of(0), NUM_TOKENS)
    while run.counters.decode_states_published < 2:
        run.step()
    (request,) = run.context.running_requests
    text = [*map(int, request.tokens(0, request.length))]
    boundary = request.computed // BLOCK * BLOCK
    assert run.run(1, text[: boundary + 1], 1) == 1
    run.finish()
    assert run.run(2, text[: boundary + 1], 1) == 1
    assert run.run(3, text[: boundary - BLOCK + 1], 1) > 1  # no other request used its predecessor, now retired
    run.assert_exact()


@pytest.mark.parametrize("accuracy", [0.7, 1.0])
def test_state_after_a_draft_step_is_that_of_the_last_accepted_token(accuracy: float) -> None:
    run, plain = start_run(4, accuracy=accuracy), start_run(0)
    for engine in (run, plain):
        engine.add(0, prompt_of(0), NUM_TOKENS)
    num_compared = 0
    while run.engine.requests:
        run.step()
        if not run.engine.requests:
            break
        (request,) = run.context.running_requests
        while not plain.context.running_requests or plain.context.running_requests[0].computed < request.computed:
            plain.step()
        num_compared += request.cursor.accepted > 1
        live, plain_live = (e.context.mamba_metadata.request_to_mamba_state_idx[0] for e in (run, plain))
        ssm, plain_ssm = (e.context.mamba_ssm_states for e in (run, plain))
        torch.testing.assert_close(ssm[:, live], plain_ssm[:, plain_live], rtol=1e-4, atol=1e-5)
        conv, plain_conv = (e.context.mamba_conv_states for e in (run, plain))
        torch.testing.assert_close(conv[:, live, :3], plain_conv[:, plain_live], rtol=1e-4, atol=1e-5)
        assert request.cursor.accepted == 1 and not request.cursor.draft_slots
    assert num_compared > 2
    run.assert_exact()


# Errors.


@pytest.mark.parametrize(
    ("num_drafts", "needed"),
    [(wrong, "an int from 0 to 8") for wrong in (-1, 9, 1.0, True)] + [(8, "below block_size_tokens=8")],
)
def test_num_speculative_tokens_out_of_range_is_refused(num_drafts: Any, needed: str) -> None:
    subject = tiny_hybrid()
    with pytest.raises(ValueError, match=f"num_speculative_tokens is {num_drafts}; it must be {needed}"):
        cache_config(subject.sizes, block_size_tokens=8, num_speculative_tokens=num_drafts)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_more_drafts_than_the_state_budget_holds_are_refused(prefix_caching: bool) -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, prefix_caching=prefix_caching, num_speculative_tokens=1)
    config = replace(with_one_budget(config, subject.shape, 0), num_speculative_tokens=8)
    with pytest.raises(ValueError, match=r"cannot hold one request.*--cache-gb"):
        EngineRun.start(subject, config)
    start_run(5, cached_states=5, prefix_caching=prefix_caching).run(0, prompt_of(0), 9)


def test_drafter_is_refused_when_num_speculative_tokens_is_0() -> None:
    subject = tiny_hybrid()
    drafter = NoisyDrafter({}, accuracy=1.0, vocab_size=96)
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 0"):
        EngineRun.start(subject, cache_config(subject.sizes), drafter=drafter)


def test_drafter_error_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(3)
    for request_id in range(3):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS)
    for _ in range(3):
        run.step()
    raise_once(monkeypatch, run.context.planner._drafter, "propose")
    run.finish()
    assert run.counters.drafting_failures == 1
    run.assert_exact()


def test_failed_drafter_is_reset_before_its_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = start_run(3)
    for request_id in range(3):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS)
    for _ in range(3):
        run.step()
    drafter = run.context.planner._drafter
    assert drafter.forgotten == []
    calls = raise_once(monkeypatch, drafter, "propose")
    run.step()
    assert calls == [1] and sorted(drafter.forgotten) == [0, 1, 2]
    run.finish()
    assert sorted(drafter.forgotten) == [0, 0, 1, 1, 2, 2]


class ForgetsWithDifficulty(NoisyDrafter):
    """Raises whenever a request leaves."""

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        raise KeyError(request_id)


def test_error_when_a_drafter_drops_a_request_changes_no_token(caplog: pytest.LogCaptureFixture) -> None:
    subject = tiny_hybrid()
    drafter = ForgetsWithDifficulty(greedy_texts(), accuracy=0.8, vocab_size=96)
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, num_speculative_tokens=3, kv_blocks=12)
    run = EngineRun.start(subject, config, drafter=drafter)
    for request_id in range(3):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS)
    run.finish()
    assert set(drafter.forgotten) == {0, 1, 2}
    assert [len(run.tokens(request_id)) for request_id in range(3)] == [NUM_TOKENS] * 3
    assert "ForgetsWithDifficulty cannot forget request" in caplog.text
    run.assert_exact()


class BrokenDrafter(NoisyDrafter):
    """Raises, or returns an invalid answer, for request 0."""

    answer: Any = None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        if all(request.running.request_id for request in requests):
            return drafts
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(requests)


@pytest.mark.parametrize("answer", [RuntimeError("no"), None, Draft((96,)), Draft((1,) * 9), Draft((-1,))])
def test_drafter_that_always_fails_changes_no_token(answer: Any) -> None:
    subject = tiny_hybrid()
    drafter = BrokenDrafter(greedy_texts(), accuracy=1.0, vocab_size=96)
    drafter.answer = answer
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, num_speculative_tokens=3)
    run = EngineRun.start(subject, config, drafter=drafter)
    for request_id in range(3):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS - 10 * (request_id == 0))
    run.finish()
    assert run.counters.drafting_failures > 1 and run.counters.accepted_tokens > 0
    run.assert_exact()


@pytest.mark.parametrize("drafter", ["prompt-lookup", PromptLookupDrafter, object()])
def test_invalid_drafter_is_refused(drafter: Any) -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, num_speculative_tokens=3)
    with pytest.raises(TypeError, match=r"drafter is .*must be an object with propose\(\) and forget\(\)"):
        EngineRun.start(subject, config, drafter=drafter)


def test_drafts_leave_state_slots_free_for_checkpoints() -> None:
    run = start_run(4, cached_states=16, max_requests=4)
    for request_id in range(4):
        run.add(request_id, prompt_of(request_id), NUM_TOKENS)
    run.finish()
    for request_id in range(4):
        text = run.prompts[request_id] + run.tokens(request_id)
        computed = run.run(10 + request_id, text, 1)
        assert computed <= 2 * BLOCK, (request_id, computed)
    run.assert_exact()


def test_drafter_drops_its_data_on_every_finished_request() -> None:
    run = start_run(3)
    for request_id in range(4):
        run.add(request_id, prompt_of(request_id), 9)
    run.finish()
    assert sorted(run.context.planner._drafter.forgotten) == [0, 1, 2, 3]
