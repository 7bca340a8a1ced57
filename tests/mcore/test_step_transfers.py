"""Bytes that a step moves between host and device, by the profiler, next to megatron-core's own context."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="counts CUDA transfers")

NUM_ROWS = 6
BLOCK = 16
PREFIX_LEN = 2 * BLOCK
SUFFIX_LEN = 5


def _transfers(step: Callable[[], None]) -> Counter[str]:
    """Count copies by direction, and device waits that are not due to a copy to the host."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    for event in profile.events():
        for direction in ("HtoD", "DtoH"):
            counts[direction] += event.name.startswith(f"Memcpy {direction}")
        counts["syncs"] += event.name == "cudaStreamSynchronize"
    return counts


def _stock_context() -> Any:
    """Return megatron-core's context: no model, no sampling, no engine."""
    from megatron.core.inference.contexts.attention_context.mamba_metadata import MambaInferenceStateConfig
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    from megatron_mamba_cache.mcore.model_ranks import initialize_single_process

    initialize_single_process()
    return DynamicInferenceContext(
        params_dtype=torch.float32,
        num_layers=2,
        kv_channels=16,
        num_attention_heads=2,
        max_sequence_length=256,
        buffer_size_gb=0.01,
        max_requests=8,
        max_tokens=256,
        block_size_tokens=16,
        mamba_inference_state_config=MambaInferenceStateConfig(["M", "*"], (64, 4), (8, 16, 16)),
    )


def _stock_requests(prompt_len: int) -> list[Any]:
    from megatron.core.inference.inference_request import DynamicInferenceRequest
    from megatron.core.inference.sampling_params import SamplingParams

    return [
        DynamicInferenceRequest(
            request_id=request_id,
            prompt_tokens=torch.arange(prompt_len, device="cuda"),
            sampling_params=SamplingParams(num_tokens_to_generate=64, termination_id=-1),
        )
        for request_id in range(NUM_ROWS)
    ]


def _stock_step(context: Any) -> None:
    context.initialize_attention_state()
    context.update_requests(torch.ones(NUM_ROWS, device="cuda"), torch.ones(NUM_ROWS, device="cuda").long())


def _stock_bookkeeping() -> Callable[[], None]:
    """Return the bookkeeping of one decode step of megatron-core's context."""
    context = _stock_context()
    for request in _stock_requests(prompt_len=20):
        context.add_request(request)
    _stock_step(context)
    return lambda: _stock_step(context)


def _stock_prefill_bookkeeping() -> Callable[[], None]:
    """Return the bookkeeping of one step of megatron-core's context that admits and prefills every request."""
    context = _stock_context()

    def prefill(requests: list[Any]) -> None:
        for request in requests:
            context.add_request(request)
        _stock_step(context)

    prefill(_stock_requests(PREFIX_LEN + SUFFIX_LEN))
    context.reset()
    requests = _stock_requests(PREFIX_LEN + SUFFIX_LEN)
    return lambda: prefill(requests)


def _our_engine() -> Any:
    from megatron_mamba_cache import CacheConfig, build_engine
    from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_hybrid_model

    model = random_hybrid_model(RandomHybridConfig(pattern="M*M-", ssm_chunk_size=16))
    config = CacheConfig(block_size_tokens=BLOCK, buffer_size_gb=0.01, prefix_caching_mamba_gb=0.01, max_requests=8)
    return build_engine(model, config)


def _our_whole_step() -> Callable[[], None]:
    """Return a whole decode step of our engine: scheduling, model, sampling, bookkeeping."""
    from megatron.core.inference.sampling_params import SamplingParams

    engine = _our_engine()
    for request_id in range(NUM_ROWS):
        sampling = SamplingParams(num_tokens_to_generate=64, top_k=1 + request_id)  # greedy and sampled requests
        engine.add_request(request_id, list(range(20 + request_id)), sampling)
    for _ in range(4):
        engine.step_modern()
    assert engine.context.is_decode_only()

    return lambda: engine.step_modern() and None


def _our_whole_prefill() -> Callable[[], None]:
    """Return a whole step of our engine that admits every request as a hit and prefills the rest of it."""
    from megatron.core.inference.sampling_params import SamplingParams

    engine = _our_engine()

    def add(first_id: int, num_requests: int) -> list[int]:
        request_ids = list(range(first_id, first_id + num_requests))
        for request_id in request_ids:
            # A suffix below a block: no request reserves a boundary that the others would wait for.
            prompt = [*range(PREFIX_LEN), *[100 + request_id] * SUFFIX_LEN]
            sampling = SamplingParams(num_tokens_to_generate=2, top_k=1 + request_id % 3)
            engine.add_request(request_id, prompt, sampling)
        return request_ids

    for first_id, num_requests in ((0, 1), (1, NUM_ROWS)):  # what fills the cache, and a first batch of hits
        add(first_id, num_requests)
        while engine.has_unfinished_requests():
            engine.step_modern()
    hits = add(1 + NUM_ROWS, NUM_ROWS)

    def step() -> None:
        engine.step_modern()
        assert [engine.cached_tokens(request_id) for request_id in hits] == [PREFIX_LEN] * NUM_ROWS
        assert engine.context.is_decode_only(), "all prompts were computed in this step"

    return step


def test_decode_step_makes_at_most_one_copy_more_than_megatron_and_no_more_syncs() -> None:
    stock, ours = _transfers(_stock_bookkeeping()), _transfers(_our_whole_step())
    print(f"megatron-core's bookkeeping of a decode step: {dict(stock)}; our whole step: {dict(ours)}")
    assert ours["HtoD"] <= stock["HtoD"] + 1
    assert ours["DtoH"] <= stock["DtoH"]
    assert ours["syncs"] <= stock["syncs"]


def test_decode_step_makes_one_copy_to_the_device_and_one_back() -> None:
    counts = _transfers(_our_whole_step())
    print(dict(counts))
    assert (counts["HtoD"], counts["DtoH"]) == (1, 1)


def test_prefill_with_hits_makes_at_most_one_copy_more_than_megatron_and_no_more_syncs() -> None:
    stock, ours = _transfers(_stock_prefill_bookkeeping()), _transfers(_our_whole_prefill())
    print(f"megatron-core's bookkeeping of a prefill step: {dict(stock)}; our whole step: {dict(ours)}")
    assert ours["HtoD"] <= stock["HtoD"] + 1
    assert ours["DtoH"] <= stock["DtoH"]
    assert ours["syncs"] <= stock["syncs"]


def test_prefill_with_cache_hits_makes_one_copy_each_way() -> None:
    counts = _transfers(_our_whole_prefill())
    print(dict(counts))
    assert (counts["HtoD"], counts["DtoH"]) == (1, 1)
