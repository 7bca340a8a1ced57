"""A request that cannot run fails alone with a clear error; so does an engine that cannot be built."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.inference.contexts import dynamic_context
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_mamba_cache import CacheConfig, build_engine, mcore, with_mamba_cache
from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.step_report import failure_reason
from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from megatron_mamba_cache.step import memory as cache_memory
from tests.mcore.engine_runs import (
    EngineRun,
    cache_config,
    greedy,
    megatron_request,
    some_tokens,
    tiny_hybrid,
    tiny_sizes,
)


def start_run(**settings: Any) -> EngineRun:
    """Return an engine of 20 blocks of 16 tokens, for texts of up to 400 tokens."""
    subject = tiny_hybrid()
    tight = {"kv_blocks": 20, "max_sequence_length": 400} | settings
    return EngineRun.start(subject, cache_config(subject.sizes, **tight))


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, torch.tensor, lambda tokens: torch.tensor(tokens, dtype=torch.int32)]
)
def test_prompt_may_be_any_sequence_of_token_ids(form: Any) -> None:
    run, plain = start_run(), start_run()
    run.prompts[0] = some_tokens(20)
    run.engine.add_request(0, form(some_tokens(20)), greedy(4))
    run.finish()
    plain.run(0, some_tokens(20), 4)
    assert run.tokens(0) == plain.tokens(0)


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor])
def test_prompt_tokens_are_stored_on_the_cpu(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
        run.engine.add_request(0, form(some_tokens(20)), greedy(4))
    request = run.engine.get_request(0)
    assert request.prompt_tokens.tolist() == request.remaining_prompt_tokens.tolist() == some_tokens(20)
    assert (request.prompt_tokens.dtype, request.prompt_tokens.device) == (torch.int64, torch.device("cpu"))


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_changing_the_callers_list_does_not_change_the_prompt(form: Any) -> None:
    run, prompt = start_run(), form(some_tokens(20))
    run.engine.add_request(0, prompt, greedy(4))
    prompt[2:5] = form([1, 2, 3])
    run.prompts[0] = some_tokens(20)
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("token", [1.9, True, "7", None, 2**70, [1]])
def test_prompt_with_a_non_integer_token_is_refused_and_not_queued(token: Any) -> None:
    run = start_run()
    with pytest.raises(ValueError, match=r"token 1 of the prompt is .*64-bit integers"):
        run.engine.add_request(0, [3, token], greedy(4))
    for prompt in ([token] * 3, [np.int64(3), token]):
        with pytest.raises(ValueError, match=r"token [01] of the prompt is .*64-bit integers"):
            run.engine.add_request(0, prompt, greedy(4))
    with pytest.raises(TypeError, match="text or a sequence of token ids, found 7"):
        run.engine.add_request(0, 7, greedy(4))
    assert not run.engine.requests
    run.run(0, some_tokens(9), 4)
    run.assert_exact()


@pytest.mark.parametrize(
    "prompt",
    [
        torch.tensor([[3, 4]]),
        torch.tensor([3.0], dtype=torch.bfloat16),
        torch.tensor([True]),
        np.array([[3, 4]]),
        np.array([3.0]),
        np.array([2**63], dtype=np.uint64),
        [torch.tensor(3)],
        [np.array(3)],
        np.ma.array([3, 4], mask=[True, False]),
    ],
    ids=str,
)
def test_prompt_array_with_an_invalid_shape_or_dtype_is_refused(prompt: Any) -> None:
    run = start_run()
    with pytest.raises(ValueError, match=r"token 0 of the prompt is .*64-bit integers"):
        run.engine.add_request(0, prompt, greedy(4))
    assert not run.engine.requests


BAD_REQUESTS: dict[str, tuple[list[int], SamplingParams, tuple[str, ...]]] = {
    "prompt longer than the maximum": (some_tokens(401), greedy(1), ("401", "max_sequence_length=400")),
    "prompt and reply longer than the maximum": (
        some_tokens(390),
        greedy(11),
        ("390", "11", "max_sequence_length=400"),
    ),
    "empty prompt": ([], greedy(4), ("empty", "at least 1 token")),
    "negative token": ([5, -3, 6], greedy(4), ("-3", "96")),
    "token outside the vocabulary": ([5, 96, 6], greedy(4), ("96", "0 to 95")),
    "token beyond 32 bits": ([5, 2**40, 6], greedy(4), (str(2**40), "0 to 95")),
    "too many tokens for the KV pool": (
        some_tokens(300),
        greedy(22),
        ("321", "21 KV blocks", "20", "--inference-dynamic-batching-buffer-size-gb"),
    ),
    "negative number of tokens": (some_tokens(5), greedy(-1), ("-1", "num_tokens_to_generate")),
    "fewer tokens in all than in the prompt": (some_tokens(5), greedy(None, num_tokens_total=4), ("-1", "num_tokens")),
    "broken number of tokens": (some_tokens(5), greedy(2.5), ("num_tokens_to_generate is 2.5", "an int")),
    "number of tokens that is a bool": (some_tokens(5), greedy(True), ("num_tokens_to_generate is True", "an int")),
    "number of tokens that is text": (some_tokens(5), greedy("4"), ("num_tokens_to_generate is '4'", "an int")),
    "broken number of tokens in all": (
        some_tokens(5),
        greedy(None, num_tokens_total=9.5),
        ("num_tokens_total is 9.5", "an int"),
    ),
    "number of tokens in all that is text": (
        some_tokens(5),
        greedy(3, num_tokens_total="9"),
        ("num_tokens_total is '9'", "an int"),
    ),
    "termination id that is text": (some_tokens(5), greedy(4, termination_id="x"), ("termination_id is 'x'",)),
    "termination id that is a list": (some_tokens(5), greedy(4, termination_id=[5]), ("termination_id is [5]",)),
    "termination id beyond 32 bits": (some_tokens(5), greedy(4, termination_id=2**63), (str(2**63), "a token id")),
    "termination id whose magnitude wraps": (
        some_tokens(5),
        greedy(4, termination_id=np.int64(-(2**63))),
        (str(-(2**63)), "a token id"),
    ),
    "two lengths": (
        some_tokens(5),
        greedy(3, num_tokens_total=20),
        ("num_tokens_to_generate=3", "num_tokens_total=20"),
    ),
    "prompt log-probs where only last logits are kept": (
        some_tokens(5),
        greedy(4, return_log_probs=True),
        ("materialize_only_last_token_logits=False", "skip_prompt_log_probs=True"),
    ),
    "top-n without log-probs": (some_tokens(5), greedy(4, top_n_logprobs=2), ("top_n_logprobs=2", "return_log_probs")),
    "negative temperature": (
        some_tokens(5),
        greedy(4, temperature=-0.5),
        ("temperature=-0.5", "temperature must be finite and at least 0"),
    ),
    "temperature that is no number": (some_tokens(5), greedy(4, temperature=float("nan")), ("temperature=nan",)),
    "negative top_k": (some_tokens(5), greedy(4, top_k=-2), ("top_k=-2", "top_k between 0 and")),
    "top_p above 1": (some_tokens(5), greedy(4, top_p=1.5), ("top_p=1.5", "top_p between 0 and 1")),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_invalid_request_fails_with_a_clear_error_and_others_continue(name: str) -> None:
    prompt, params, words = BAD_REQUESTS[name]
    run = start_run()
    run.add(0, some_tokens(40), 9)
    run.step()
    run.add(1, prompt, params)
    run.add(2, some_tokens(40, seed=1), 9)
    run.finish()
    failed = run.finished[1]
    assert failed.failed() and not failed.generated_tokens
    assert all(word in failure_reason(failed) for word in words), failure_reason(failed)
    assert len([event for event in failed.events if event.payload is not None]) == 1
    run.assert_matches_oracle([0, 2]).assert_few_stops()
    assert [len(run.tokens(request_id)) for request_id in (0, 2)] == [9, 9]
    run.assert_nothing_held()


def test_duplicate_request_id_is_refused_and_the_first_request_continues() -> None:
    run = start_run()
    run.add(0, some_tokens(40), 9)
    run.step()
    with pytest.raises(ValueError, match="request id 0 is in use"):
        run.engine.add_request(0, some_tokens(5), greedy(3))
    run.finish()
    assert len(run.tokens(0)) == 9
    run.assert_matches_oracle().assert_few_stops()
    assert run.run(0, some_tokens(40)) == 8  # its id is free again


def test_request_id_can_be_reused_after_its_request_failed() -> None:
    run = start_run()
    run.run(0, [])
    run.run(0, some_tokens(40))
    assert len(run.tokens(0)) == 8
    run.assert_exact()


def test_failed_request_is_reported_when_the_engine_resumes() -> None:
    run = start_run()
    run.add(0, some_tokens(40))
    run.add(1, [])
    run.engine.suspend()
    run.engine.resume()
    run.finish()
    assert failure_reason(run.finished[1])
    run.assert_matches_oracle([0]).assert_few_stops()
    run.assert_nothing_held()


def test_failed_request_counts_as_unfinished_until_its_error_is_reported() -> None:
    run = start_run()
    run.add(0, [])
    assert run.engine.has_unfinished_requests()
    run.step()
    assert failure_reason(run.finished[0])
    assert not run.engine.has_unfinished_requests()


@pytest.mark.parametrize("name", [*BAD_REQUESTS, "open number of tokens"])
def test_context_refuses_an_invalid_request_and_is_unchanged(name: str) -> None:
    bad = BAD_REQUESTS | {"open number of tokens": (some_tokens(5), greedy(None), ("num_tokens_to_generate", "None"))}
    prompt, params, words = bad[name]
    run = start_run()
    before = run.context.snapshot()
    with pytest.raises(ValueError, match="request 7 cannot run") as error:
        run.context.add_request(megatron_request(7, prompt, params))
    if name != "fewer tokens in all than in the prompt":  # a number in all is the engine's to resolve
        assert all(word in str(error.value) for word in words), error.value
    assert run.context.snapshot() == before and not run.context.running_requests


def test_request_added_to_the_context_twice_is_refused() -> None:
    run = start_run()
    run.context.add_request(megatron_request(7, some_tokens(5), greedy(4)))
    with pytest.raises(ValueError, match="request id 7 is in use"):
        run.context.add_request(megatron_request(7, some_tokens(5), greedy(4)))
    assert [request.request_id for request in run.context.running_requests] == [7]


# Engines that cannot be built.


@pytest.mark.parametrize(("model", "found"), [(None, "None"), ("model", "'model'"), (torch.nn.Linear(1, 1), "Linear")])
def test_engine_built_without_a_model_raises_type_error(model: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"model must be a MambaModel, found {found}"):
        build_engine(model)


def test_engine_built_with_a_dict_of_settings_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"config must be a CacheConfig or None, found \{'max_tokens': 5\}"):
        build_engine(tiny_hybrid().model, {"max_tokens": 5})


@pytest.mark.parametrize("spec", [None, local_hybrid_spec, torch.nn.Linear], ids=["None", "function", "class"])
def test_layer_spec_of_the_wrong_type_is_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match="spec must be the ModuleSpec of a MambaStack, found"):
        with_mamba_cache(spec)


def test_too_small_kv_budget_is_refused_and_the_error_names_the_minimum() -> None:
    subject = tiny_hybrid()
    with pytest.raises(ValueError, match=r"cache_gb is 1.1e-06 .*--cache-gb to 0\.0\d+ or more"):
        build_engine(
            subject.model, CacheConfig(buffer_size_gb=1e-6, prefix_caching_mamba_gb=1e-7, max_sequence_length=512)
        )


def test_cache_gb_minimum_given_in_the_error_fits_the_longest_requests() -> None:
    subject = tiny_hybrid()
    settings = {"block_size_tokens": 16, "max_sequence_length": 96, "max_tokens": 64, "max_requests": 4}
    with pytest.raises(ValueError, match=r"cache_gb is 1e-06 GiB.*max_sequence_length=96") as error:
        build_engine(subject.model, CacheConfig(cache_gb=1e-6, **settings))
    least = _number_after("--cache-gb to ", error)
    run = EngineRun.start(subject, CacheConfig(cache_gb=least, **settings))
    for request_id in range(3):
        run.add(request_id, some_tokens(60, seed=request_id), 36)
    run.finish()
    run.assert_exact()


def test_engine_runs_with_the_minimum_cache_gb_given_in_the_error() -> None:
    subject = tiny_hybrid()
    settings = {"block_size_tokens": 16, "max_sequence_length": 64, "max_tokens": 64, "max_requests": 4}
    tiny = CacheConfig(buffer_size_gb=1e-9, prefix_caching_mamba_gb=1e-9, **settings)
    with pytest.raises(ValueError, match="cache_gb is 2e-09") as error:
        build_engine(subject.model, tiny)
    run = EngineRun.start(subject, dataclasses.replace(tiny, cache_gb=_number_after("--cache-gb to ", error)))
    run.run(0, some_tokens(7), 3)
    run.assert_matches_oracle()


def _number_after(words: str, error: pytest.ExceptionInfo[ValueError]) -> float:
    return float(str(error.value).split(words)[1].split()[0].rstrip(",.;"))


def test_too_small_state_budget_is_refused_and_the_error_names_the_minimum() -> None:
    large = tiny_hybrid(mamba_state_dim=64, mamba_head_dim=32, hidden_size=64, pattern="MMM*")
    with pytest.raises(ValueError, match=r"cache_gb is 2e-05 .* 0\.0\d+ or more"):
        build_engine(large.model, CacheConfig(prefix_caching_mamba_gb=1e-5, buffer_size_gb=1e-5))


@pytest.mark.parametrize(
    "allocation", [f"{cache_memory.__name__}.StepBuffers", f"{dynamic_context.__name__}.GraphedMHAMetadata"]
)
@pytest.mark.parametrize("raised", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_error_names_the_limits_to_lower(
    allocation: str, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise raised("can't allocate memory")

    subject = tiny_hybrid()
    monkeypatch.setattr(allocation, refuse)
    words = "max_requests=4, max_tokens=64 and max_sequence_length=128; lower one"
    with pytest.raises(CacheCapacityError, match=words):
        build_engine(subject.model, cache_config(subject.sizes, max_requests=4, max_sequence_length=128))


def test_block_size_must_be_a_multiple_of_the_ssm_chunk() -> None:
    subject = tiny_hybrid(ssm_chunk_size=16)
    with pytest.raises(ValueError, match=r"block_size_tokens must be .*chunk size 16, found 24"):
        build_engine(subject.model, cache_config(subject.sizes, block_size_tokens=24))
    run = EngineRun.start(subject, cache_config(subject.sizes, block_size_tokens=24, prefix_caching=False))
    run.run(0, some_tokens(50))
    run.assert_matches_oracle().assert_few_stops()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("****", "no Mamba layer"), ("MM-M", "no attention layer"), ("MX*", r"unknown symbols \['X'\]"), ("", "no Mamba")],
)
def test_layer_pattern_without_mamba_or_attention_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_hybrid_model(tiny_sizes(pattern=pattern))


@pytest.mark.parametrize(("pattern", "message"), [("MMM", "no attention layer"), ("**", "no Mamba layer")])
def test_non_hybrid_model_is_refused(pattern: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("megatron_mamba_cache.models.architecture.check_layer_pattern", lambda _: None)
        model = random_hybrid_model(tiny_sizes(pattern=pattern))
    with pytest.raises(ValueError, match=message):
        build_engine(model, CacheConfig(block_size_tokens=16, buffer_size_gb=0.01))


def test_model_built_without_with_mamba_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec_without_caching_attention(options: LocalSpecOptions) -> ModuleSpec:
        spec = local_hybrid_spec(options)
        spec.submodules.attention_layer.submodules.self_attention.module = SelfAttention
        return spec

    with monkeypatch.context() as patch:
        patch.setattr("megatron_mamba_cache.models.hybrid_model.local_hybrid_spec", spec_without_caching_attention)
        model = random_hybrid_model(tiny_sizes())
    with pytest.raises(ValueError, match=r"without the caching modules.*with_mamba_cache"):
        build_engine(model, CacheConfig(block_size_tokens=16, buffer_size_gb=0.01))


def test_other_megatron_core_release_is_refused() -> None:
    with pytest.raises(ImportError, match=r"0\.17\.0.*0\.16\.1"):
        mcore._check_megatron_core("0.17.0")


@pytest.mark.parametrize(
    "settings",
    [{"tenant": None}, {"tenant": "\ud800"}, {"seed": 1.5}, {"request_id": 2**70}, {"request_id": -1}],
    ids=str,
)
def test_request_refused_by_add_request_is_not_queued(settings: dict[str, Any]) -> None:
    run = start_run()
    run.add(0, some_tokens(40), 6)
    request_id = settings.pop("request_id", 9)
    with pytest.raises(ValueError, match=r"tenant|request id"):
        run.engine.add_request(request_id, some_tokens(5), greedy(4), **settings)
    assert list(run.engine.requests) == [0]
    run.finish()
    run.assert_matches_oracle([0]).assert_few_stops()


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (greedy(4, top_k=2**31), ("top_k=2147483648", "between 0 and 2**31 - 1")),
        (greedy(4, temperature=None), ("temperature", "None")),
        (greedy(4, top_p="0.5"), ("top_p", "'0.5'")),
        (greedy(4, top_p=float("nan")), ("top_p=nan",)),
        (greedy(4, top_k=2.0), ("top_k", "2.0")),
        (greedy(4, top_n_logprobs=10**6, return_log_probs=True, skip_prompt_log_probs=True), ("1000000", "96")),
        (greedy(0), ("num_tokens_to_generate is 0", "at least 1 (num_tokens_total")),
    ],
    ids=["top_k", "temperature", "top_p", "top_p nan", "broken top_k", "top_n_logprobs", "no tokens"],
)
def test_request_with_unsupported_sampling_fails_and_others_continue(
    sampling: SamplingParams, words: tuple[str, ...]
) -> None:
    run = start_run()
    run.add(0, some_tokens(40), 6)
    run.engine.add_request(1, some_tokens(5), sampling)
    run.finish()
    assert all(word in failure_reason(run.finished[1]) for word in words), failure_reason(run.finished[1])
    run.assert_matches_oracle([0]).assert_few_stops()
