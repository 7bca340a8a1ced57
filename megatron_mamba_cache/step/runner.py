"""Run the stages of a step in `StepRunner.run`; if a stage raises, `drop_failed_step` cleans up.

Stages: plan → forward → publish prompts → sample → launch the next step, if it may overlap, or decide its drafts → read
→ land → launch drafts.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from ..config import CacheConfig
from ..errors import CacheIntegrityError
from ..grammars.compiler import Grammars
from ..metrics import CacheCounters, CacheSnapshot
from ..policy.block_growth import GrowthOutcome
from ..policy.kept_tokens import StepTokens
from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest
from ..policy.running_requests import RunningRequests
from ..policy.scheduler import QueueState
from ..ranks.digest import Digest
from ..ranks.group import ExpertPeers, Ranks
from ..speculation.decode_schedule import (
    advance_followed_requests,
    advance_one_token_requests,
    advance_requests,
    note_hidden_states,
)
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from .batch import lay_out_step
from .buffers import HostCopy
from .changed_logits import LogitsChanges
from .grammar_masks import GrammarMasks
from .log_probs import StepScorer
from .memory import CacheMemory
from .model import StepModel
from .overlap import OverlappedSteps
from .overlapped_step import Capture, CapturedStep, GraphsByShape
from .shapes import StepShape
from .shared_steps import SharedSteps, StepSharing
from .step import Step, any_sampled
from .step_outcome import StepOutcome
from .step_requests import StepRequests, draft_budget
from .verify import copy_reached_boundaries, outcome_on_all_ranks, verify_step


class StepRunner:
    """Runs steps one after another over one cache memory, and owns all objects that are freed with this memory.

    Args:
        digest: Checks that all ranks make the same decisions.
        counters: Counters to update; they outlive the runner.
        vocab_size: Vocabulary size of the model, padding included.
        only_last_logits: True if the model returns logits only for the tokens in `StepBatch.logits`.
        peers: Expert-parallel ranks that serve other requests.
        grammars: Compiler and cache of the requests' grammars.
    """

    def __init__(
        self,
        memory: CacheMemory,
        config: CacheConfig,
        ranks: Ranks,
        planner: DraftPlanner | NoDrafts,
        digest: Digest,
        counters: CacheCounters,
        *,
        vocab_size: int,
        only_last_logits: bool,
        peers: ExpertPeers,
        grammars: Grammars,
    ) -> None:
        self.memory = memory
        self.cache = memory.prefix_cache
        self.ranks = ranks
        self.peers = peers
        self.planner = planner
        self.counters = counters
        self.vocab_size = vocab_size
        self.only_last_logits = only_last_logits
        limits = config.max_requests, config.max_tokens, config.max_prompt_tokens_beside_decode
        self.requests = RunningRequests(memory.prefix_cache, *limits)
        self._scorer = StepScorer(ranks, vocab_size, only_last=only_last_logits)
        self._digest = digest
        self._step: Step | None = None
        self._at_work: list[RunningRequest] = []  # requests of the step that is being planned or computed
        self.graphs: GraphsByShape | None = None  # graphs captured over this memory
        self._changes = LogitsChanges(GrammarMasks(grammars, samples_here=ranks.is_last_stage))
        self._capture: Callable[[], None] = lambda: None
        self.sharing = StepSharing()
        if self.peers.num_ranks > 1:
            self.sharing = SharedSteps(self.peers, self.requests, planner, self._shapes, lambda: self._capture())
        self.queue = QueueState()
        # Steps cannot overlap with pipeline stages, drafters that read hidden states, or ranks that compare every step.
        by_itself = not config.rank_digest_steps and ranks.num_stages == 1 and not planner.reads_hidden_states
        is_wanted = config.run_ahead and by_itself
        self.overlapped_steps = OverlappedSteps(self.requests, planner, self.queue, self.sharing, is_wanted=is_wanted)
        self.step_requests = StepRequests(
            memory,
            self.requests,
            planner,
            ranks,
            self._changes,
            self.overlapped_steps,
            self.queue,
            self.sharing,
            counters,
        )

    async def run(self, model: StepModel, *, lands: bool = True) -> StepOutcome:
        """Run the step that the scheduler has filled, and return its outcome. If this raises, call `drop_failed_step`.

        Args:
            lands: False if the caller chooses the tokens that requests keep, and calls `land` itself.
        """
        step = self.plan()
        logits = model.compute_step() if step.graph is None else step.graph.forward()
        self.sharing.note_launched()
        self.publish_prompts()
        if not self.sharing.is_shared:  # expert-parallel ranks must first agree on the next step
            await asyncio.sleep(0)  # let other tasks use the host while the forward pass runs
        if self._step is not step:
            raise CacheIntegrityError("the step was dropped during its forward pass; its requests have no new tokens")
        if not lands:
            self.queue.note_change()
        outcome = self._sample(step, logits)
        copy, scores = HostCopy(outcome), self._scorer.begin(step, outcome, logits)
        self.overlapped_steps.launch_next(step)
        early = self.overlapped_steps.launched
        if (early is None or early.has_device_drafts) and not step.num_prefill_requests:
            self.planner.decide_next(step.requests)  # while the device computes
        kept = self._keep(step, copy.wait())  # the step's only wait for the device
        log_probs = scores.arrived() if scores else self._scorer.log_probs(step, kept.tokens, logits, model.logits_of)
        num_drafts = step.num_drafts if self.planner.max_drafts else [0] * len(step.requests)
        held_back = self.land(kept) if lands else GrowthOutcome()
        self._launch_drafts(step)
        return StepOutcome(step, kept, num_drafts, log_probs, held_back)

    def plan(self) -> Step:
        """Schedule the decode requests and their drafts, and lay out the step on the device."""
        shape = self.sharing.next_shape()
        graph: CapturedStep | None = (early := self.overlapped_steps.take())
        if early is not None:
            self.sharing.note_launched()
            self._at_work = list(self.requests)
            distributions = early.schedule(self._at_work)
            if early.has_device_drafts:
                self.planner.note_followed(self._at_work)
        else:
            decoding = self.requests.decoding
            self._at_work = [*decoding, *(request for request in self.requests.prefilling if request.scheduled)]
            budget = draft_budget(self._at_work, self.requests.budget, self.graphs, shape)
            distributions = self.step_requests.schedule_decode(decoding, budget)
            self.planner.together.take_part()
            graph = None if self.graphs is None else self.graphs.fitting(self._at_work, shape)
        if graph is None:
            step = self.lay_out(self._at_work, distributions, shape=shape)
        else:
            step = Step.of_graph(graph, self._at_work, distributions)
        self.begin(step)
        self._changes.masks.begin(step.requests, step.batch.logits.starts)
        self._digest.note_plan(self.requests, step.requests)
        return step

    def publish_prompts(self) -> None:
        """Publish the prompt blocks and states that the launched forward pass writes, so that they can be matched."""
        batch = self.step.batch
        for request in batch.requests[batch.num_decode_requests :]:
            self.cache.publish(request, request.scheduled)

    def boundary_offsets(self) -> list[list[int]]:
        """Return the boundaries where each prefill request's states are stored, as offsets from its first new token."""
        requests = [request for request in self.requests.prefilling if request.scheduled]
        return [[state.position - request.computed for state in request.reserved] for request in requests]

    def land(self, kept: StepTokens) -> GrowthOutcome:
        """Append and publish the kept tokens, and remove requests that ended; return the requests paused or evicted."""
        step, overlapped_step = self.step, self.overlapped_steps.launched
        ended = [step.requests[index] for index in kept.ended]
        if overlapped_step is not None:  # it was launched with these tokens, and its blocks are allocated
            if overlapped_step.has_device_drafts:
                advance_followed_requests(step.requests, kept.tokens, self.cache, self.planner)
            else:
                overlapped_step.check_inputs([new[-1] for new in kept.tokens])
                advance_one_token_requests(step.requests, kept.tokens, self.cache, self.planner)
            self._step, self._at_work = None, []
            self.memory.routes.keep(ended)
            self.step_requests.leave(ended)
            held_back = GrowthOutcome()
        else:
            if self.planner.reads_hidden_states:
                note_hidden_states(
                    step.requests, kept.tokens, step.batch.logits.starts, step.wanted_outputs, self.planner
                )
            advance_requests(step.requests, kept.tokens, self.cache, self.planner)
            self.memory.routes.keep(ended)
            self.step_requests.leave(ended)
            held_back = self.step_requests.grow()
            self._step, self._at_work = None, []
        if ended or overlapped_step is None:  # otherwise the counts stay the same
            self.step_requests.count()
        self.memory.below.start()
        self._digest.note_outcome(self.requests, step.requests, kept)
        return held_back

    def drop_failed_step(self) -> None:
        """Release the reservations of a failed step and drop its requests, whose live states may be corrupt.

        A dropped request that is admitted again keeps its tokens. If the failed step had landed, the overlapped step
        and its requests stay, and the next call to `run` lands that step.
        """
        try:
            self.step_requests.drop(
                [request for request in self.requests if request in self._at_work or request.scheduled]
            )
            if not self.sharing.is_shared:  # otherwise the device may wait for a launch on another expert-parallel rank
                torch.cuda.synchronize()  # the next step may overwrite the host buffer while the device copies it
        finally:
            self._step, self._at_work = None, []
            self.counters.steps_aborted += 1

    def reset(self) -> None:
        """Drop all requests and the current step. Cached blocks and states stay."""
        self.step_requests.clear()
        self._step, self._at_work = None, []

    def close(self) -> None:
        """Wait for an overlapped step and for copies, and drop all requests, before the memory is freed."""
        self.planner.release_memory()
        self._step, self._at_work = None, []
        self.step_requests.drop_overlapped_step()
        self.memory.close(self.requests)
        self.counters.states_evicted += self.memory.slots.num_evicted
        self.counters.kv_blocks_evicted += self.memory.slots.num_blocks_evicted
        self.step_requests.forget(self.requests)

    @property
    def step(self) -> Step:
        """The current step, which has been laid out and has not landed."""
        if self._step is None:
            raise CacheIntegrityError("no step is planned; call initialize_attention_state() first")
        return self._step

    @property
    def is_computing(self) -> bool:
        """True if a step has been laid out and has not landed."""
        return self._step is not None

    def lay_out(
        self,
        requests: Sequence[RunningRequest],
        draft_distributions: Sequence[Tensor | None] = (),
        *,
        purpose: DrawPurpose = DrawPurpose.SAMPLE,
        shape: StepShape | None = None,
    ) -> Step:
        """Copy the scheduled requests' inputs to the device and prepare memory; return a step to run without a graph.

        The previous step's results must have been read, because its buffers are overwritten.

        Args:
            draft_distributions: For each decode request, the distributions of its drafts; see `Step`.
            purpose: What the random numbers are used for, e.g. sampling or drafting.
            shape: Step shape on which the expert-parallel ranks agreed; None without expert parallelism.
        """
        memory, draws_ratios = self.memory, any_sampled(draft_distributions)
        batch = lay_out_step(
            requests,
            memory.step_buffers,
            memory.geometry,
            draws_ratios=draws_ratios,
            purpose=purpose,
            num_exchanged=0 if shape is None else shape.num_tokens,
        )
        memory.prepare(requests[batch.num_decode_requests :])
        return Step(batch, memory.attention.plan(batch.attention), draft_distributions=draft_distributions)

    def begin(self, step: Step) -> Step:
        """Update the counts for a laid-out step, make it the current step, and return it."""
        self.show(step)
        self.counters.steps += 1
        self.counters.graph_steps += step.graph is not None
        return step

    def show(self, step: Step) -> None:
        """Make a step the current step, which the model and the sampler read, and update the request counts."""
        self._step = step
        self.step_requests.count_step(step)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context manager in which padding steps may run; it restores the current step and the counts afterwards."""
        self.overlapped_steps.wait()
        step, counts = self._step, self.step_requests.counts
        try:
            yield
        finally:
            self._step = step
            self.step_requests.restore_counts(counts)

    def wanted_logits(self, step: Step, logits: Tensor) -> Tensor:
        """Return the logits to sample from, [logits, vocab], selected from [1, n, vocab] and changed as requested."""
        wanted = logits.squeeze(0) if self.only_last_logits else step.select_outputs(logits)
        return self._changes.apply(step.requests, step.batch.logits.starts, wanted)

    def logits_on_all_ranks(self, step: Step, output: Tensor) -> Tensor:
        """Return logits, [n, vocab], bit-equal on all ranks, given each rank's output of the forward pass."""
        return self._scorer.logits_on_all_ranks(step, output)

    def drop_graphs(self) -> None:
        """Copy the results of an overlapped step, then free all graphs."""
        self.overlapped_steps.leave_graph()
        self.graphs = None

    def capture_by(self, capture: Callable[[], None], *, now: bool) -> None:
        """Capture graphs now, or when expert-parallel ranks next agree on a step's shape.

        Args:
            capture: Function that captures the graphs. Expert-parallel ranks call it together if any of them needs
                graphs.
            now: False to wait for that agreement with expert parallelism; until then, steps run without graphs.
        """
        self._capture = capture
        if now or not isinstance(self.sharing, SharedSteps):
            capture()
        else:
            self.sharing.wants_capture, self.graphs = True, None  # an overlapped step keeps its graph

    def adopt_graphs(self, graphs: GraphsByShape | None) -> None:
        """Use graphs captured over this memory for later steps; with None, run steps without graphs."""
        self.graphs = graphs

    def snapshot(self) -> CacheSnapshot:
        """Return the counters and the current use of slots and blocks."""
        return self.memory.snapshot(self.counters, Capture() if self.graphs is None else self.graphs.capture)

    def _sample(self, step: Step, logits: Tensor) -> Tensor:
        """Sample tokens, verify drafts, and copy the states at reached boundaries.

        Returns:
            Outcome of `verify_step`; each request is at its index in `StepBatch.row_indices`.
        """
        graph = step.verifying_graph(only_last_logits=self.only_last_logits)
        if graph is not None:
            self._changes.masks.apply(logits.squeeze(0))  # in place, because the graph reads these logits
            return graph.verify(step.batch.logits.draws)
        requests = step.batch.logits
        outcome = outcome_on_all_ranks(
            self.ranks,
            requests,
            lambda: verify_step(requests, self.wanted_logits(step, logits), step.draft_distributions),
        )
        copy_reached_boundaries(step.batch, outcome, self.memory)
        if step.feeding_graph is not None:
            step.feeding_graph.adopt(outcome)
        return outcome

    def _launch_drafts(self, step: Step) -> None:
        """Launch the next step with drafts if it is allowed; called after this step has landed."""
        graphs = self.graphs
        if self.overlapped_steps.may_launch_drafts(step, graphs) and graphs is not None:
            distributions = self.step_requests.schedule_decode(step.requests, self.requests.budget)
            self.overlapped_steps.launch_drafts(graphs, step.requests, distributions)

    def _keep(self, step: Step, found: Sequence[Sequence[int]]) -> StepTokens:
        """Return the tokens that each request keeps; launch the next step if it may overlap.

        Args:
            found: Outcome of `verify_step` as a list of rows.
        """
        early = self.overlapped_steps.launched
        if not any_sampled(step.draft_distributions) and not (early is not None and early.has_device_drafts):
            tokens = [found[row][1] for row in step.batch.row_indices]
            self.overlapped_steps.launch_next(step, tokens)
            if (early := self.overlapped_steps.launched) is not None:
                early.note_fed(tokens)
                if not early.any_ends(tokens):
                    return StepTokens(list(zip(tokens, strict=True)))
        lines = [found[row] for row in step.batch.row_indices]
        sampled = [tuple(line[1 : 1 + line[0]]) for line in lines]
        if not step.num_prefill_requests and not _may_end(step, sampled):
            return StepTokens(sampled)
        return StepTokens.of([request.keep(new) for request, new in zip(step.requests, sampled, strict=True)])

    def _shapes(self) -> Collection[StepShape]:
        return () if self.graphs is None else self.graphs.shapes


def _may_end(step: Step, sampled: Sequence[Sequence[int]]) -> bool:
    """Return False if no request of a decode step ends with these tokens, [requests][tokens]."""
    if not step.batch.logits.end_tokens.isdisjoint(chain.from_iterable(sampled)):
        return True
    pairs = zip(step.requests, sampled, strict=True)
    return any([request.computed + 1 + len(new) >= request.spec.max_len for request, new in pairs])
