"""After warmup nothing compiles, and nothing else has changed."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache.kernels.compilation import WATCH, Compilations
from megatron_mamba_cache.kernels.experts.gemm_tiles import tile_rows_ref
from megatron_mamba_cache.kernels.experts.overlapped_expert import _order_of_one
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.mcore import suspendable_engine
from megatron_mamba_cache.metrics import CacheSnapshot
from megatron_mamba_cache.models.architecture import GatedDeltaSizes
from megatron_mamba_cache.models.drafting.draft_model import DraftModelDrafter
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig
from megatron_mamba_cache.recurrences.gated_delta import scan_portable
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens
from megatron_mamba_cache.recurrences.mamba2 import scan
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens
from megatron_mamba_cache.recurrences.mamba2.scan import choose_tiling
from megatron_mamba_cache.step import graphs, warmup
from megatron_mamba_cache.step.buffers import StepLimits
from megatron_mamba_cache.step.step_graph import StepGraph
from megatron_mamba_cache.step.warmup import batch_sizes, decode_steps, prefill_steps, rehearse_prefill
from tests.mcore.engine_runs import (
    EngineRun,
    Hybrid,
    cache_config,
    greedy,
    hybrid,
    some_tokens,
    tiny_hybrid,
    tiny_sizes,
)
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.launch_records import NUM_MULTIPROCESSORS, recorded_launches, rehearse_engine
from tests.mcore.quantized_hybrid import QUANTIZED_FORMS, quantized_hybrid

NUM_ROWS = 20
SMALL = {"mamba_head_dim": 16, "mamba_state_dim": 16, "ssm_chunk_size": 16}
ON_HOPPER = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "ssm_chunk_size": 128,
    "dtype": torch.bfloat16,
}
MODELS = {
    "fp32": tiny_sizes(**SMALL),
    "bf16": tiny_sizes(**SMALL, dtype=torch.bfloat16),
    "bf16-odd": tiny_sizes(**SMALL, mamba_num_heads=3, mamba_num_groups=1, dtype=torch.bfloat16),
    "bf16-hopper": tiny_sizes(**ON_HOPPER),
    "bf16-experts": tiny_sizes(**SMALL, pattern="ME*", dtype=torch.bfloat16),
    "bf16-hopper-experts": tiny_sizes(**ON_HOPPER, pattern="ME*"),
    "bf16-delta": tiny_sizes(
        pattern="M-*-", gated_delta=GatedDeltaSizes(2, 4, 16, 16), ssm_chunk_size=16, dtype=torch.bfloat16
    ),
    "bf16-delta-experts": tiny_sizes(
        pattern="ME*", gated_delta=GatedDeltaSizes(2, 4, 16, 32), ssm_chunk_size=16, dtype=torch.bfloat16
    ),
}
QUANTIZED_MODELS = {
    f"{form}{', activations' if quantizes else ''}{', experts' if 'E' in pattern else ''}": (form, quantizes, pattern)
    for form, quantizes in (("FP8 rows", False), ("FP8 rows", True), ("FP8 blocks", True), ("NVFP4", False))
    for pattern in ("M*M-", "ME*")
}


def quantized_model(form: str, quantizes_activations: bool, pattern: str) -> Hybrid:
    """Return a model of `QUANTIZED_MODELS`."""
    sizes = tiny_sizes(**SMALL, hidden_size=64, pattern=pattern, dtype=torch.bfloat16)
    return quantized_hybrid(sizes, QUANTIZED_FORMS[form], quantizes_activations=quantizes_activations)


def start_run(subject: Hybrid | RandomHybridConfig, num_drafts: int, **settings: Any) -> EngineRun:
    """Return an engine of `NUM_ROWS` requests with little memory."""
    subject = subject if isinstance(subject, Hybrid) else hybrid(subject)
    small = {
        "max_requests": NUM_ROWS,
        "max_tokens": 512,
        "max_sequence_length": 2048,
        "kv_blocks": 30,
        "paused_blocks": 10,
        "num_speculative_tokens": num_drafts,
    }
    return EngineRun.start(subject, cache_config(subject.sizes, **(small | settings)))


def run_workload(run: EngineRun) -> None:
    """Prefill one request, some and many, hit, decode in changing batches, resolve, pause and resume."""
    block = run.context.block_size_tokens
    document = some_tokens(3 * block)
    run.run(0, [*document, 1])
    run.run(1, [*document, 2, 3])
    run.run(2, [5])
    assert run.engine.cached_tokens(1) == 3 * block
    for index in range(3, 11):
        run.add(index, [index, 1], 2)
    run.finish()
    if "E" in run.subject.sizes.pattern:  # the forms of experts' products depend on the number of tokens
        for index, num_tokens in enumerate((100, 200, 300, 500)):
            run.run(100 + index, some_tokens(num_tokens, seed=index), 2)
    rng = random.Random(0)
    for index in range(11, 11 + NUM_ROWS):
        run.add(index, [index, *some_tokens(1 + index)], 4 + index)
    at_most = 0
    while run.engine.requests:
        run.step()
        at_most = max(at_most, len(run.context.running_requests))
        assert run.context.mamba_metadata  # settles draft windows
        if rng.random() < 0.3 and run.num_steps < 60:
            sampling = SamplingParams(num_tokens_to_generate=2 * block, temperature=1.0, termination_id=-1)
            run.add(1000 + run.num_steps, some_tokens(rng.randrange(1, 2 * block), run.num_steps), sampling)
    assert at_most == NUM_ROWS
    # The memory is short for models of two attention layers.
    assert (run.counters.requests_paused or "E" in run.subject.sizes.pattern) and run.counters.states_restored


needs_compiler = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="asks for forms that a GPU at hand compiles, or the interpreter"
)


REHEARSED = [
    ("fp32", 0, "window"),
    ("bf16", 3, "window"),
    ("bf16-odd", 0, "replay"),
    ("bf16-hopper", 3, "window"),
    ("bf16-hopper", 8, "replay"),
    ("bf16-experts", 0, "replay"),
    ("bf16-hopper-experts", 3, "replay"),
    ("bf16-delta", 3, "window"),
    ("bf16-delta-experts", 0, "window"),
    ("bf16-delta", 4, "replay"),
]
OTHERS_REHEARSED = [
    pytest.param(name, 0 if drafts else 3, form, marks=pytest.mark.slow) for name, drafts, form in REHEARSED
]


@needs_compiler
@pytest.mark.parametrize(("name", "num_drafts", "draft_states"), REHEARSED + OTHERS_REHEARSED)
def test_warmup_launches_every_kernel_used_by_steps(name: str, num_drafts: int, draft_states: str) -> None:
    sizes = MODELS[name]
    with recorded_launches(on_hopper="hopper" in name) as record:
        run = start_run(sizes, num_drafts, draft_states=draft_states)
        rehearse_engine(run)
        rehearsed = record.take()
        run_workload(run)
        launched = record.take()
    assert run.counters.accepted_tokens or not num_drafts
    kernels = " ".join(kernel for kernel, _ in launched)
    assert ("one_token" in kernels) == (sizes.dtype == torch.bfloat16)
    replays, is_delta = draft_states == "replay", "delta" in name
    assert ("_systems" in kernels) == ("output_gate" in kernels) == is_delta
    assert ("_delta_verify" in kernels) == (is_delta and not replays)
    assert ("_factors" in kernels) == ("_delta_replay" in kernels) == (is_delta and replays)
    assert ("summed_gemms" in kernels) == ("E" in sizes.pattern)
    assert ("_coefficients" in kernels) == (replays and not is_delta)
    assert ("_fold_boundaries" in kernels) == replays
    assert ("_state_sums" in kernels) == ("hopper" in name and replays)
    assert launched <= rehearsed
    assert rehearsed == launched, "forms that this workload cannot ask for are compiled in vain"


@needs_compiler
@pytest.mark.parametrize("name", QUANTIZED_MODELS)
def test_warmup_launches_every_kernel_used_by_quantized_models(name: str) -> None:
    with recorded_launches(on_hopper=False) as record:
        run = start_run(quantized_model(*QUANTIZED_MODELS[name]), 0)
        rehearse_engine(run)
        rehearsed = record.take()
        run_workload(run)
        launched = record.take()
    kernels = " ".join(kernel for kernel, _ in launched)
    assert "_few_tokens" in kernels and ("_prompt_gemm" in kernels) == ("activations" in name)
    assert ("_weighted_sum" in kernels) == ("experts" in name)
    assert launched == rehearsed


@needs_compiler
def test_warmup_launches_every_kernel_used_by_a_draft_model() -> None:
    sizes = MODELS["bf16-odd"]
    with recorded_launches(on_hopper=False) as record:
        drafter = DraftModelDrafter(hybrid(MODELS["bf16"]).model, cache_config(sizes, max_requests=NUM_ROWS))
        config = cache_config(sizes, num_speculative_tokens=3, adaptive_drafts=False, max_requests=NUM_ROWS)
        run = EngineRun.start(hybrid(sizes), config, drafter=drafter)
        rehearse_engine(run)
        of_the_engine = record.take()
        rehearse_prefill(drafter._model, drafter._context.runner)
        of_the_drafter = record.take()
        for index in range(NUM_ROWS):
            run.add(index, some_tokens(20 + index), 20)
        run.finish()
        assert drafter.snapshot().counters.decode_tokens_computed
        launched = record.take()
    assert not launched <= of_the_engine
    assert launched <= of_the_engine | of_the_drafter


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 24, 64, 128, 300])
@pytest.mark.parametrize("max_requests", [1, 2, 3, 5, 16, 33, 100, 256])
def test_warmup_batch_sizes_cover_every_scan_kernel_variant(
    num_heads: int, max_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
    x, B = torch.empty(1, num_heads, 64), torch.empty(1, 1, 64)
    tokens = SSMTokens(x, x[..., 0], B, B)
    q, b = torch.empty(1, 1, 128, dtype=torch.bfloat16), torch.empty(1, num_heads)
    delta_tokens = DeltaTokens(q, q, q.expand(1, num_heads, 128), b, b)
    assert max(batch_sizes(max_requests)) == max_requests
    for forms_of in (partial(choose_tiling, tokens), partial(scan_portable.choose_tiling, delta_tokens)):
        assert {forms_of(n) for n in batch_sizes(max_requests)} == {forms_of(n) for n in range(1, max_requests + 1)}


def cache_snapshot(run: EngineRun) -> CacheSnapshot:
    """Return all counts of a snapshot except compilations."""
    return replace(run.context.snapshot(), num_compiled_kernels=0, compile_seconds=0.0)


@pytest.mark.parametrize("settings", [{}, {"max_requests": 1, "max_tokens": 1}, {"block_size_tokens": 8}])
@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_warmup_changes_no_state_or_counter(num_drafts: int, settings: dict[str, int]) -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, num_speculative_tokens=num_drafts, **settings)
    run = EngineRun.start(subject, config)
    run.run(0, some_tokens(40))
    run.add(1, some_tokens(45), 12)
    while not run.context.running_requests or run.context.running_requests[0].is_prefilling:
        run.step()
    run.step()
    assert run.context.running_requests
    context = run.context
    owners = context, context.runner
    attributes, snapshot, request = (
        [dict(vars(owner)) for owner in owners],
        cache_snapshot(run),
        repr(context.running_requests[0]),
    )
    tensors = [context.mamba_conv_states, context.mamba_ssm_states, context.memory_buffer]
    before, random_numbers = [tensor.clone() for tensor in tensors], torch.get_rng_state()
    rehearse_engine(run)
    for owner, before_it in zip(owners, attributes, strict=True):
        assert vars(owner).keys() == before_it.keys()
        assert all(value is before_it[name] for name, value in vars(owner).items())
    assert (cache_snapshot(run), repr(context.running_requests[0])) == (snapshot, request)
    dummy = context.memory.dummy_block
    for tensor in (before[2], context.memory_buffer):
        tensor[:, :, dummy] = 0  # which is never read
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert torch.equal(torch.get_rng_state(), random_numbers)
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("max_requests", [1, 3])
def test_warmup_works_when_a_step_may_have_more_tokens_than_one_request(max_requests: int) -> None:
    run = start_run(MODELS["bf16-experts"], 0, max_requests=max_requests, max_tokens=512, max_sequence_length=96)
    rehearse_engine(run)
    run.run(0, some_tokens(90), 5)
    run.assert_exact()


@pytest.mark.parametrize("max_length", [92, 96])
def test_warmup_works_when_the_model_has_few_positions(max_length: int) -> None:
    sizes = tiny_sizes(**SMALL, pattern="ME*", use_rope=True, max_sequence_length=max_length)
    run = start_run(sizes, 0, max_sequence_length=max_length)
    rehearse_engine(run)
    run.run(0, some_tokens(80), 5)
    run.assert_exact()


@needs_compiler
@pytest.mark.parametrize("pattern", ["M-M*-M-M*-", "ME*"])
@pytest.mark.parametrize(("num_drafts", "form"), [(0, "window"), (3, "window"), (3, "replay")])
def test_warmup_without_kernel_launches_changes_no_state_or_counter(pattern: str, num_drafts: int, form: str) -> None:
    """Its kernels compute nothing, as while they are compiled ahead."""
    run = start_run(tiny_sizes(**SMALL, pattern=pattern), num_drafts, draft_states=form)
    with recorded_launches(on_hopper=False) as record:
        rehearse_engine(run)
        assert record.take()
    run.run(0, some_tokens(60), 20)
    run.assert_exact()


@needs_compiler
def test_tile_order_of_a_single_expert_is_computed_without_a_kernel_launch() -> None:
    _order_of_one.cache_clear()
    with recorded_launches(on_hopper=True) as record:
        for num_tokens in (1, 300, 1000):
            order = _order_of_one(num_tokens, torch.device("cpu"))
            expected = tile_rows_ref(torch.tensor([0, num_tokens], dtype=torch.int32), num_tokens)
            num_tiles = int(expected[0, 0])
            assert order.tiles[1 : 1 + num_tiles, :3].equal(expected[1 : 1 + num_tiles, :3])
            assert int(order.tiles[0, 0]) == num_tiles and order.starts.tolist() == [0, num_tokens]
        assert not record.take()
    _order_of_one.cache_clear()


@pytest.mark.parametrize("num_graphs", [0, 3])
def test_kernels_are_compiled_before_the_first_graph_capture(num_graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile once: not again for a recapture, or before a warmup."""
    capture_without_cuda(monkeypatch)
    events: list[str] = []

    class NotedGraph(StepGraph):
        def __init__(self, *arguments: Any) -> None:
            events.extend([] if events[-1:] == ["capture"] else ["capture"])
            super().__init__(*arguments)

    monkeypatch.setattr(graphs, "StepGraph", NotedGraph)
    monkeypatch.setattr(suspendable_engine, "compile_ahead", lambda *_: events.append("compile"))
    subject = tiny_hybrid()
    config = replace(cache_config(subject.sizes), num_cuda_graphs=num_graphs, cuda_graph_prefill_tokens=40)
    run = EngineRun.start(subject, config)
    events += [""]
    run.engine.create_cuda_graphs()
    assert [event for event in events if event] == ([] if not num_graphs else ["compile", "capture", "capture"])
    run.engine.warmup()
    assert events.count("compile") == 1


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_engine_works_when_compiling_kernels_ahead_fails(
    has_draft_model: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an op has no kernel")

    monkeypatch.setattr(warmup, "_may_compile_ahead", lambda _: True)
    monkeypatch.setattr(warmup, "compiling_ahead", fail)
    subject = tiny_hybrid()
    drafter = DraftModelDrafter(subject.model, cache_config(subject.sizes)) if has_draft_model else None
    config = cache_config(subject.sizes, num_speculative_tokens=3 if has_draft_model else 0)
    run = EngineRun.start(subject, config, drafter=drafter)
    run.engine.warmup()
    run.engine.warmup()
    if drafter is not None:
        drafter.warmup()
        drafter.warmup()
    message = [record.getMessage() for record in caplog.records if "one after another" in record.getMessage()]
    assert len(message) == 1 + has_draft_model
    assert all(line.endswith("raised RuntimeError('an op has no kernel')") for line in message)
    run.run(0, some_tokens(20))
    run.assert_exact()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_warmup_changes_no_token_or_counter_of_later_requests(num_drafts: int) -> None:
    outcomes = []
    for rehearses in (False, True):
        subject = tiny_hybrid()
        run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=num_drafts, kv_blocks=12))
        for index in range(6):
            sampling = SamplingParams(num_tokens_to_generate=14, temperature=1.0, termination_id=-1)
            run.add(index, some_tokens(20 + 5 * index), sampling if index % 2 else greedy(14))
        while run.engine.requests:
            if rehearses:
                rehearse_engine(run)
            run.step()
        run.assert_nothing_held()
        outcomes.append(({index: run.tokens(index) for index in run.finished}, cache_snapshot(run)))
    assert outcomes[0] == outcomes[1]


def test_failed_warmup_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EngineRun.start(tiny_hybrid())

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(run.engine.controller.inference_wrapped_model, "compute_step", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            rehearse_engine(run)
    run.run(0, some_tokens(20))
    run.assert_exact()


def test_warmup_on_a_cpu_runs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("engines run on the GPU here")
    run = EngineRun.start(tiny_hybrid())
    monkeypatch.setattr(warmup, "rehearse", lambda *_: pytest.fail("computes"))
    assert run.engine.warmup() == Compilations()


@given(st.data())
def test_warmup_steps_respect_request_and_token_limits(data: st.DataObject) -> None:
    max_requests, max_tokens = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 600))
    limits = StepLimits(
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_chunks=max_tokens // 8 + 2 * max_requests,
        max_blocks=data.draw(st.integers(1, 20)),
        max_drafts=data.draw(st.integers(0, 8)),
        max_length=data.draw(st.integers(1, 300)),
        marks_real_tokens=data.draw(st.booleans()),
        has_quantized_weights=data.draw(st.booleans()),
        has_fp8_kv=data.draw(st.booleans()),
    )
    prefilling, decoding = list(prefill_steps(limits, 16, 0)), list(decode_steps(limits, 0))
    for requests in prefilling + decoding:
        assert 0 < len(requests) <= max_requests and sum(request.scheduled for request in requests) <= max_tokens
    most = min(max_requests, max_tokens)
    assert {1, most} <= {len(requests) for requests in prefilling}


def test_warmup_of_a_draft_model_changes_no_state() -> None:
    subject = tiny_hybrid()
    drafter = DraftModelDrafter(subject.model, cache_config(subject.sizes))
    run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=3), drafter=drafter)
    run.run(0, some_tokens(40))
    before = drafter.snapshot()
    rehearse_prefill(drafter._model, drafter._context.runner)
    assert drafter.snapshot() == before
    drafter.check_integrity()
    run.run(1, some_tokens(50))
    run.assert_exact()


class WarmDrafter:
    """Drafts nothing; counts its warmups."""

    def __init__(self) -> None:
        self.warmups = 0

    def propose(self, requests: Any) -> list[Any]:
        raise AssertionError("nothing is to be drafted")

    def forget(self, request_id: int) -> None:
        """Do nothing."""

    def warmup(self) -> None:
        """Count the warmup."""
        self.warmups += 1


def test_warmup_also_warms_up_the_drafter() -> None:
    subject, drafter = tiny_hybrid(), WarmDrafter()
    run = EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=3), drafter=drafter)
    run.context.planner.warmup()
    assert drafter.warmups == 1
    for drafts in (0, 3):  # without a drafter, and with prompt lookup, which has nothing to compile
        EngineRun.start(subject, cache_config(subject.sizes, num_speculative_tokens=drafts)).context.planner.warmup()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="counts compilations")
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("name", [*MODELS, *QUANTIZED_MODELS])
def test_no_kernel_compiles_after_warmup(name: str, num_drafts: int) -> None:
    run = start_run(MODELS[name] if name in MODELS else quantized_model(*QUANTIZED_MODELS[name]), num_drafts)
    before = run.context.snapshot()
    compiled = run.engine.warmup()
    after = run.context.snapshot()
    assert after.num_compiled_kernels - before.num_compiled_kernels == compiled.num_kernels
    assert (after.counters, after.state_slots, after.kv_blocks) == (
        before.counters,
        before.state_slots,
        before.kv_blocks,
    )
    run.context.check_integrity()
    assert run.engine.warmup().num_kernels == 0
    total = WATCH.total
    run_workload(run)
    assert WATCH.total == total
    print(f"\n{name}, {num_drafts} drafts: compiled {compiled.num_kernels} kernels in {compiled.seconds:.2f} s")
