"""Random workloads on sharded models: tokens match the fp64 reference, and all ranks make equal plans in each step."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.distributed.rank_models import Layout
from tests.distributed.workload_cases import (
    RankOutcome,
    run_fp8_workload,
    run_workloads,
    run_workloads_of_replicas,
)
from tests.distributed.world import Worlds
from tests.mcore.engine_runs import OracleTally
from tests.recurrences.toy import on_cpu

HAS_ROOM_FOR_4 = max(os.cpu_count() or 1, torch.cuda.device_count()) >= 4
needs_4 = pytest.mark.skipif(not HAS_ROOM_FOR_4, reason="4 ranks take long on fewer than 4 cores")
TENSOR, PIPELINE, BOTH, TENSOR_OF_4 = Layout(2), Layout(pipeline=2), Layout(2, pipeline=2), Layout(4)
SHARED = [
    (TENSOR, "few_states", 1, 3, 0, "dense"),
    pytest.param(TENSOR, "disturbed", 1, 3, 1, "dense", marks=pytest.mark.long),
    pytest.param(TENSOR, "tight_blocks", 1, 3, 1, "dense", marks=pytest.mark.long),
    *(pytest.param(PIPELINE, name, 2, 0, 1, "dense", marks=pytest.mark.long) for name in ("roomy", "strides")),
    pytest.param(PIPELINE, "whole_prompts", 2, 3, 1, "dense", marks=pytest.mark.long),
    pytest.param(PIPELINE, "disturbed", 2, 3, 1, "dense", marks=pytest.mark.long),
    pytest.param(TENSOR, "one_budget", 5, 3, 1, "dense", marks=pytest.mark.long),
    pytest.param(PIPELINE, "disturbed_budget", 6, 3, 1, "dense", marks=pytest.mark.long),
    pytest.param(TENSOR, "disk_tier", 7, 3, 1, "dense", marks=pytest.mark.long),
    (PIPELINE, "disturbed_tiers", 8, 0, 1, "dense"),
    pytest.param(PIPELINE, "host_tier", 9, 3, 1, "dense", marks=pytest.mark.long),
    *(pytest.param(BOTH, name, 3, 3, 1, "dense", marks=needs_4) for name in ("small_steps", "disturbed")),
    *(
        pytest.param(TENSOR_OF_4, name, 4, 3, 1, "dense", marks=needs_4)
        for name in ("tight_blocks", "strides", "disturbed")
    ),
    pytest.param(TENSOR_OF_4, "roomy", 4, 3, 0, "dense", marks=needs_4),
    pytest.param(PIPELINE, "one_budget", 16, 3, 1, "toy", marks=on_cpu),
    *(
        pytest.param(
            layout, name, seed, 3, int(layout is PIPELINE or seed > 16), "toy", marks=[on_cpu, pytest.mark.long]
        )
        for seed, name in enumerate(("few_states", "disturbed", "disturbed_budget", "disk_tier"), 14)
        for layout in (TENSOR, PIPELINE)
    ),
    (TENSOR, "tight_blocks", 18, 3, 1, "gated delta"),
    *(
        pytest.param(layout, name, seed, 3, int(layout is PIPELINE), "gated delta", marks=pytest.mark.long)
        for seed, name in enumerate(("few_states", "disturbed", "disturbed_budget", "disk_tier"), 19)
        for layout in (TENSOR, PIPELINE)
    ),
    pytest.param(TENSOR_OF_4, "disturbed", 23, 3, 1, "gated delta", marks=needs_4),
]
MANY_SEEDS = range(100, 150)
REPLICAS = [
    pytest.param(Layout(), ("uncached", "few_states"), 0, 0, 1, "dense", marks=pytest.mark.long),
    pytest.param(Layout(expert=2), ("tight_blocks",) * 2, 1, 0, 1, "dense", marks=pytest.mark.long),
    pytest.param(Layout(expert=2), ("strides",) * 2, 2, 3, 0, "dense", marks=pytest.mark.long),
    (Layout(expert=2), ("disturbed",) * 2, 5, 3, 0, "dense"),
    (Layout(expert=2), ("few_states",) * 2, 7115, 3, 0, "dense"),  # a rank is full while the other begins prompts
    pytest.param(Layout(expert=2), ("disturbed",) * 2, 6, 0, 1, "dense", marks=pytest.mark.long),
    pytest.param(Layout(2, expert=2), ("roomy",) * 2, 3, 3, 0, "dense", marks=needs_4),
    pytest.param(Layout(expert=4), ("few_states",) * 4, 4, 3, 0, "dense", marks=needs_4),
    (Layout(expert=2), ("strides",) * 2, 8, 3, 0, "gated delta"),
    pytest.param(Layout(expert=2), ("disturbed",) * 2, 9, 0, 1, "gated delta", marks=pytest.mark.long),
]


@dataclass(slots=True)
class Totals:
    """Totals of all workloads."""

    tally: OracleTally = field(default_factory=OracleTally)
    num_decisions: int = 0

    def add(self, outcome: RankOutcome) -> None:
        """Count the results of one rank."""
        self.tally.add(OracleTally(outcome.num_compared, outcome.num_stopped))
        self.num_decisions += sum(count for count, *_ in outcome.decisions)


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    """Collect the totals of the module; print them and assert that few comparisons were stopped."""
    totals = Totals()
    yield totals
    print(f"\n{totals.tally}, {totals.num_decisions} decisions")
    totals.tally.assert_few_stops()


def name_of(value: object) -> str | None:
    """Name a layout or replicas in a test's id."""
    if isinstance(value, Layout):
        return f"tp{value.tensor}-pp{value.pipeline}-ep{value.expert}"
    return "+".join(value) if isinstance(value, tuple) else None


def run_on_each(
    worlds: Worlds, layout: Layout, flavour: str, seed: int, num_graphs: int, digest_steps: int, form: str = "dense"
) -> RankOutcome:
    """Run a workload on the ranks of a model; assert that all act alike, and return the first rank's results."""
    world = worlds.of(layout.tensor * layout.pipeline)
    outcomes = world.run(run_workloads, layout, flavour, seed, num_graphs, digest_steps, form)
    first: RankOutcome = outcomes[0]
    assert all(outcome.decisions == first.decisions and outcome.texts == first.texts for outcome in outcomes)
    assert {outcome.num_early for outcome in outcomes} == {first.num_early}
    return first


@pytest.mark.parametrize(("layout", "flavour", "seed", "num_graphs", "digest_steps", "form"), SHARED, ids=name_of)
def test_ranks_make_the_same_plans_and_generate_the_reference_tokens(
    layout: Layout,
    flavour: str,
    seed: int,
    num_graphs: int,
    digest_steps: int,
    form: str,
    worlds: Worlds,
    totals: Totals,
) -> None:
    """If ranks compare their decisions in every step, none overlaps; otherwise steps overlap equally on all."""
    first = run_on_each(worlds, layout, flavour, seed, num_graphs, digest_steps, form)
    assert bool(first.num_early) is not bool(first.decisions)
    assert all(count > first.seen[0]["requests"] for count, *_ in first.decisions)
    assert first.seen[1]["accepted_tokens"]
    assert all(bool(seen["graph_steps"]) is bool(num_graphs) for seen in first.seen)
    totals.add(first)


@pytest.mark.parametrize(
    ("layout", "num_graphs"), [(TENSOR, 3), pytest.param(PIPELINE, 0, marks=pytest.mark.long)], ids=name_of
)
def test_grammar_constrained_tokens_are_equal_on_all_ranks(
    layout: Layout, num_graphs: int, worlds: Worlds, totals: Totals
) -> None:
    first, *others = worlds.of(2).run(run_workloads, layout, "disturbed", 8, num_graphs, 1, "dense", True)
    assert all(outcome.decisions == first.decisions and outcome.texts == first.texts for outcome in others)
    assert all(seen["ended by a grammar"] for seen in first.seen)
    totals.add(first)


@pytest.mark.parametrize(
    ("layout", "num_graphs"),
    [
        pytest.param(TENSOR, 3, marks=pytest.mark.long),
        pytest.param(TENSOR, 0, marks=pytest.mark.long),
        pytest.param(PIPELINE, 0, marks=pytest.mark.long),
        (PIPELINE, 3),
    ],
    ids=name_of,
)
def test_draft_model_gives_the_same_drafts_on_all_ranks(
    layout: Layout, num_graphs: int, worlds: Worlds, totals: Totals
) -> None:
    """The draft model is split like the model for which it drafts."""
    outcomes = worlds.of(2).run(run_workloads, layout, "disturbed", 12, num_graphs, 1, "dense", False, "live", True)
    first, *others = outcomes
    assert all(outcome.decisions == first.decisions and outcome.texts == first.texts for outcome in others)
    _, drafted = first.seen
    print({name: drafted[name] for name in ("draft_tokens", "accepted_tokens", "drafting_failures")})
    assert drafted["accepted_tokens"] > 0.9 * drafted["draft_tokens"] > 0
    totals.add(first)


@pytest.mark.parametrize(
    ("layout", "flavour", "seed", "num_graphs", "form", "accuracy", "sampled_share"),
    [
        (TENSOR, "disturbed", 24, 3, "dense", 0.9, 0.3),
        (PIPELINE, "strides", 25, 3, "dense", -1.0, 0.3),
        *(
            pytest.param(layout, name, 30 - index, num_graphs, form, accuracy, 0.3, marks=pytest.mark.long)
            for layout in (TENSOR, PIPELINE)
            for index, (name, num_graphs, form, accuracy) in enumerate(
                (
                    ("disturbed_tiers" if layout is TENSOR else "small_steps", 3, "dense", 0.7),
                    ("few_states", 0, "gated delta", 0.9),
                    ("tight_blocks", 3, "gated delta", -1.0),
                    ("strides", 3, "dense", 0.3),
                    ("few_states", 3, "experts", 0.9),
                    ("disturbed", 0, "experts", -1.0),
                )
            )
        ),
    ],
    ids=name_of,
)
def test_drafts_of_a_head_are_equal_on_all_ranks_and_change_no_token(
    layout: Layout,
    flavour: str,
    seed: int,
    num_graphs: int,
    form: str,
    accuracy: float,
    sampled_share: float,
    worlds: Worlds,
    totals: Totals,
) -> None:
    """Ranks compare the plans of all steps, which include the drafts; with pipeline stages, the last one drafts."""
    arguments = layout, flavour, seed, num_graphs, 1, form, False, "live", False, accuracy, sampled_share
    first, *others = worlds.of(2).run(run_workloads, *arguments)
    assert all(outcome.decisions == first.decisions and outcome.texts == first.texts for outcome in others)
    plain, drafted = first.seen
    print({name: drafted[name] for name in ("draft_tokens", "accepted_tokens", "drafting_failures")})
    assert drafted["draft_tokens"] and bool(drafted["prompt_tokens_skipped"]) == bool(plain["prompt_tokens_skipped"])
    assert bool(drafted["accepted_tokens"]) or accuracy <= 0
    totals.add(first)


@pytest.mark.parametrize(
    ("layout", "flavour", "form"),
    [
        pytest.param(TENSOR, "disturbed_tiers", "dense", marks=pytest.mark.long),
        (PIPELINE, "one_budget", "dense"),
        pytest.param(PIPELINE, "one_budget", "toy", marks=[on_cpu, pytest.mark.long]),
        pytest.param(TENSOR, "disturbed_tiers", "gated delta", marks=pytest.mark.long),
    ],
    ids=name_of,
)
def test_states_are_quantized_equally_on_all_ranks(layout: Layout, flavour: str, form: str, worlds: Worlds) -> None:
    """Each rank has its shard of every cached state, which may be empty."""
    first, *others = worlds.of(2).run(run_workloads, layout, flavour, 11, 3, 1, form, False, "int8")
    assert all(outcome.decisions == first.decisions and outcome.texts == first.texts for outcome in others)
    assert all(seen["prompt_tokens_skipped"] and seen["graph_steps"] for seen in first.seen)
    assert first.num_stopped <= 0.01 * first.num_compared


@pytest.mark.parametrize(
    ("layout", "flavour"),
    [(TENSOR, "disk_tier"), pytest.param(PIPELINE, "disturbed_tiers", marks=pytest.mark.long)],
    ids=name_of,
)
def test_fp8_keys_and_values_give_the_tokens_of_an_uncached_engine(
    layout: Layout, flavour: str, worlds: Worlds
) -> None:
    (texts, num_skipped), *others = worlds.of(2).run(run_fp8_workload, layout, flavour, 3)
    assert num_skipped and all(other == (texts, num_skipped) for other in others)


@pytest.mark.parametrize(
    ("flavour", "seed", "num_graphs", "form", "accuracy"),
    [
        ("disturbed", 5, 3, "dense", 0.9),
        *(
            pytest.param(name, seed, num_graphs, form, accuracy, marks=pytest.mark.long)
            for name, seed, num_graphs, form, accuracy in (
                ("few_states", 7115, 3, "dense", -1.0),
                ("tight_blocks", 1, 0, "dense", 0.7),
                ("strides", 8, 3, "gated delta", 0.9),
                ("disturbed", 9, 0, "gated delta", -1.0),
            )
        ),
    ],
)
def test_replicas_that_share_the_experts_of_a_head_draft_together(
    flavour: str, seed: int, num_graphs: int, form: str, accuracy: float, worlds: Worlds, totals: Totals
) -> None:
    """A replica that does not draft, or has no requests, computes padding in the passes of the others."""
    arguments = Layout(expert=2), (flavour,) * 2, seed, num_graphs, 0, form, accuracy
    outcomes = worlds.of(2).run(run_workloads_of_replicas, *arguments)
    for outcome in outcomes:
        drafted = outcome.seen[1]
        print({name: drafted[name] for name in ("draft_tokens", "accepted_tokens", "drafting_failures")})
        assert drafted["draft_tokens"] and (drafted["accepted_tokens"] or accuracy < 0)
        totals.add(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["one_budget", "disturbed_budget"])
@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=name_of)
def test_kv_and_states_evict_each_other_on_every_rank(
    layout: Layout, flavour: str, worlds: Worlds, totals: Totals
) -> None:
    """Each seed is a workload without drafts and one with, with graphs and without, with compared plans and without."""
    evicted: Counter[str] = Counter()
    for seed in MANY_SEEDS:
        first = run_on_each(worlds, layout, flavour, seed, 3 * (seed % 2), seed // 2 % 2)
        for seen in first.seen:
            evicted.update({name: seen[name] for name in ("states_evicted", "kv_blocks_evicted", "requests_evicted")})
        totals.add(first)
    print(f"\n{2 * len(MANY_SEEDS)} workloads, {dict(evicted)}")
    assert min(evicted["states_evicted"], evicted["kv_blocks_evicted"]) > len(MANY_SEEDS)


@pytest.mark.parametrize(("layout", "flavours", "seed", "num_graphs", "digest_steps", "form"), REPLICAS, ids=name_of)
def test_concurrent_replicas_generate_the_reference_tokens(
    layout: Layout,
    flavours: tuple[str, ...],
    seed: int,
    num_graphs: int,
    digest_steps: int,
    form: str,
    worlds: Worlds,
    totals: Totals,
) -> None:
    """Ranks that share experts replay graphs of one shape together and overlap together."""
    world = worlds.of(layout.tensor * len(flavours))
    outcomes = world.run(run_workloads_of_replicas, layout, flavours, seed, num_graphs, digest_steps, form)
    assert outcomes[0].texts != outcomes[-1].texts
    for outcome in outcomes:
        totals.add(outcome)
        assert all(bool(seen["graph_steps"]) is bool(num_graphs) for seen in outcome.seen)
        assert not outcome.eager
    assert bool(sum(outcome.num_early for outcome in outcomes)) is bool(num_graphs)
    if layout.expert > 1:
        assert max(outcome.num_idle for outcome in outcomes) > 0
