"""Decode steps padded to captured shapes: tokens match the oracle, and padding touches nothing.

Where there is no CUDA, a replay computes the padded step again; all else is as on a GPU.
"""

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore import model_reading
from megatron_mamba_cache.ranks.group import OneRank
from megatron_mamba_cache.recurrences import model_shape
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from megatron_mamba_cache.step import captured_shapes, graphs
from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid, with_one_budget
from tests.mcore.graph_stand_ins import capture_without_cuda, with_graphs
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.oracle_log_probs import assert_log_probs
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, WorkloadOutcome, make_workload, run_workload
from tests.mcore.workload_drafters import make_drafter
from tests.mcore.workload_totals import WorkloadTotals
from tests.models.training_checkpoints import EXPERTS, random_model
from tests.recurrences.toy import on_cpu

# One seed by default, a second where the first does not exercise all.
SHORT, ENOUGH = range(1, 3), 1
SEEDS = [pytest.param(SHORT, id="short"), pytest.param(range(2, 5), id="long", marks=pytest.mark.slow)]
FORMS = {
    "dense": (MODEL_FORMS["dense"], False),
    "experts": (MODEL_FORMS["experts"], False),
    "replayed": (MODEL_FORMS["dense"], True),
}
TOY = MODEL_FORMS["toy"], False
GATED_DELTA = MODEL_FORMS["gated delta"], False
REPLAYED_GATED_DELTA = MODEL_FORMS["gated delta"], True
forms = pytest.mark.parametrize(
    ("models", "replays"),
    [
        *(pytest.param(*form, id=name) for name, form in FORMS.items()),
        pytest.param(*TOY, id="toy", marks=[on_cpu, pytest.mark.long]),
        pytest.param(*GATED_DELTA, id="gated-delta", marks=pytest.mark.long),
        pytest.param(*REPLAYED_GATED_DELTA, id="replayed-gated-delta", marks=pytest.mark.long),
    ],
)


def forms_of_flavours(first: int, of_others: pytest.MarkDecorator) -> list[Any]:
    """Return each flavour in each variant: by default in only one, the first flavour in the one at `first`."""
    return [
        pytest.param(name, *FORMS[form], id=f"{name}-{form}", marks=() if (index + first) % 3 == at else of_others)
        for index, name in enumerate(FLAVOURS)
        for at, form in enumerate(FORMS)
    ]


TOYS_OF_FLAVOURS = [
    pytest.param(name, *TOY, id=f"{name}-toy", marks=[on_cpu, *([] if index % 4 == 0 else [pytest.mark.long])])
    for index, name in enumerate(FLAVOURS)
]
GATED_DELTA_OF_FLAVOURS = [
    pytest.param(name, *form, id=f"{name}-{form_id}", marks=[] if index % 4 == at else [pytest.mark.long])
    for form_id, form, at in (("gated-delta", GATED_DELTA, 1), ("replayed-gated-delta", REPLAYED_GATED_DELTA, 3))
    for index, name in enumerate(FLAVOURS)
]


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few comparisons were stopped."""
    totals = WorkloadTotals()
    yield totals
    totals.report()


def start(**settings: object) -> EngineRun:
    subject = tiny_hybrid()
    return EngineRun.start(subject, with_graphs(cache_config(subject.sizes, **settings)))


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("name", "models", "replays"),
    forms_of_flavours(0, pytest.mark.slow) + TOYS_OF_FLAVOURS + GATED_DELTA_OF_FLAVOURS,
)
def test_random_workloads_match_the_oracle(
    name: str, models: Any, replays: bool, seeds: range, totals: WorkloadTotals
) -> None:
    def run(seed: int) -> WorkloadOutcome:
        work = make_workload(FLAVOURS[name], 2000 + seed, models=models, replays=replays)
        prefill_tokens = None if seed % 2 else 40  # None: whole steps, as these have fewer than 4,096 tokens
        return run_workload(replace(work, config=with_graphs(work.config, prefill_tokens=prefill_tokens)))

    totals.run_batch(name, seeds, run, ("graph_steps",), enough=ENOUGH if seeds is SHORT else None)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    ("name", "models", "replays"),
    [
        *forms_of_flavours(1, pytest.mark.long),
        *(pytest.param(name, *TOY, id=f"{name}-toy", marks=[on_cpu, pytest.mark.long]) for name in FLAVOURS),
        *(pytest.param(name, *GATED_DELTA, id=f"{name}-gated-delta", marks=pytest.mark.long) for name in FLAVOURS),
        *(
            pytest.param(
                name,
                *REPLAYED_GATED_DELTA,
                id=f"{name}-replayed-gated-delta",
                marks=[] if name == "tight_blocks" else pytest.mark.long,
            )
            for name in FLAVOURS
        ),
    ],
)
def test_random_workloads_with_drafts_match_the_oracle(
    name: str, seeds: range, models: Any, replays: bool, totals: WorkloadTotals
) -> None:
    def run(seed: int) -> WorkloadOutcome:
        rng = random.Random(f"graphs {name} {seed}")
        num_drafts = rng.randrange(1, 9)
        work = make_workload(FLAVOURS[name], 3000 + seed, num_drafts, models=models, replays=replays)
        drafter = make_drafter(rng, work)
        return run_workload(replace(work, config=with_graphs(work.config)), drafter)

    repeats = FLAVOURS[name].num_texts is None  # prompt lookup finds nothing in few texts that share nothing
    exercises = ("graph_steps", *(("draft_tokens",) if repeats else ()))
    totals.run_batch(name, seeds, run, exercises, enough=ENOUGH if seeds is SHORT else None)


@forms
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_graph_may_be_captured_for_more_requests_than_max_requests(
    models: Any, replays: bool, num_drafts: int, totals: WorkloadTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_shapes, "_is_slow", lambda num_tokens: True)
    most, requests_too_many = 0, []

    class NotedGraph(StepGraph):
        def __init__(self, model: Any, runner: Any, shape: StepShape, *arguments: Any) -> None:
            requests_too_many.append(0 if shape.num_prefill_requests else shape.num_requests - most)
            super().__init__(model, runner, shape, *arguments)

    def run(seed: int) -> WorkloadOutcome:
        nonlocal most
        work = make_workload(FLAVOURS["roomy"], 6000 + seed, num_drafts, models=models, replays=replays)
        work, most = replace(work, config=with_graphs(work.config)), work.config.max_requests
        return run_workload(work, make_drafter(random.Random(seed), work) if num_drafts else None)

    monkeypatch.setattr(graphs, "StepGraph", NotedGraph)
    totals.run_batch("requests too many", SHORT, run, ("graph_steps",), enough=ENOUGH)
    print(f"{requests_too_many.count(1)} of {len(requests_too_many)} graphs had a request more than requests can run")
    assert max(requests_too_many) == 1


def test_step_replays_a_graph_whenever_it_fits_a_captured_shape() -> None:
    run = start(max_requests=8)
    for request_id in range(5):
        run.add(request_id, some_tokens(12, seed=request_id), 6 + request_id)
    run.finish()
    # One step prefills all 60 tokens, too many; then each request decodes what is left of it, the longest longest.
    assert (run.counters.steps, run.counters.graph_steps) == (10, 9)
    for request_id in range(5, 8):
        run.add(request_id, some_tokens(30, seed=request_id), 9)
        run.step()
        run.step()
    run.finish()
    # Prompts of 30 tokens fit, the later two after one and two decoding requests.
    assert run.counters.steps - run.counters.graph_steps == 1
    run.assert_exact()


@forms
def test_step_with_many_prompts_replays_a_graph(models: Any, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = []

    class NotedGraph(StepGraph):
        def lay_out(self, requests: Any, **arguments: Any) -> Any:
            laid_out.append((sum(request.is_prefilling for request in requests), self.shape.num_prefill_requests))
            return super().lay_out(requests, **arguments)

    monkeypatch.setattr(graphs, "StepGraph", NotedGraph)
    subject = tiny_hybrid(**models[0])
    settings = cache_config(subject.sizes, max_requests=40, max_tokens=256)
    settings = replace(settings, draft_states="replay" if replays else "window")
    run = EngineRun.start(subject, with_graphs(settings, prefill_tokens=200))
    begun = 0
    for count in (3, 5, 4, 28):
        for request_id in range(begun, begun + count):
            run.add(request_id, some_tokens(3 + request_id % 4, seed=request_id), 30 - request_id // 2)
        begun += count
        run.step()
        run.step()
    run.finish()
    assert [found for found in laid_out if found[0]] == [(3, 4), (5, 32), (4, 4), (28, 32)]
    assert run.counters.graph_steps == run.counters.steps
    indices = {run.context.graphs.fitting((), shape).logits.data_ptr() for shape in run.context.graphs.shapes}
    most_logits = max(shape.num_logits for shape in run.context.graphs.shapes)
    assert len(indices) == 1
    if not torch.cuda.is_available():  # else graphs hold more
        assert run.context.snapshot().graph_bytes == most_logits * subject.sizes.vocab_size * 4
    run.assert_exact()


@pytest.mark.parametrize("num_prompt", [10, 60])
def test_prefill_step_has_drafts_only_if_no_captured_graph_fits_its_prompt(num_prompt: int) -> None:
    """Graphs hold up to 40 prompt tokens and no drafts: only longer prompts run with drafts."""
    subject = tiny_hybrid()
    plain = EngineRun.start(subject, cache_config(subject.sizes))
    plain.add(0, some_tokens(20), greedy(40))
    plain.finish()
    texts = {0: [*some_tokens(20), *plain.tokens(0)], 1: []}
    drafter = NoisyDrafter(texts, accuracy=1.0, vocab_size=subject.sizes.vocab_size)
    settings = cache_config(subject.sizes, num_speculative_tokens=3, adaptive_drafts=False)
    run = EngineRun.start(subject, with_graphs(settings), drafter=drafter)
    run.add(0, some_tokens(20), greedy(40))
    while run.counters.draft_tokens == 0:
        run.step()
    run.add(1, some_tokens(num_prompt, seed=1), greedy(2))
    before = replace(run.counters)
    run.step()
    while run.counters.prefill_tokens_computed == before.prefill_tokens_computed:
        before = replace(run.counters)
        run.step()
    found = run.counters.graph_steps - before.graph_steps, run.counters.draft_tokens - before.draft_tokens
    print(f"with {num_prompt} prompt tokens: {found[0]} graph steps and {found[1]} drafts of one step")
    assert found == ((1, 0) if num_prompt < 40 else (0, 3))
    run.finish()
    run.assert_exact()


def test_prefill_graphs_end_at_the_size_where_compute_time_equals_launch_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_shape, "_LAUNCHED_MACS", 100 * tiny_hybrid().shape.layer_weights)
    subject = tiny_hybrid()
    settings = cache_config(subject.sizes, max_requests=8, max_tokens=512, num_speculative_tokens=1)
    settings = with_graphs(settings, prefill_tokens=200)
    run = EngineRun.start(subject, settings, drafter=CheckedDraftModel.start(subject, settings))
    most = {}
    for context in (run.context, run.context.planner._drafter.context):
        for shape in context.graphs.shapes:
            kind = context is run.context, shape.num_prefill_requests
            most[kind] = max(most.get(kind, 0), shape.num_prefill_tokens)
    print(most)
    assert most[True, 4] == 200 and most[True, 8] == 100 and most[False, 8] == 100


def test_graph_capture_changes_no_state_and_holds_no_blocks() -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, decode_checkpoints="all", num_speculative_tokens=2)
    run = EngineRun.start(subject, with_graphs(with_one_budget(config, subject.shape, 40)))
    run.run(0, some_tokens(60), 40)
    pool, kv = run.context.memory.state_pool, run.context.memory.kv_buffer
    before = pool.tensor("conv").clone(), pool.tensor("ssm").clone(), kv[:, :, :-1].clone()
    counters = run.counters
    snapshot = run.context.snapshot().as_dict()
    run.engine.create_cuda_graphs()
    assert run.context.counters is counters
    after = run.context.snapshot().as_dict()
    assert after["num_graphs"] == snapshot["num_graphs"] > 0
    for figure in ("num_compiled_kernels", "compile_seconds", "capture_seconds", "graph_bytes"):
        assert after.pop(figure) >= 0 and snapshot.pop(figure) >= 0
    assert after == snapshot
    dummy = run.context.memory.dummy_block
    assert dummy == kv.shape[2] - 1
    for old, new in zip(before, (pool.tensor("conv"), pool.tensor("ssm"), kv[:, :, :-1]), strict=True):
        assert torch.equal(old, new)


def test_graphs_stay_valid_after_a_flush_and_evictions() -> None:
    run = start(cached_states=2, kv_blocks=6, max_requests=3)
    graphs = run.context.graphs
    for request_id in range(8):
        run.add(request_id, some_tokens(40, seed=request_id), 12)
        if request_id == 4:
            run.engine.flush()
        run.finish()
    assert run.context.snapshot().counters.kv_blocks_evicted
    assert run.context.graphs is graphs
    run.assert_exact()


def test_resume_allocates_new_memory_and_captures_new_graphs() -> None:
    run = start()
    run.add(0, some_tokens(30), 12)
    run.step()
    run.step()
    graphs, pool = run.context.graphs, run.context.memory.state_pool
    run.engine.suspend()
    assert run.context.graphs is None
    run.engine.resume()
    assert run.context.graphs is not None and run.context.graphs is not graphs
    assert run.context.memory.state_pool is not pool
    before = run.counters.graph_steps
    run.finish()
    assert run.counters.graph_steps > before
    run.assert_exact()


@pytest.mark.parametrize("resident_pools", [False, True])
def test_closed_engine_frees_its_memory_while_still_referenced(resident_pools: bool) -> None:
    """Its steps overlap, and one is launched; process groups wait for graphs that hold their collectives."""
    run = start(resident_pools=resident_pools)
    run.add(0, some_tokens(30), 12)
    while run.context.overlapped_step is None:
        run.step()
    left = [weakref.ref(kept) for kept in (run.context.graphs, run.context.memory, run.context.memory.state_pool)]
    run.engine.close()
    assert [kept() for kept in left] == [None] * 3
    run.engine.close()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_cuda_graphs_change_no_sampled_token(num_drafts: int) -> None:
    subject, drafter = tiny_hybrid(), PromptLookupDrafter(min_match=1) if num_drafts else None
    config = cache_config(subject.sizes, num_speculative_tokens=num_drafts)
    texts = []
    for settings in (config, with_graphs(config)):
        run = EngineRun.start(subject, settings, drafter=drafter)
        for request_id in range(6):
            sampling = greedy(24, top_k=0, temperature=0.7) if request_id % 3 else greedy(24)
            run.add(request_id, some_tokens(5, seed=request_id) * 4, sampling, seed=request_id)
        run.finish()
        texts.append([run.tokens(request_id) for request_id in range(6)])
        assert bool(run.counters.graph_steps) == bool(settings.num_cuda_graphs)
    assert texts[0] == texts[1]


def test_prompt_log_probs_are_correct_when_other_steps_replay_graphs() -> None:
    subject = tiny_hybrid()
    config = with_graphs(cache_config(subject.sizes))
    run = EngineRun.start(subject, config, scores_prompts=True)
    for request_id, seed in ((0, 1), (2, 2)):  # the steps of such prompts are captured
        run.add(request_id, some_tokens(16, seed=seed), 12)
        run.step()
    assert run.counters.graph_steps == 2
    run.add(1, some_tokens(16), greedy(6, return_log_probs=True, skip_prompt_log_probs=False))
    run.finish()
    assert_log_probs(run, 1)
    run.assert_matches_oracle().assert_few_stops()
    assert run.counters.graph_steps


@pytest.mark.parametrize("only_last", [True, False])
def test_cuda_graphs_change_no_log_prob(only_last: bool) -> None:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes)
    found = []
    for settings in (config, with_graphs(config)):
        run = EngineRun.start(subject, settings, materialize_only_last_token_logits=only_last)
        run.add(0, some_tokens(20), 5)
        run.step()
        requested = {"return_log_probs": True, "top_n_logprobs": 2, "skip_prompt_log_probs": True}
        run.add(1, some_tokens(16, seed=1), greedy(9, **requested))
        run.add(2, some_tokens(7, seed=2), greedy(9, **requested))
        num_steps, num_graphs = run.counters.steps, run.counters.graph_steps
        run.finish()
        num_steps, num_graphs = run.counters.steps - num_steps, run.counters.graph_steps - num_graphs
        is_captured = settings is not config
        # Where each token has logits, those after a prompt are not where a padded step has them.
        assert num_graphs == is_captured * (num_steps if only_last else num_steps - 1)
        found.append([torch.tensor(run.finished[request_id].generated_log_probs) for request_id in (1, 2)])
    for plain, captured in zip(*found, strict=True):
        assert plain.shape == (9,)
        torch.testing.assert_close(plain, captured, rtol=0, atol=1e-5)


def test_no_graphs_are_captured_when_the_host_waits_for_expert_routing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"buffer_size_gb": 0.01, "prefix_caching_mamba_gb": 0.01, "max_requests": 2}
    monkeypatch.setattr(model_reading, "waits_for_experts", lambda model: True)
    engine = build_engine(random_model(EXPERTS), CacheConfig(block_size_tokens=128, num_cuda_graphs=2, **small))
    assert "steps run without CUDA graphs: the host waits for the routing of tokens" in caplog.text
    engine.add_request(0, some_tokens(20), greedy(5))
    while engine.requests:
        (finished,) = engine.step_modern()["finished_request_records"] or [None]
    assert len(finished.merge().generated_tokens) == 5 and engine.context.counters.graph_steps == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay calls no hook")
def test_padding_tokens_are_not_routed_to_experts() -> None:
    subject = tiny_hybrid(pattern="ME*")
    run = EngineRun.start(subject, with_graphs(cache_config(subject.sizes, max_requests=8)))
    mixture, chosen = subject.model.decoder.layers[1].mlp, []
    mixture.router.register_forward_hook(lambda *call: chosen.append(call[-1][0]))
    for request_id in range(5):
        run.add(request_id, some_tokens(6, seed=request_id), 12)
    run.finish()
    assert run.counters.graph_steps
    padded = [ids for ids in chosen if (ids == -1).any()]
    assert padded and all((ids == -1).all(1).eq((ids == -1).any(1)).all() for ids in chosen)
    assert sum(int((ids >= 0).all(1).sum()) for ids in chosen) >= 5 * (6 + 11)
    run.assert_exact()


class RanksOfWhichOneCannot(OneRank):
    def gather(self, value: Any) -> list[Any]:
        return [value, "the host waits for experts"]


def test_no_rank_captures_graphs_if_one_rank_cannot(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"buffer_size_gb": 0.01, "prefix_caching_mamba_gb": 0.01, "max_requests": 2, "block_size_tokens": 64}
    engine = build_engine(tiny_hybrid().model, with_graphs(CacheConfig(**settings), 2))
    assert engine.context.graphs is not None
    engine.context.runner.ranks = RanksOfWhichOneCannot()
    engine.create_cuda_graphs()
    assert engine.context.graphs is None and "steps run without CUDA graphs: the host waits" in caplog.text


def test_engine_on_a_cpu_runs_without_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    run = start()
    assert "num_cuda_graphs is 3, but steps run without CUDA graphs: the model runs on a CPU" in caplog.text
    run.run(0, some_tokens(20), 5)
    run.assert_exact()
    assert run.counters.graph_steps == 0


def test_garbage_collector_runs_before_a_graph_capture_but_not_during_it(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[bool] = []

    class Garbage:
        """The graph of a deleted engine, in a reference cycle that only a collection frees."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            collected.append(True)

    seen: list[tuple[bool, int]] = []
    build = StepGraph.__init__

    def note_and_build(*arguments: object) -> None:
        seen.append((gc.isenabled(), len(collected)))
        build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepGraph, "__init__", note_and_build)
    Garbage()
    start()
    assert set(seen) == {(False, 1)}
    assert gc.isenabled()
