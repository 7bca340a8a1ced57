"""Functions that run on a rank: random workloads on a sharded model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_mamba_cache.mcore.model_ranks import expert_peers_of_process, num_expert_ranks, ranks_of_process
from megatron_mamba_cache.models.architecture import GatedDeltaSizes
from megatron_mamba_cache.speculation.drafter import Drafter
from megatron_mamba_cache.step import shared_steps
from megatron_mamba_cache.step.overlapped_step import OverlappedStep
from megatron_mamba_cache.step.shapes import StepShape
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.distributed.rank_models import Layout, parallel
from tests.mcore import random_workloads
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import EngineRun, OracleTally
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import ERROR_POINTS
from tests.mcore.mtp_drafters import CheckedMTPDrafter, QuickReceiver
from tests.mcore.noisy_drafter import NoisyDrafter, noisy_texts
from tests.mcore.random_workloads import (
    FLAVOURS,
    GATED_DELTA_MODELS,
    LATENT_EXPERTS,
    MODEL_FORMS,
    WITHOUT_REPLAY,
    Workload,
    make_workload,
    run_workload,
    undisturbed,
)
from tests.mcore.workload_drafters import start_draft_model

NUM_DRAFTS = 3
GRAPH_TOKENS = 40
REPLAYED = ("disturbed", "one_budget", "strides")  # flavours whose states are replayed
REPLAYED_WITH_HEAD = (*REPLAYED, "few_states")  # in windows, drafts evict cached states, and hits with them
_OF_ONE_STAGE = ("the first layer", "attention", "the last mixer", "sampling")
_ERRORS_OF_EVERY_STAGE = {index: found for index, found in ERROR_POINTS.items() if index not in _OF_ONE_STAGE}
_MODELS_WITH_EXPERTS = {
    "dense": (
        {"pattern": "ME*M-", "ssm_chunk_size": 8},
        {"pattern": "M*EME", "ssm_chunk_size": 16, "use_rope": False, "experts": LATENT_EXPERTS},
    ),
    "gated delta": (GATED_DELTA_MODELS[1] | {"num_experts": 8},),
}
_WIDTHS = {"mamba_num_groups": 4}  # four ranks have a part of each, and copies of two KV heads
_DELTA_WIDTHS = {"gated_delta": GatedDeltaSizes(4, 8, 16, 24)}
_ONE_KV_HEAD = {"num_query_groups": 1}  # of which two ranks have a copy


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """Outcome of workloads on a rank.

    Args:
        texts: Prompt and reply of each request, with drafts and without.
        seen: Counters, likewise.
        num_idle: Dummy steps, while other replicas had requests.
        decisions: Of each, how many there were and their hash; none where the ranks do not compare them.
        num_early: Steps that were launched before the one before was over, which none is where ranks compare.
        eager: Shapes that ranks agreed on and had no graph for, of so few prompt tokens that there should be one.
    """

    texts: tuple[dict[int, list[int]], dict[int, list[int]]]
    seen: tuple[dict[str, int], dict[str, int]]
    decisions: tuple[tuple[int, ...], ...]
    num_compared: int
    num_stopped: int
    num_early: int
    num_idle: int = 0
    eager: tuple[StepShape, ...] = ()


def run_workloads(
    layout: Layout,
    flavour: str,
    seed: int,
    num_graphs: int,
    digest_steps: int,
    form: str = "dense",
    has_grammars: bool = False,
    cached_form: str = "live",
    drafts_with_model: bool = False,
    head_accuracy: float | None = None,
    sampled_share: float = 0.0,
) -> RankOutcome:
    """Run the workload of a flavour and a seed with and without drafts, like the other ranks.

    With `head_accuracy`, an MTP head drafts, whose drafts are replaced by those that are right so often; -1: are not.

    Tokens are compared with the oracle's here; plans with the other ranks' before every forward, with digests.
    """
    with parallel(layout), pytest.MonkeyPatch.context() as patch:
        if layout.pipeline > 1:
            patch.setattr(random_workloads, "ERROR_POINTS", _ERRORS_OF_EVERY_STAGE)
        models = MODEL_FORMS[form]
        if layout.tensor > 2:
            models = tuple(model | (_DELTA_WIDTHS if "gated_delta" in model else _WIDTHS) for model in models)
        elif layout.tensor == 2 and form == "gated delta":
            models = tuple(model | _ONE_KV_HEAD for model in models)
        capture_without_cuda(patch)
        has_head = head_accuracy is not None
        settings: dict[str, Any] = {"has_grammars": has_grammars, "cached_form": cached_form, "models": models}
        settings["replays"] = flavour in (REPLAYED_WITH_HEAD if has_head else REPLAYED) and form not in WITHOUT_REPLAY
        settings |= {"has_head": has_head, "sampled_share": sampled_share}
        work = _workload(flavour, seed, num_graphs, digest_steps, **settings)
        return _run_workloads(work, drafts_with_model, head_accuracy)


def run_fp8_workload(layout: Layout, flavour: str, seed: int) -> tuple[dict[int, list[int]], int]:
    """Run a workload over FP8 keys and values; return its texts and the number of prompt tokens that were skipped.

    The tokens are compared with those of an uncached engine with FP8 keys and values.
    """
    with parallel(layout), pytest.MonkeyPatch.context() as patch:
        if layout.pipeline > 1:
            patch.setattr(random_workloads, "ERROR_POINTS", _ERRORS_OF_EVERY_STAGE)
        patch.setattr(random_workloads, "assert_replies_are_the_oracles", lambda *_: OracleTally())
        capture_without_cuda(patch)
        work = _workload(flavour, seed, 3, 1, kv_cache_dtype="fp8")
        uncached = undisturbed(work)
        settings = replace(uncached.config, kv_cache_dtype="fp8", prefix_caching=False)
        expected = run_workload(replace(uncached, config=settings)).texts
        outcome = run_workload(work, _drafter(expected, work))
        assert outcome.texts == expected
        return outcome.texts, outcome.seen["prompt_tokens_skipped"]


def run_workloads_of_replicas(
    layout: Layout,
    flavours: tuple[str, ...],
    seed: int,
    num_graphs: int,
    digest_steps: int,
    form: str = "dense",
    head_accuracy: float | None = None,
) -> RankOutcome:
    """Run a different workload on each replica, in step with the others, which may share experts with it."""
    with parallel(layout):
        return _run_workloads_of_replica(layout, flavours, seed, num_graphs, digest_steps, form, head_accuracy)


def _run_workloads_of_replica(
    layout: Layout,
    flavours: tuple[str, ...],
    seed: int,
    num_graphs: int,
    digest_steps: int,
    form: str,
    head_accuracy: float | None,
) -> RankOutcome:
    """Run it within the layout; everything that this function holds is freed before the ranks' groups."""
    with pytest.MonkeyPatch.context() as patch:
        capture_without_cuda(patch)
        if layout.expert > 1:  # of one model
            models = _MODELS_WITH_EXPERTS[form]
            patch.setattr(random_workloads, "MODELS", (models[seed % len(models)],))
        steps = SharedSteps()
        steps.install(patch)
        replica = parallel_state.get_data_parallel_rank()
        own_seed = seed if layout.expert > 1 else seed + replica
        replays = flavours[replica] in REPLAYED and form not in WITHOUT_REPLAY
        has_head = head_accuracy is not None
        work = _workload(flavours[replica], own_seed, num_graphs, digest_steps, replays=replays, has_head=has_head)
        if layout.expert > 1:  # settings are the same on all ranks, loads are not: fewer requests, and later
            later = (replace(arrival, step=arrival.step + 5 * replica) for arrival in work.arrivals)
            # Others take no part in one rank's flush or suspend; they must not notice an error of one rank.
            work = replace(
                work,
                arrivals=tuple(later)[: len(work.arrivals) - 2 * replica],
                disturbances=("flush", "error", "error"),
            )
        most_tokens = min(GRAPH_TOKENS, work.config.max_tokens - work.config.max_requests - 1)
        with _shapes_without_graphs(most_tokens) as eager:
            outcome = _run_workloads(work, head_accuracy=head_accuracy)
        return replace(outcome, num_idle=steps.num_idle, eager=tuple(eager) if num_graphs else ())


@contextmanager
def _shapes_without_graphs(most_tokens: int) -> Iterator[list[StepShape]]:
    """Collect the shapes of shared steps that have no graph, except those of more prompt tokens."""
    found: list[StepShape] = []
    next_shape = shared_steps.SharedSteps.next_shape

    def noted(steps: shared_steps.SharedSteps) -> StepShape:
        shape = next_shape(steps)
        if shape.num_prefill_tokens <= most_tokens and shape not in steps._shapes():
            found.append(shape)
        return shape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_steps.SharedSteps, "next_shape", noted)
        yield found


class SharedSteps:
    """Keeps replicas in step, with idle steps for those without requests.

    Attributes:
        num_idle: Dummy steps so far, while other replicas had requests.
    """

    def __init__(self) -> None:
        self._controller: Any = None
        self._peers = expert_peers_of_process()  # a round that waits for the device would wait for an overlapped step
        self.num_idle = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Announce every step of an engine to the other replicas."""
        step = EngineRun.step

        def announced(run: EngineRun) -> list[int]:
            self._controller = run.engine.controller
            if not run.engine.owes_step:
                self._any_busy(True)
            return step(run)

        check = random_workloads.assert_replies_are_the_oracles

        def checked_alone(work: Workload, run: EngineRun) -> OracleTally:
            self._wait_for_others()  # the device may wait for their part of a step that was launched early
            return check(work, run)

        patch.setattr(EngineRun, "step", announced)
        patch.setattr(random_workloads, "assert_replies_are_the_oracles", checked_alone)

    def _wait_for_others(self) -> None:
        """Run dummy steps until no replica has a request; the cache is kept."""
        context = self._controller.context
        before = _contents(context)
        while context.runner.sharing.is_owed or self._any_busy(False):
            self._controller.dummy_forward()
            self.num_idle += 1
        assert all(torch.equal(now, then) for now, then in zip(_contents(context), before, strict=True))
        context.check_integrity()

    def _any_busy(self, is_busy: bool) -> bool:
        return bool(self._peers.greatest([is_busy])[0])


def _contents(context: Any) -> list[Tensor]:
    """Return a copy of all states, and of the KV blocks that a request may read."""
    memory = context.memory
    return [
        *(states.clone() for states in memory.state_pool.tensors),
        memory.kv_buffer[:, :, : memory.dummy_block].clone(),
    ]


def _workload(flavour: str, seed: int, num_graphs: int, digest_steps: int, **settings: Any) -> Workload:
    work = make_workload(FLAVOURS[flavour], seed, NUM_DRAFTS, **({"replays": flavour in REPLAYED} | settings))
    graphs = {"num_cuda_graphs": num_graphs, "cuda_graph_prefill_tokens": GRAPH_TOKENS}
    return replace(work, config=replace(work.config, rank_digest_steps=digest_steps, **graphs))


def _run_workloads(work: Workload, drafts_with_model: bool = False, head_accuracy: float | None = None) -> RankOutcome:
    with _counted_overlapped_steps() as early:
        plain = run_workload(replace(work, config=replace(work.config, num_speculative_tokens=0)))
        if head_accuracy is None:
            drafter = _draft_model(work) if drafts_with_model else _drafter(plain.texts, work)
        else:
            drafter = _head(work, plain.texts, head_accuracy)
        outcomes = plain, run_workload(work, drafter)
        if isinstance(drafter, CheckedDraftModel):
            drafter.assert_nothing_held()
            assert bool(drafter.counters.graph_steps) is bool(work.config.num_cuda_graphs)
        if isinstance(drafter, CheckedMTPDrafter) and drafter.checks:
            drafter.assert_entries_are_right()
    compares = work.config.rank_digest_steps > 0
    logs = [outcome.run.engine.context.digest.log for outcome in outcomes] if compares else []
    return RankOutcome(
        texts=tuple(outcome.texts for outcome in outcomes),
        seen=tuple(dict(outcome.seen) for outcome in outcomes),
        decisions=tuple((log.num_noted, *log.fingerprint()) for log in logs),
        num_compared=sum(outcome.tally.num_compared for outcome in outcomes),
        num_stopped=sum(outcome.tally.num_stopped for outcome in outcomes),
        num_early=len(early),
    )


@contextmanager
def _counted_overlapped_steps() -> Iterator[list[OverlappedStep]]:
    """Collect the overlapped steps of the block."""
    early: list[OverlappedStep] = []
    launch_next = StepGraph.launch_next

    def noted(*args: Any) -> OverlappedStep:
        early.append(launch_next(*args))
        return early[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraph, "launch_next", noted)
        yield early


def _draft_model(work: Workload) -> CheckedDraftModel:
    """Return the ranks' model as its own draft model, with graphs if the model has them."""
    return start_draft_model(
        random.Random(7), work, work.subject, num_cuda_graphs=work.config.num_cuda_graphs, kv_blocks=200
    )


def _head(work: Workload, texts: dict[int, list[int]], accuracy: float) -> Drafter:
    """Return the drafter of this rank; a negative accuracy keeps the drafts of the random head.

    Checks need a model that computes a whole sequence on its own ranks.
    """
    ranks = ranks_of_process()
    if not ranks.is_last_stage:
        return QuickReceiver(work.subject)
    known = None if accuracy < 0 else noisy_texts(texts, accuracy=accuracy, vocab_size=work.subject.sizes.vocab_size)
    share = 0.3 if ranks.num_stages == 1 and num_expert_ranks() == 1 else 0.0
    return CheckedMTPDrafter(work.subject, known=known, share=share)


def _drafter(texts: dict[int, list[int]], work: Workload, accuracy: float = 0.8) -> NoisyDrafter:
    vocab_size = work.subject.sizes.vocab_size
    return NoisyDrafter(texts, accuracy=accuracy, vocab_size=vocab_size, seed=random.Random(len(texts)).randrange(100))
