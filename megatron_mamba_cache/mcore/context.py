"""The inference context: Megatron's interface over rows that live on the host and a cache of their prefixes.

One step runs through it as: `admit` and `continue_prefill` (reserve) → `initialize_attention_state` (one buffer to the
device) → the model's forward (write) → `commit_step` (publish prompts) → sampling, verification and align copies →
`finish_step` (publish what was generated, advance, finish, preempt).
`abort_step` takes the place of the last two when anything in between fails.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import CacheConfig
from ..metrics import CacheCounters
from ..policy.admission import Refusal
from ..policy.block_growth import grow_rows, resume_rows
from ..policy.boundaries import prefill_chunk_end
from ..policy.requests import Candidate, KeptTokens, RequestSpec, RunningRequest
from ..speculation.decode_schedule import schedule_decode, schedule_plain_decode
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from ..speculation.row_progress import advance_plain_rows, advance_rows, note_hidden_states
from ..step.captured_step import EarlyStep, GraphsByShape
from ..step.run_ahead import EarlySteps, QueueState, may_run_ahead
from ..step.step import Step
from .agreement import CacheCapacity, agreed_settings, agreed_version
from .cache_memory import CacheMemory, step_memory
from .direct_requests import DirectRequests
from .host_tensors import ids_of
from .megatron_settings import megatron_settings
from .model_shape import HybridModelShape
from .ranks import OneRank, Ranks
from .row_reservations import RowReservations


class MambaCacheContext(DirectRequests):
    """Megatron's dynamic context with prefix caching for hybrid models; `StepReader` is what the model sees of it.

    The order, tokens, KV blocks and state slots of requests are kept on the host (`rows`); the device sees one packed
    buffer a step. `rows` holds admitted requests, oldest admission first, paused ones included.

    Raises:
        CacheCapacityError: If there is not enough memory.
        ValueError: If the settings do not fit the model or give too little memory.
    """

    def __init__(
        self,
        config: CacheConfig,
        shape: HybridModelShape,
        *,
        planner: DraftPlanner | NoDrafts | None = None,
        materialize_only_last_token_logits: bool = True,
        scores_prompts: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or OneRank()
        config = agreed_settings(config, self.ranks)
        shape.check(config)
        self.capacity = CacheCapacity.of(config, shape, self.ranks)
        self.cache_config = config
        self.shape = shape
        self.counters = CacheCounters()
        self.weights_version = config.weights_version
        self.rows: list[RunningRequest] = []
        self._memory: CacheMemory | None = None
        self._step: Step | None = None
        self._at_work: list[RunningRequest] = []  # the rows of the step that is being prepared or computed
        self.planner = planner or NoDrafts()
        self.scores_prompts = scores_prompts or not materialize_only_last_token_logits
        self._graphs: GraphsByShape | None = None  # over the present memory
        # Steps that depend on more than this context's rows, or are inspected, are never launched early.
        lone = not config.rank_digest_steps and self.ranks.num_stages == 1 and not self.planner.reads_hidden_states
        self._early_steps = EarlySteps(are_allowed=config.run_ahead and lone)
        self._queue = QueueState()
        with step_memory(config):
            super().__init__(**megatron_settings(config, shape, only_last_logits=materialize_only_last_token_logits))

    # Memory.

    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Allocate everything, at the start and after a suspend; do nothing if it is allocated."""
        if self.is_tensor_state_allocated:
            return
        self._memory = CacheMemory(self, self.counters, self.weights_version, RowReservations(self))
        self.block_allocator = self._memory.blocks
        self.is_tensor_state_allocated = True
        self.reset()

    def deallocate_all_tensors(self) -> None:
        """Drop all running requests and, unless its pools are resident, the cache and its memory."""
        if self.cache_config.resident_pools:
            self.reset()
        else:
            self.release_memory()

    def release_memory(self) -> None:
        """Drop all running requests, the cache, its memory, and the graphs over it."""
        self._drop_early_step()
        if self._memory is not None:
            self.counters.states_evicted += self._memory.slots.num_evicted
            self.counters.kv_blocks_evicted += self._memory.blocks.pool.num_evicted
        self._forget(self.rows)
        self.rows = []
        self._step = self._graphs = None  # graphs read and write the memory that is freed
        self._memory = None
        self.is_tensor_state_allocated = False
        self._count_rows()

    def reset(self) -> None:
        """Drop all running requests. What is cached stays: Megatron resets on idle and dummy steps too."""
        self._drop(list(self.rows))
        self._drop_early_step()
        self._step = None
        self.chunked_prefill_request_id = -1
        self.has_explicit_chunked_prefill_req = False
        self.padded_active_token_count = self.padded_active_request_count = 0
        self._count_rows()

    def flush(self, weights_version: str | None = None) -> None:
        """Make all cached prefixes unreachable, for instance because the weights changed; all ranks call it.

        Args:
            weights_version: Version of the new weights; None keeps the present one. While memory is dropped, nothing
                is cached and only the version changes.

        Raises:
            ValueError: On all ranks, if it is not Unicode text or differs between them; nothing has changed then.
        """
        self.weights_version = agreed_version(weights_version, self.weights_version, self.ranks)
        if self.is_tensor_state_allocated:
            self.cache.flush(self.weights_version)

    def adopt_weights(self, weights_version: str | None) -> None:
        """Agree on the version of the present weights, as in `flush`; what was cached with the same version stays."""
        version = agreed_version(weights_version, self.weights_version, self.ranks)
        if version != self.weights_version:
            self.flush(version)

    # Admission.

    def candidate(self, spec: RequestSpec) -> Candidate:
        """Return a request ready for `admit`."""
        return self.cache.candidate(spec)

    def admit(self, candidate: Candidate, budget: int, age: int | None = None) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in this step, or return why not.

        Args:
            budget: Tokens that this step may still compute.
            age: See `PrefixCache.admit`.
        """
        self._early_steps.refuse_rows()
        if len(self.rows) >= self.max_requests:
            return Refusal.NO_ROW
        plan = self.cache.plan(candidate, budget)
        if isinstance(plan, Refusal):
            self.counters.admissions_deferred += plan is Refusal.WAITS_FOR_PREFIX
            return plan
        row = self.cache.admit(candidate, plan, age)
        self.rows.append(row)
        self._count_rows()
        return row

    def continue_prefill(self, row: RunningRequest, budget: int) -> None:
        """Schedule the next prefill chunk of a row that is already admitted."""
        self._early_steps.refuse_rows()
        rules = self.cache.rules
        chunk_end = prefill_chunk_end(
            start=row.computed,
            prompt_len=row.spec.prompt_len,
            budget=budget,
            block_size=self.block_size_tokens,
            align=rules.align_prefill_chunks,
        )
        self.cache.schedule_chunk(row, chunk_end)
        self._count_rows()

    # One step.

    def initialize_attention_state(self, *, construct_graph_dimensions: Any = None) -> None:
        """Schedule the decode rows and their drafts, and lay the step out."""
        if construct_graph_dimensions is not None:
            raise NotImplementedError("Megatron's own CUDA graphs are not used; set CacheConfig.num_cuda_graphs")
        early = self.early_step
        if early is not None and early.is_of(self.rows):
            self._at_work, distributions = list(self.rows), schedule_plain_decode(self.rows)
        else:
            decoding = [row for row in self.rows if not row.is_paused and not row.is_prefilling]
            self._at_work = [*decoding, *(row for row in self.rows if row.is_prefilling and row.scheduled)]
            budget = self.max_tokens - self.active_token_count
            distributions = schedule_decode(decoding, self.cache, self.planner, budget, self.ranks.all_hold)
        graph = self._early_steps.take()
        if graph is None and self._graphs is not None:
            graph = self._graphs.fitting(self._at_work)
        if graph is None:
            self.lay_out(self._at_work, distributions)
        else:
            self.lay_out_graph(graph, self._at_work, distributions)

    def commit_step(self) -> None:
        """Publish what the forward wrote for prompts; call it once the forward is launched."""
        self.mamba_slot_allocator.commit_intermediate_states()

    def finish_step(self, kept: Sequence[KeptTokens]) -> Mapping[str, Tensor | None]:
        """Advance the step's rows by what was computed and kept; finished rows leave, others may pause.

        Args:
            kept: Each row's kept tokens, in order; at least one for a row that decodes.

        Returns:
            A dict of `newly_paused_request_ids` and `evict_request_ids`, int64 CPU tensors or None.
        """
        rows = self.step.rows
        if self.early_step is not None:
            ended = [row for row, new in zip(rows, kept, strict=True) if new.ends]
            return self.finish_plain_step([new.tokens[-1] for new in kept], ended)
        if self.planner.reads_hidden_states:
            note_hidden_states(rows, kept, self.step.batch.logits.starts, self.step.wanted_outputs, self.planner)
        advance_rows(rows, kept, self.cache, self.planner)
        self._drop([row for row, new in zip(rows, kept, strict=True) if new.ends])
        outcome = grow_rows(self.rows, self.cache, self.block_allocator.paused_count)
        self.rows = [row for row in self.rows if row not in outcome.evicted]
        self._forget(outcome.evicted)
        self.memory.settle(outcome.paused)
        self._step, self._at_work = None, []
        self.counters.requests_paused += len(outcome.paused)
        self.counters.requests_evicted += len(outcome.evicted)
        self._count_rows()
        return {
            "newly_paused_request_ids": ids_of(outcome.paused),
            "evict_request_ids": ids_of(outcome.evicted),
        }

    def launch_next(self, tokens: Sequence[int] | None = None) -> None:
        """Launch the step after this greedy one if `may_run_ahead` allows it.

        Args:
            tokens: [rows] new tokens of this step; None until they are read.
        """
        step, is_known = self.step, tokens is not None
        if step.graph is not None and may_run_ahead(
            step, len(self.rows), self._queue, self.planner, are_tokens_known=is_known
        ):
            self._early_steps.launch(step.graph, step.rows, tokens)
        if tokens is not None:
            self._early_steps.note_fed(tokens)

    def finish_plain_step(self, tokens: Sequence[int], ended: Sequence[RunningRequest] = ()) -> dict[str, None]:
        """Do as `finish_step` when the next step runs already, fed with `tokens` [rows]: no row grows or pauses."""
        self._early_steps.check_inputs(tokens)
        advance_plain_rows(self.step.rows, tokens, self.cache.counters, self.planner)
        self._step, self._at_work = None, []
        if ended:
            self._drop(ended)
            self._count_rows()
        return {"newly_paused_request_ids": None, "evict_request_ids": None}

    def abort_step(self) -> None:
        """Return every reservation of a failed step and drop its rows, whose live states can no longer be trusted.

        Prefilled again from the tokens that its caller knows, each request continues where it was. An early step
        that has not begun to land has not failed: its rows stay, and the next step lands it.
        """
        self._drop_between_steps([row for row in self.rows if row in self._at_work or row.scheduled])
        torch.cuda.synchronize()  # no read-back orders writes to the next step's buffer after this step's copy
        self._step, self._at_work = None, []
        self.counters.steps_aborted += 1

    def drop_rows(self, request_ids: Container[int]) -> None:
        """Drop rows between steps; what they published stays findable."""
        self._drop_between_steps([row for row in self.rows if row.request_id in request_ids])

    # Early steps.

    @property
    def early_step(self) -> EarlyStep | None:
        """The early step, launched and not landed; None if there is none."""
        return self._early_steps.launched

    def note_queue(self, *, has_waiting: bool) -> None:
        """Note whether requests wait for a row to end."""
        if has_waiting is not self._queue.has_waiting:
            self._queue = replace(self._queue, has_waiting=has_waiting)

    def note_scheduled(self, *, is_settled: bool) -> None:
        """Note whether the scheduler found no request that can join the next step."""
        if is_settled is not self._queue.is_settled:
            self._queue = replace(self._queue, is_settled=is_settled)

    def note_change(self) -> None:
        """Note that a request may now join the next step: one has come or left, or its step is booked by hand."""
        self.note_scheduled(is_settled=False)

    # Captured graphs.

    @property
    def graphs(self) -> GraphsByShape | None:
        """The steps that are captured over the present memory."""
        return self._graphs

    def drop_graphs(self) -> None:
        """Free all graphs; the results of an early step that one of them computes are copied first."""
        self._early_steps.leave_graph()
        self._graphs = None

    def adopt_graphs(self, graphs: GraphsByShape | None) -> None:
        """Compute steps with these graphs, captured over the present memory; None for no graphs."""
        self._graphs = graphs

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree."""
        self.cache.check_integrity(self.rows)

    def _drop_between_steps(self, rows: Sequence[RunningRequest]) -> None:
        self.note_change()
        self._drop(rows)
        if self.rows:
            resume_rows(self.rows, self.cache)
        self._count_rows()

    def _drop(self, rows: Sequence[RunningRequest]) -> None:
        for row in rows:
            self.cache.release(row)
            self.rows.remove(row)
        self._forget(rows)
        if not self.rows:
            self._drop_early_step()

    def _drop_early_step(self) -> None:
        self.note_change()
        self._early_steps.drop()

    def _forget(self, rows: Sequence[RunningRequest]) -> None:
        for row in rows:
            self.planner.forget(row.request_id)

    def _count_rows(self) -> None:
        """Set the counts that Megatron's engine and controller read; rows that skip the step count as paused."""
        scheduled = [row.scheduled for row in self.rows if row.is_prefilling]
        num_decoding = sum(not row.is_paused for row in self.rows if not row.is_prefilling)
        self.total_request_count = len(self.rows)
        self.num_prefill_requests = sum(num_tokens > 0 for num_tokens in scheduled)
        self.paused_request_count = self.total_request_count - self.num_prefill_requests - num_decoding
        self.active_token_count = num_decoding + sum(scheduled)
