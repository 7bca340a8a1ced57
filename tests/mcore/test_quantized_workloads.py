"""Random workloads with quantized cached states: restored states were published, and tokens hardly change."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.requests import ReservedState, RunningRequest
from megatron_mamba_cache.policy.state_reservations import StateReservations
from megatron_mamba_cache.recurrences.quantized_states import quantize
from megatron_mamba_cache.step.memory import CacheMemory
from tests.mcore.checked_restores import checked_restores
from tests.mcore.engine_runs import EngineRun, OracleTally, allow_every_cached_form
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import (
    FLAVOURS,
    MODEL_FORMS,
    Workload,
    WorkloadOutcome,
    make_workload,
    run_workload,
    undisturbed,
)
from tests.mcore.split_replays import capture_in_parts
from tests.mcore.workload_totals import WorkloadTotals
from tests.recurrences.toy import on_cpu

NAMES = [name for name in FLAVOURS if name != "uncached"]
NUM_DRAFTS = 3
FORMS = {
    "plain": (0, False),
    "replayed drafts": (NUM_DRAFTS, True),
    "window": (NUM_DRAFTS, False),
    "replayed": (0, True),
}
"""Most drafts, and True if states are replayed."""
OTHER_FORMS = {
    f"{form}{drafts}": (num_drafts, False)
    for form in ("toy", "gated delta")
    for drafts, num_drafts in (("", 0), (" with drafts", NUM_DRAFTS))
}
BY_DEFAULT = [(name, list(FORMS)[i % len(FORMS)], bool(i % 3), "int8", range(1)) for i, name in enumerate(NAMES)]
OTHERS = [
    pytest.param(name, form, has_graphs, "int8", range(1, 7), marks=pytest.mark.slow)
    for name in NAMES
    for form in FORMS
    for has_graphs in (False, True)
]
OTHER_RECURRENCES = [
    pytest.param(
        name,
        f"{form} with drafts" if i % 2 else form,
        bool(i % 3),
        cached_form,
        range(1),
        marks=[*marks, *([] if not at and i % 3 == by_default else [pytest.mark.long])],
    )
    for by_default, form, marks, cached_forms in (
        (1, "toy", [on_cpu], ("int8", "fp8")),
        (2, "gated delta", [], ("int8",)),  # fp8 has a 16th of the precision, which its norms enlarge
    )
    for i, name in enumerate(NAMES)
    for at, cached_form in enumerate(cached_forms[i % 2 :] + cached_forms[: i % 2])
]
MOST_CHANGED = 0.01
"""The share of tokens that may differ from the oracle's choice."""


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end."""
    totals = WorkloadTotals()
    yield totals
    print(f"\n{totals.tally.num_compared} tokens, {totals.tally.num_stopped} of them not the oracle's choice")
    assert totals.tally.num_stopped <= MOST_CHANGED * totals.tally.num_compared


def run_form(name: str, form: str, seed: int, **settings: Any) -> tuple[Workload, NoisyDrafter | None]:
    """Return the workload of a flavour, and a drafter that is often right if the workload has drafts."""
    num_drafts, replays = (FORMS | OTHER_FORMS)[form]
    models = MODEL_FORMS[form.removesuffix(" with drafts") if form in OTHER_FORMS else "dense"]
    work = make_workload(FLAVOURS[name], seed, num_drafts, models=models, replays=replays, **settings)
    if not num_drafts:
        return work, None
    texts = run_workload(undisturbed(work)).texts
    vocab = work.subject.sizes.vocab_size
    return work, NoisyDrafter(texts, accuracy=0.8, vocab_size=vocab, seed=seed, varies=True)


@pytest.mark.parametrize(
    ("name", "form", "has_graphs", "cached_form", "seeds"), BY_DEFAULT + OTHERS + OTHER_RECURRENCES
)
def test_quantized_states_are_restored_as_cached_in_random_workloads(
    name: str, form: str, has_graphs: bool, cached_form: str, seeds: range, totals: WorkloadTotals
) -> None:
    def run(seed: int) -> WorkloadOutcome:
        with pytest.MonkeyPatch.context() as patch:
            allow_every_cached_form(patch)
            work, drafter = run_form(name, form, seed, cached_form=cached_form)
            if has_graphs:
                capture_in_parts(patch)
                prefill_tokens = min(24, work.config.max_tokens)
                graphs = {"num_cuda_graphs": 3, "cuda_graph_prefill_tokens": prefill_tokens}
                work = replace(work, config=replace(work.config, **graphs))
            with checked_restores(patch):
                return run_workload(work, drafter)

    totals.run_batch(f"{name}, {form}", seeds, run, ())


@contextmanager
def quantizing_when_published(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines that store cached states unquantized quantize and dequantize them when they publish them."""
    memories: list[CacheMemory] = []
    publish, begin = StateReservations._publish_state, CacheMemory.__init__

    def noted(memory: CacheMemory, *arguments: Any, **settings: Any) -> None:
        begin(memory, *arguments, **settings)
        memories.append(memory)

    def quantized(pool: StateReservations, request: RunningRequest, state: ReservedState, block: BlockId) -> None:
        (memory,) = (memory for memory in memories if memory.prefix_cache._reservations is pool)
        for number, group in enumerate(memory.state_pool.groups):
            for tensor in (tensor for tensor in group.tensors if tensor.is_matrix):
                states = memory.state_pool.tensor(tensor.name, number)[:, state.slot]
                values, scales = quantize(states, torch.int8)
                states.copy_(values * scales[..., None, :])
        publish(pool, request, state, block)

    patch.setattr(CacheMemory, "__init__", noted)
    patch.setattr(StateReservations, "_publish_state", quantized)
    yield


@pytest.mark.parametrize(
    "form", [*FORMS, *(pytest.param(form, marks=on_cpu if "toy" in form else ()) for form in OTHER_FORMS)]
)
@pytest.mark.parametrize(
    "seeds", [pytest.param(range(1), id="few"), pytest.param(range(1, 30), id="more", marks=pytest.mark.slow)]
)
def test_tokens_match_an_engine_that_dequantizes_states_when_caching(form: str, seeds: range) -> None:
    """Both engines have room for everything, so that they make the same decisions."""
    skipped = 0
    for seed in seeds:
        name = random.Random(seed).choice(["roomy", "small_steps"])
        work, drafter = run_form(name, form, seed, cached_form="int8")
        roomy = {"cache_gb": 0.04, "num_blocks": None}
        work = replace(work, config=replace(work.config, **roomy))
        outcome = run_workload(work, drafter)
        exact = replace(work, config=replace(work.config, cached_state_dtype="live"))
        with pytest.MonkeyPatch.context() as patch, quantizing_when_published(patch):
            patch.setattr(EngineRun, "assert_matches_oracle", lambda *_: OracleTally())  # it does not quantize
            other = run_workload(exact, drafter)
        assert outcome.texts == other.texts
        assert not (outcome.seen["states_evicted"] or other.seen["states_evicted"])
        assert outcome.seen["prompt_tokens_skipped"] == other.seen["prompt_tokens_skipped"]
        skipped += outcome.seen["prompt_tokens_skipped"]
    assert skipped
