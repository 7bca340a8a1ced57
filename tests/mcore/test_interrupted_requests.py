"""Every setting of a request, its breakpoints and their times survive every interruption."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import msgpack
import pytest
import torch
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.grammars.forms import regex_grammar
from megatron_mamba_cache.mcore.request_spec import PROMPT_SCORES, SpecParams, spec_of
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.step import runner as runner_module
from tests.grammars.piece_tokenizer import END, PieceTokenizer
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.injected_errors import InjectedError, raise_once

BLOCK = 16
SHARED = 5 * BLOCK
ASKED, NEIGHBOUR = 1, 2
LOGITS_ASKED = {
    "logit_bias": [[3, 1.0], [9, -2.0]],
    "min_tokens": 3,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "min_p": 0.01,
}
OF_THE_PREFILL = {"prompt", "prompt_len", "num_replayed"}
"""Fields of a spec that describe the prefilled text, which grows by generated tokens."""


def suspend(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.resume()


def fail_step(run: EngineRun) -> None:
    _fail_at(run, run.context.runner, "land")


def fail_report(run: EngineRun) -> None:
    _fail_at(run, run.engine, "_before_report")


def fail_sampling(run: EngineRun) -> None:
    _fail_at(run, runner_module, "verify_step")


def evict(run: EngineRun) -> None:
    """Send the request back like a preemption of the youngest, without a lack of memory."""
    run.engine._send_back([ASKED])


def isolate_a_neighbour(run: EngineRun) -> None:
    """Let another request make two steps fail, so that it runs alone and all others wait."""
    run.add(NEIGHBOUR, some_tokens(20, seed=8), 3)
    run.step()
    run.engine._failed_steps.count([NEIGHBOUR])
    run.engine._failed_steps.count([NEIGHBOUR])
    run.step()
    assert [request.request_id for request in run.context.running_requests] == [NEIGHBOUR]


def cancel_a_neighbour(run: EngineRun) -> None:
    run.add(NEIGHBOUR, some_tokens(20, seed=8), 30)
    run.step()
    assert run.engine.cancel_request(NEIGHBOUR)


def _fail_at(run: EngineRun, owner: Any, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        raise_once(patch, owner, name)
        with pytest.raises(InjectedError):
            run.step()


INTERRUPTIONS: dict[str, Callable[[EngineRun], None]] = {
    "suspended": suspend,
    "a failed step": fail_step,
    "a failed report": fail_report,
    "failed sampling": fail_sampling,
    "evicted": evict,
    "a neighbour that runs alone": isolate_a_neighbour,
}
UNINTERRUPTED: dict[str, Callable[[EngineRun], None]] = {"a cancelled neighbour": cancel_a_neighbour}


def everything(grammar: str = "") -> SamplingParams:
    """Return parameters without any default."""
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.97,
        num_tokens_to_generate=24,
        termination_id=END,
        stop_words=["abc"],
        return_log_probs=True,
        top_n_logprobs=2,
    )
    logits = LOGITS_ASKED | ({"min_tokens": 0} if grammar else {})
    add_fields(params, logits=logits, grammar=grammar, stop_token_ids=[90, 91], prompt_top_n=1)
    add_fields(params, top_n_by_id=True, returns_routes=False)
    add_fields(params, breakpoints=[[SHARED + 3, 60], [20, 0]], arrived_s=1000)
    return params


def start_run(**settings: Any) -> EngineRun:
    subject = tiny_hybrid(vocab_size=PieceTokenizer().vocab_size)
    config = cache_config(subject.sizes, **({"max_tokens": 256} | settings))
    return EngineRun.start(subject, config, tokenizer=PieceTokenizer(), scores_prompts=True)


def step_until_generated(run: EngineRun, num_tokens: int) -> None:
    def num_generated() -> int:
        return sum(len(part.generated_tokens) for part in run.engine.requests[ASKED].record.requests)

    while num_generated() < num_tokens:
        run.step()


def spec_of_running(run: EngineRun) -> RequestSpec:
    return next(request.spec for request in run.context.running_requests if request.request_id == ASKED)


def differences(spec: Any, other: Any, prefix: str = "") -> set[str]:
    """Return the names of the fields in which two specs differ, nested settings included."""
    found = set()
    for field in fields(spec):
        one, two = getattr(spec, field.name), getattr(other, field.name)
        if is_dataclass(one):
            found |= differences(one, two, f"{prefix}{field.name}.")
        elif field.name not in OF_THE_PREFILL and one != two:
            found.add(prefix + field.name)
    return found


def defaults_in(spec: Any, prefix: str = "") -> set[str]:
    """Return the names of the fields with their defaults."""
    found = set()
    for field in fields(spec):
        value = getattr(spec, field.name)
        if is_dataclass(value):
            found |= defaults_in(value, f"{prefix}{field.name}.")
        elif field.default is not MISSING and value == field.default:
            found.add(prefix + field.name)
    return found


@pytest.mark.parametrize("grammar", ["", regex_grammar("[d-z]{60,99}").text], ids=["settings", "a grammar"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", INTERRUPTIONS | UNINTERRUPTED)
def test_interruption_keeps_every_setting_and_output_of_a_request(name: str, times: int, grammar: str) -> None:
    run = start_run()
    run.add(ASKED, some_tokens(SHARED + 10), everything(grammar), seed=77, tenant="one")
    step_until_generated(run, 1)
    asked = spec_of_running(run)
    # A field that is new and has its default here is not tested: give it a value in `everything`.
    unused = {"sampling.logits.min_tokens"} if grammar else {"sampling.grammar"}
    assert defaults_in(asked) == unused | {"num_replayed", "log_probs.skip_prompt"}
    for count in range(times):
        (INTERRUPTIONS | UNINTERRUPTED)[name](run)
        while run.engine.requests.keys() - {ASKED}:
            run.step()
        step_until_generated(run, 2 + count)
        spec = spec_of_running(run)
        assert differences(spec, asked) <= {"log_probs.skip_prompt"}
        assert spec.num_replayed == 0 if name in UNINTERRUPTED else spec.num_replayed > count
        assert list(spec.prompt[: asked.prompt_len]) == list(asked.prompt)
        assert spec.prompt_len == asked.prompt_len + spec.num_replayed
    run.finish()
    text = PieceTokenizer().detokenize(run.tokens(ASKED))
    assert not grammar or text.isalpha()
    request = run.finished[ASKED]
    for entries in (request.generated_log_probs, request.generated_top_n_logprobs):
        assert len(entries) == len(run.tokens(ASKED))
    named = [*request.prompt_top_n_logprobs, *request.generated_top_n_logprobs]
    assert all(name.isdecimal() for best in named for name in best)
    assert len(request.prompt_log_probs) == len(getattr(request.sampling_params, PROMPT_SCORES)) == SHARED + 9


@pytest.mark.parametrize("num_generated", [0, 1, 5])
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interruption_keeps_cache_breakpoints_and_their_ttl(name: str, num_generated: int) -> None:
    """Flush the cache first, so that only the second prefill can have left a state."""
    run = start_run(cached_states=60)
    params = greedy(12)
    add_fields(params, breakpoints=[[SHARED + 3, 60], [2 * BLOCK, 0]], arrived_s=1000)
    run.add(ASKED, some_tokens(SHARED + 3 * BLOCK), params)
    step_until_generated(run, num_generated)
    run.engine.flush()
    INTERRUPTIONS[name](run)
    run.finish()
    assert sorted(run.context.cache.slots._held.until.values()) == [1060]
    for request_id, shared in ((10, SHARED), (11, 2 * BLOCK), (12, SHARED + 2 * BLOCK)):
        run.run(request_id, some_tokens(SHARED + 3 * BLOCK)[:shared] + some_tokens(9, seed=5), 2)
        assert run.engine.cached_tokens(request_id) == shared
    run.assert_exact()


@pytest.mark.parametrize("prompt_len", [SHARED, SHARED + 7, 5], ids=["whole blocks", "a part of a block", "no block"])
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interruption_does_not_reduce_the_prefix_that_a_request_caches(name: str, prompt_len: int) -> None:
    skipped = []
    for interrupt in (None, INTERRUPTIONS[name]):
        run = start_run(decode_checkpoints="none")
        run.add(ASKED, some_tokens(prompt_len), 40)
        step_until_generated(run, 20)  # more than a block
        if interrupt is not None:
            run.engine.flush()
            interrupt(run)
        run.finish()
        run.run(10, some_tokens(prompt_len), 2)
        skipped.append(run.engine.cached_tokens(10))
    assert skipped[0] == skipped[1] == (prompt_len - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("num_generated", [0, 1, 4])
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interruption_keeps_stop_strings_end_tokens_and_length_limits(name: str, num_generated: int) -> None:
    """End by a stop word that began before the interruption, a stop token, another end token, or the length."""
    run = start_run()
    run.run(50, some_tokens(30), 20)
    plain = run.tokens(50)
    tokenizer = run.engine.controller.tokenizer
    ends = {"length": 20}
    for index in range(num_generated + 1, 20):
        if plain[index] not in plain[:index]:
            ends["stop token"] = index + 1
            break
    pair = next(index for index in range(max(num_generated, 1), 20) if is_new_pair(plain, index))
    for kind, count in (*ends.items(), ("stop word", pair + 1), ("other end", ends["stop token"])):
        params = greedy(20, stop_words=["abc"], termination_id=None if kind == "other end" else -1)
        add_fields(params, stop_token_ids=[plain[count - 1]] if kind == "stop token" else [])
        with pytest.MonkeyPatch.context() as patch:
            if kind == "stop word":
                word = plain[count - 2 : count]
                patch.setattr(tokenizer, "tokenize", lambda text, word=word: list(word))
            if kind == "other end":
                patch.setattr(tokenizer, "other_end_ids", (plain[count - 1],), raising=False)
            run.add(ASKED, some_tokens(30), params)
            step_until_generated(run, num_generated)
            INTERRUPTIONS[name](run)
            run.finish()
        assert run.tokens(ASKED) == plain[:count], kind


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_character_split_by_an_interruption_is_in_the_reply_text(name: str) -> None:
    run, tokenizer = start_run(), PieceTokenizer()
    params = greedy(40, termination_id=END)
    add_fields(params, grammar=regex_grammar("[ж-н]{9}").text)
    run.add(ASKED, some_tokens(30), params)
    step_until_generated(run, 3)  # two bytes a character
    INTERRUPTIONS[name](run)
    run.finish()
    text = run.finished[ASKED].generated_text
    assert text == tokenizer.detokenize(run.tokens(ASKED)) and len(text) == 9


def test_late_report_of_an_interrupted_request_has_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    run.add(ASKED, some_tokens(30), 4)
    step_until_generated(run, 2)
    suspend(run)
    step_until_generated(run, 3)
    raise_once(monkeypatch, run.engine.controller.tokenizer, "detokenize", call=5)  # two prompts, two parts, the whole
    with pytest.raises(InjectedError):
        run.step()
    run.finish()
    run.step()
    assert run.finished[ASKED].generated_text == PieceTokenizer().detokenize(run.tokens(ASKED))


def is_new_pair(tokens: list[int], index: int) -> bool:
    pairs = list(pairwise(tokens))
    return pairs.index((tokens[index - 1], tokens[index])) == index - 1


def test_request_spec_is_equal_after_serialization() -> None:
    run = start_run()
    params = add_fields(everything(regex_grammar("[d-z]{60,99}").text), logits=LOGITS_ASKED | {"min_tokens": 0})
    run.add(ASKED, some_tokens(30), params, seed=5, tenant="one")
    asked = run.engine._states[ASKED].candidate.spec
    sent = msgpack.unpackb(msgpack.packb(SpecParams(asked).serialize()))
    tokens = torch.tensor(some_tokens(30))
    request = DynamicInferenceRequest(
        request_id=ASKED, prompt_tokens=tokens, sampling_params=SamplingParams.deserialize(sent)
    )
    assert differences(spec_of(request), asked) == set()
    assert defaults_in(asked) == {"sampling.logits.min_tokens", "num_replayed", "log_probs.skip_prompt"}


def test_spec_of_a_continued_request_keeps_every_field() -> None:
    run = start_run()
    run.add(ASKED, some_tokens(30), everything(), seed=5, tenant="one")
    asked = run.engine._states[ASKED].candidate.spec
    assert asked is not None and asked.continued([]) is asked
    once, twice = asked.continued([4, 5]), asked.continued([4, 5, 6])
    assert list(twice.prompt) == [*some_tokens(30), 4, 5, 6] and twice.num_replayed == 3 and once.num_replayed == 2
    for spec in (once, twice):
        expected = replace(asked, log_probs=replace(asked.log_probs, skip_prompt=True))
        assert differences(spec, expected) == set() and spec.may_skip and not asked.may_skip
