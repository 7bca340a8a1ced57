"""Admit, schedule and remove the requests of the next step, and allocate their KV blocks."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..metrics import CacheCounters
from ..policy.admission import Refusal
from ..policy.block_growth import GrowthOutcome
from ..policy.requests import Candidate, RunningRequest
from ..policy.running_requests import RunningRequests
from ..policy.scheduler import QueueState, ScheduledStep, StepScheduler
from ..ranks.group import Ranks
from ..speculation.decode_schedule import schedule_decode
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from .changed_logits import LogitsChanges
from .memory import CacheMemory
from .overlap import OverlappedSteps
from .overlapped_step import GraphsByShape
from .shapes import StepShape
from .shared_steps import StepSharing
from .step import Step
from .step_outcome import StepCounts


@dataclass(slots=True, eq=False)
class StepRequests:
    """Decides which requests take part in the next step, and with how many drafts.

    Args:
        running: All running and paused requests.
        changes: Logit changes of requests; entries of requests that leave are removed.
        counts: Request and token counts of the next step.
    """

    memory: CacheMemory
    running: RunningRequests
    planner: DraftPlanner | NoDrafts
    ranks: Ranks
    changes: LogitsChanges
    overlapped_steps: OverlappedSteps
    queue: QueueState
    sharing: StepSharing
    counters: CacheCounters
    counts: StepCounts = field(default_factory=StepCounts)

    def admit(self, candidate: Candidate, budget: int) -> RunningRequest | Refusal:
        """Admit a request to the next step; raise `RuntimeError` if that step has been launched."""
        self.overlapped_steps.refuse_requests()
        outcome = self.running.admit(candidate, budget)
        self.count()
        return outcome

    def schedule(self, scheduler: StepScheduler, waiting: Iterable[Candidate]) -> ScheduledStep:
        """Fill the next step with `StepScheduler.fill_step`; raise `RuntimeError` if that step has been launched."""
        self.overlapped_steps.refuse_requests()
        scheduled = scheduler.fill_step(self.running, waiting)
        self.memory.below.start()
        self.count()
        return scheduled

    def prefetch(self, scheduler: StepScheduler, waiting: Sequence[Candidate]) -> None:
        """Start restores for waiting requests, which cannot join the next step because it is already running."""
        if not self.running.any_paused:
            scheduler.prefetch(self.running, waiting)
            self.memory.below.start()

    def schedule_decode(self, requests: Sequence[RunningRequest], budget: int) -> list[Tensor | None]:
        """Schedule one token plus drafts for each decode request; return the draft distributions, see `Step`."""
        all_hold, allowed = self.ranks.all_hold, self.changes.masks.allowed
        return schedule_decode(requests, self.running.cache, self.planner, budget, all_hold, allowed)

    def drop(self, requests: Collection[RunningRequest]) -> None:
        """Drop requests between steps; their published blocks and states stay cached."""
        self.queue.note_change()
        self.leave(requests)
        self.running.resume()
        self.count()

    def leave(self, requests: Collection[RunningRequest]) -> None:
        """Release requests that leave; if none remains, drop the overlapped step."""
        if not requests:
            return
        self.running.drop(requests)
        self.forget(requests)
        if not self.running:
            self.drop_overlapped_step()

    def drop_overlapped_step(self) -> None:
        """Wait for the overlapped step and discard it, because all its requests have left."""
        self.queue.note_change()
        if not self.sharing.is_owed:  # otherwise other ranks wait for it
            self.overlapped_steps.drop()

    def grow(self) -> GrowthOutcome:
        """Allocate KV blocks for the next step; pause, resume or evict requests if needed, and return which."""
        outcome = self.running.grow(self.memory.num_paused_blocks)
        self.forget(outcome.evicted)
        self.memory.pause(outcome.paused)
        self.counters.requests_paused += len(outcome.paused)
        self.counters.requests_evicted += len(outcome.evicted)
        return outcome

    def forget(self, requests: Iterable[RunningRequest]) -> None:
        """Remove requests that left from the draft planner and the logits changes."""
        for request in requests:
            self.planner.forget(request.request_id)
            self.changes.forget(request.request_id)

    def clear(self) -> None:
        """Release all requests and drop the overlapped step. Cached blocks and states stay."""
        self.leave(list(self.running))
        self.drop_overlapped_step()
        self.counts = StepCounts()

    def count(self) -> None:
        """Set `counts` to the requests and tokens of the next step, without drafts."""
        self.counts = self.counts._replace(**self.running.counts._asdict())

    def count_step(self, step: Step) -> None:
        """Set `counts` to the requests and tokens of a laid-out step."""
        self.counts = self.counts._replace(
            prefilling=step.num_prefill_requests,
            tokens=step.batch.num_tokens,
            padded_tokens=step.num_padded_tokens,
            padded_requests=step.num_padded_requests,
        )

    def restore_counts(self, counts: StepCounts) -> None:
        """Restore saved counts after padding steps have changed them."""
        self.counts = counts


def draft_budget(
    requests: Sequence[RunningRequest], budget: int, graphs: GraphsByShape | None, shape: StepShape | None
) -> int:
    """Return the maximum total number of drafts in a step, before drafts are scheduled.

    It is 0 for a step with prompts that a graph can run, because no graph has both prompts and drafts. Without a graph,
    the host would take two to eight times as long as the GPU; drafts do not make up for that. It is also 0 if the ranks
    agreed on a shape without drafts.

    Args:
        budget: Maximum number of tokens in the step.
        shape: Step shape on which the expert-parallel ranks agreed; None without expert parallelism.
    """
    step = StepShape.of(requests)
    has_graph = step.num_prefill_requests > 0 and graphs is not None and graphs.hold(step)
    return 0 if has_graph or (shape is not None and shape.width == 1) else budget
