"""FP8 keys and values: hits, drafts, tiers and interruptions do not change tokens, and other formats are never read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.kv_values import FP8, UNSCALED, KVScales
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention
from tests.kernels import attention_libraries
from tests.mcore import random_workloads
from tests.mcore.engine_runs import EngineRun, Hybrid, OracleTally, cache_config, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, Workload, make_workload, run_workload, undisturbed

NUM_DRAFTS = 3
SCALES = KVScales(0.05, 0.02)
NAMES = [name for name in FLAVOURS if name != "uncached"]
CASES = [
    pytest.param(name, ("dense", "gated delta", "experts")[i % 3], NUM_DRAFTS * (i % 2), i % 4 < 2, i // 4 % 2, id=name)
    for i, name in enumerate(NAMES)
]


def with_settings(work: Workload, **settings: Any) -> Workload:
    """Return a workload with other settings of its engine."""
    return replace(work, config=replace(work.config, **settings))


def uncached(work: Workload) -> Workload:
    """Return the same requests for an engine with FP8 keys and values and no prefix cache."""
    return with_settings(undisturbed(work), kv_cache_dtype="fp8", prefix_caching=False)


def set_scales(patch: pytest.MonkeyPatch, subject: Hybrid, scales: KVScales) -> Hybrid:
    """Set the scales of all attention layers during a test; return the model with them in its shape."""
    for module in subject.model.modules():
        if isinstance(module, CachingSelfAttention):
            patch.setattr(module, "kv_scales", scales)
    return replace(subject, shape=model_shape_of(subject.model))


@pytest.mark.parametrize(("name", "form", "num_drafts", "has_graphs", "first_seed"), CASES)
@pytest.mark.parametrize("num_seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_tokens_equal_those_of_an_uncached_fp8_engine_in_random_workloads(
    name: str,
    form: str,
    num_drafts: int,
    has_graphs: bool,
    first_seed: int,
    num_seeds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle has no FP8 keys and values; the uncached engine replaces it. Even seeds replay drafts."""
    monkeypatch.setattr(random_workloads, "assert_replies_are_the_oracles", lambda *_: OracleTally())
    capture_without_cuda(monkeypatch)
    num_skipped = 0
    for seed in range(first_seed, first_seed + num_seeds):
        forms = {"models": MODEL_FORMS[form], "replays": seed % 2 == 0, "kv_cache_dtype": "fp8"}
        work = make_workload(FLAVOURS[name], seed, num_drafts, **forms)
        work = replace(work, subject=set_scales(monkeypatch, work.subject, SCALES))
        expected = run_workload(uncached(work)).texts
        vocab = work.subject.sizes.vocab_size
        drafter = NoisyDrafter(expected, accuracy=0.8, vocab_size=vocab, seed=seed, varies=True) if num_drafts else None
        graphs = {"num_cuda_graphs": 3, "cuda_graph_prefill_tokens": min(24, work.config.max_tokens)}
        outcome = run_workload(with_settings(work, **graphs) if has_graphs else work, drafter)
        assert outcome.texts == expected
        num_skipped += outcome.seen["prompt_tokens_skipped"]
    assert num_skipped


def test_cached_keys_and_values_are_codes_of_the_scaled_values(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = set_scales(monkeypatch, tiny_hybrid(), SCALES)
    caches: list[Tensor] = []
    for dtype in ("auto", "fp8"):
        run = EngineRun.start(subject, replace(cache_config(subject.sizes), kv_cache_dtype=dtype))
        run.run(0, some_tokens(16), 1)
        caches.append(run.context.memory.kv_buffer[:, 0].clone())  # the first attention layer
    plain, codes = caches
    used = [cache.float().abs().flatten(3).sum(-1)[0].gt(0).nonzero() for cache in caches]
    assert codes.dtype is FP8 and len(used[0]) == len(used[1]) == 16
    for kind, scale in enumerate((SCALES.key, SCALES.value)):
        exact, found = (
            torch.stack([cache[kind, block, offset] for block, offset in positions.tolist()])
            for cache, positions in zip((plain, codes), used, strict=True)
        )
        wanted = (exact / torch.tensor(scale)).clamp(-448, 448).to(FP8)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_fp8_blocks_take_one_byte_per_element_and_twice_as_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid(dtype=torch.bfloat16)
    block = 2 * subject.sizes.ssm_chunk_size
    assert 2 * subject.shape.block_bytes(block, "fp8") == subject.shape.block_bytes(block)
    config = replace(cache_config(subject.sizes), num_blocks=None, cache_gb=2**-6)
    plain, halved = (
        EngineRun.start(subject, replace(config, kv_cache_dtype=dtype)).context.capacity for dtype in ("auto", "fp8")
    )
    assert halved.num_blocks > 1.9 * plain.num_blocks


def test_scales_change_the_tokens_and_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_hybrid()
    assert plain.shape.scales_of(0) == UNSCALED
    replies, prints = [], set()
    for scales in (UNSCALED, KVScales(0.001, 0.001)):  # with the latter, most values are limited to 0.448
        subject = set_scales(monkeypatch, plain, scales)
        run = EngineRun.start(subject, replace(cache_config(subject.sizes), kv_cache_dtype="fp8"))
        run.run(0, some_tokens(40), 8)
        replies.append(run.tokens(0))
        prints.add(subject.shape.fingerprint)
    assert replies[0] != replies[1] and len(prints) == 2


@pytest.mark.parametrize("dtypes", [("auto", "fp8"), ("fp8", "auto")])
def test_disk_entries_in_another_kv_format_are_ignored(dtypes: tuple[str, str], tmp_path: Path) -> None:
    subject, prompt = tiny_hybrid(), some_tokens(100)
    plain = cache_config(subject.sizes)
    config = replace(plain, num_blocks=None, host_cache_gb=2**-8, disk_cache_dir=str(tmp_path))
    for dtype in (*dtypes, dtypes[0]):
        run = EngineRun.start(subject, replace(config, kv_cache_dtype=dtype))
        run.run(0, prompt, 4)
        run.assert_nothing_held()
        found = run.counters.prompt_tokens_from_disk
        run.engine.close()
        if dtype == dtypes[1]:
            assert found == 0
    assert found > 0  # of the first engine


def test_block_keys_differ_between_kv_formats() -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes)
    runs = [EngineRun.start(subject, replace(config, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8")]
    assert len({run.context.cache.identity for run in runs}) == 2


@pytest.mark.parametrize("is_suspended", [False, True])
def test_flashinfer_gets_the_scales_of_each_layer(is_suspended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = set_scales(monkeypatch, tiny_hybrid(), SCALES)
    config = replace(cache_config(subject.sizes), kv_cache_dtype="fp8")
    replies = []
    for backend in ("reference", "flashinfer"):
        attention_libraries.serve_with_flashinfer(monkeypatch)
        run = EngineRun.start(subject, replace(config, attention_backend=backend))
        if is_suspended:
            run.engine.suspend()
            run.engine.resume()
        run.run(0, some_tokens(60), 8)
        replies.append(run.tokens(0))
    assert replies[0] == replies[1]
