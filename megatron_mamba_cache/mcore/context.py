"""The inference context: Megatron's interface over rows that live on the host and a cache of their prefixes.

One step runs through it as: `admit` and `continue_prefill` (reserve) → `initialize_attention_state` (one buffer to the
device) → the model's forward (write) → `commit_step` (publish prompts) → sampling, verification and align copies →
`finish_step` (publish what was generated, advance, finish, preempt).
`abort_step` takes the place of the last two when anything in between fails.
"""

from collections.abc import Container, Mapping, Sequence
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
from ..step.batch import StepBatch
from .agreement import CacheCapacity, agreed_settings, agreed_version
from .cache_memory import CacheMemory, step_memory
from .captured_step import CapturedStep, GraphsByShape
from .direct_requests import DirectRequests
from .host_tensors import ids_of
from .megatron_settings import megatron_settings
from .model_shape import HybridModelShape
from .ranks import OneRank, Ranks
from .row_reservations import RowReservations
from .run_ahead import RunAhead


class MambaCacheContext(DirectRequests):
    """Megatron's dynamic context with prefix caching for hybrid models; `StepReader` is what the model sees of it.

    The order, tokens, KV blocks and state slots of requests are kept on the host (`rows`); the device sees one packed
    buffer a step. `rows` holds admitted requests, oldest admission first, paused ones among them.

    Raises:
        CacheCapacityError: On more memory than there is.
        ValueError: On settings that do not fit the model or buy too little memory.
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
        self._step: StepBatch | None = None
        self._at_work: list[RunningRequest] = []  # the rows of the step in preparation or running
        self.planner = planner or NoDrafts()
        self.draft_distributions: list[Tensor | None] = []  # of the step's decode rows
        self.wanted_outputs = self.scored_hidden_states = torch.empty(0)
        self.scores_prompts = scores_prompts or not materialize_only_last_token_logits
        self.graphs: GraphsByShape | None = None  # over the present memory
        self.graph: CapturedStep | None = None  # that the step which is laid out takes
        # Where more than this context's rows decides about a step, or looks at it, none is launched early.
        lone = not config.rank_digest_steps and self.ranks.num_stages == 1 and not self.planner.reads_hidden_states
        self.ahead = RunAhead(is_wanted=config.run_ahead and lone)
        with step_memory(config):
            super().__init__(**megatron_settings(config, shape, only_last_logits=materialize_only_last_token_logits))

    # Memory.

    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Allocate everything, at the start and after a suspend; nothing if it is there."""
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
        self.ahead.drop()
        if self._memory is not None:
            self.counters.states_evicted += self._memory.slots.num_evicted
            self.counters.kv_blocks_evicted += self._memory.blocks.pool.num_evicted
        self._forget(self.rows)
        self.rows = []
        self._step = self.graph = self.graphs = None  # graphs read and write the memory that goes
        self._memory = None
        self.is_tensor_state_allocated = False
        self._count_rows()

    def reset(self) -> None:
        """Drop all running requests. What is cached stays: Megatron resets on idle and dummy steps too."""
        self._drop(list(self.rows))
        self.ahead.drop()
        self._step = self.graph = None
        self.chunked_prefill_request_id = -1
        self.has_explicit_chunked_prefill_req = False
        self.padded_active_token_count = self.padded_active_request_count = 0
        self._count_rows()

    def flush(self, weights_version: str | None = None) -> None:
        """Make all cached prefixes unreachable, for instance because the weights changed; all ranks call it.

        Args:
            weights_version: Of the new weights; None keeps the present one. While memory is dropped nothing is cached,
                and this is all that changes.

        Raises:
            ValueError: On all ranks, if it is no text or differs between them; nothing has changed then.
        """
        self.weights_version = agreed_version(weights_version, self.weights_version, self.ranks)
        if self.is_tensor_state_allocated:
            self.cache.flush(self.weights_version)

    def adopt_weights(self, weights_version: str | None) -> None:
        """Agree on the version of the weights in place, as `flush`; what is cached of the same version stays."""
        version = agreed_version(weights_version, self.weights_version, self.ranks)
        if version != self.weights_version:
            self.flush(version)

    # Admission.

    def candidate(self, spec: RequestSpec) -> Candidate:
        """Return a request ready for `admit`."""
        return self.cache.candidate(spec)

    def admit(self, candidate: Candidate, budget: int, age: int | None = None) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in this step, or say why not.

        Args:
            budget: Tokens that this step may still compute.
            age: See `PrefixCache.admit`.
        """
        self.ahead.refuse_rows()
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
        """Schedule the next prefill chunk of a row that is admitted already."""
        self.ahead.refuse_rows()
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
        early = self.ahead.step
        if early is not None and early.is_of(self.rows):
            self._at_work, self.draft_distributions = list(self.rows), schedule_plain_decode(self.rows)
        else:
            decoding = [row for row in self.rows if not row.is_paused and not row.is_prefilling]
            self._at_work = [*decoding, *(row for row in self.rows if row.is_prefilling and row.scheduled)]
            budget = self.max_tokens - self.active_token_count
            self.draft_distributions = schedule_decode(decoding, self.cache, self.planner, budget, self.ranks.all_hold)
        draws_ratios = any(drawn_from is not None for drawn_from in self.draft_distributions)
        self.graph = self.ahead.take()
        if self.graph is None and self.graphs is not None:
            self.graph = self.graphs.fitting(self._at_work)
        if self.graph is None:
            self.lay_out(self._at_work, draws_ratios=draws_ratios)
        else:
            self.lay_out_graph(self.graph, self._at_work, draws_ratios=draws_ratios)

    def commit_step(self) -> None:
        """Publish what the forward wrote of prompts; call it once the forward is launched."""
        self.mamba_slot_allocator.commit_intermediate_states()

    def finish_step(self, kept: Sequence[KeptTokens]) -> Mapping[str, Tensor | None]:
        """Advance the step's rows by what was computed and kept; finished rows leave, others may pause.

        Args:
            kept: Of each row, in order; at least one token of a row that decodes.

        Returns:
            A dict of `newly_paused_request_ids` and `evict_request_ids`, int64 CPU tensors or None.
        """
        rows = self.step.rows
        if self.ahead.step is not None:
            ended = [row for row, new in zip(rows, kept, strict=True) if new.ends]
            return self.finish_plain_step([new.tokens[-1] for new in kept], ended)
        if self.planner.reads_hidden_states:
            note_hidden_states(rows, kept, self.step.logits.starts, self.wanted_outputs, self.planner)
        advance_rows(rows, kept, self.cache, self.planner)
        self._drop([row for row, new in zip(rows, kept, strict=True) if new.ends])
        outcome = grow_rows(self.rows, self.cache, self.block_allocator.paused_count)
        self.rows = [row for row in self.rows if row not in outcome.evicted]
        self._forget(outcome.evicted)
        self.memory.settle(outcome.paused)
        self._step, self.graph, self._at_work = None, None, []
        self.counters.requests_paused += len(outcome.paused)
        self.counters.requests_evicted += len(outcome.evicted)
        self._count_rows()
        return {
            "newly_paused_request_ids": ids_of(outcome.paused),
            "evict_request_ids": ids_of(outcome.evicted),
        }

    def run_ahead(self, tokens: Sequence[int] | None = None) -> None:
        """Launch the next step if only what this one finds is open: [rows] `tokens`, None until they are read."""
        rows = self.step.rows
        if self.graph is not None and len(rows) == len(self.rows) and self.planner.rest(rows):
            self.ahead.launch(self.graph, rows, tokens)

    def finish_plain_step(self, tokens: Sequence[int], ended: Sequence[RunningRequest] = ()) -> dict[str, None]:
        """As `finish_step`, where the next one runs already, fed [rows] `tokens`: nobody grows or pauses."""
        self.ahead.check_inputs(tokens)
        advance_plain_rows(self.step.rows, tokens, self.cache.counters, self.planner)
        self._step, self.graph, self._at_work = None, None, []
        if ended:
            self._drop(ended)
            self._count_rows()
        return {"newly_paused_request_ids": None, "evict_request_ids": None}

    def abort_step(self) -> None:
        """Return every reservation of a failed step and drop its rows, whose live states can no longer be trusted.

        Prefilled again from the tokens that its caller knows, each of them goes on where it was. A step that
        was launched early and that nothing has begun to land has not failed: its rows stay, the next step lands it.
        """
        self._drop_between_steps([row for row in self.rows if row in self._at_work or row.scheduled])
        torch.cuda.synchronize()  # nothing was read back that orders the next step's buffer after this one's copy
        self._step, self.graph, self._at_work = None, None, []
        self.counters.steps_aborted += 1

    def drop_rows(self, request_ids: Container[int]) -> None:
        """Drop rows between steps; what they published stays findable."""
        self._drop_between_steps([row for row in self.rows if row.request_id in request_ids])

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree."""
        self.cache.check_integrity(self.rows)

    def _drop_between_steps(self, rows: Sequence[RunningRequest]) -> None:
        self.ahead.is_alone = False  # there is room, or somebody less to wait behind
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
            self.ahead.drop()

    def _forget(self, rows: Sequence[RunningRequest]) -> None:
        for row in rows:
            self.planner.forget(row.request_id)

    def _count_rows(self) -> None:
        """Set the counts that Megatron's engine and controller read; rows that sit the step out count as paused."""
        scheduled = [row.scheduled for row in self.rows if row.is_prefilling]
        num_decoding = sum(not row.is_paused for row in self.rows if not row.is_prefilling)
        self.total_request_count = len(self.rows)
        self.num_prefill_requests = sum(num_tokens > 0 for num_tokens in scheduled)
        self.paused_request_count = self.total_request_count - self.num_prefill_requests - num_decoding
        self.active_token_count = num_decoding + sum(scheduled)
