"""Inference context for Megatron's engine, controller and model, implemented with a `StepRunner`."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts.dynamic_context import (
    BlockOverflowError,
    ContextOverflowError,
    DynamicInferenceContext,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from torch import Tensor
from typing_extensions import override

from ..config import CacheConfig
from ..errors import CacheIntegrityError
from ..grammars.compiler import Grammars
from ..kernels.attention.kv_append import append_kv
from ..kernels.attention.kv_values import UNSCALED, KVScales
from ..kernels.experts.routing_rule import RouteRecord
from ..metrics import CacheCounters, CacheSnapshot
from ..policy.admission import Refusal
from ..policy.kept_tokens import KeptTokens, StepTokens
from ..policy.prefix_cache import PrefixCache
from ..policy.request_rules import RequestRules
from ..policy.requests import Candidate, RunningRequest
from ..ranks.agreement import CacheCapacity, agreed_version, resolved_settings, settings_of_peers
from ..ranks.digest import digest_of
from ..ranks.group import ExpertPeers, NoPeers, OneRank, Ranks
from ..recurrences.interface import LayerStates
from ..recurrences.mamba_slot_allocator import StateSlotAllocator, states_by_megatron
from ..recurrences.model_shape import HybridModelShape
from ..speculation.draft_planner import DraftPlanner, NoDrafts
from ..step.log_probs import followed_tokens, selected_log_probs
from ..step.memory import CacheMemory, step_memory
from ..step.memory_below import MemoryBelow
from ..step.overlapped_step import GraphsByShape, OverlappedStep
from ..step.padding_steps import end_shared_steps
from ..step.runner import StepRunner
from ..step.step import Step
from ..step.step_outcome import RunnerCount, StepCounts, ids_of
from .kv_block_allocator import KVBlockAllocator
from .megatron_settings import megatron_settings
from .request_spec import checked_spec_of, spec_of

_OVERFLOWS = {
    Refusal.TOO_MANY_REQUESTS: RequestOverflowError,
    Refusal.NO_TOKENS: TokenOverflowError,
    Refusal.NO_BLOCKS: BlockOverflowError,
}
"""Megatron's error class for each reason why a request does not fit now, if Megatron has one for this reason."""


class LiveSlots:
    """Live slots of the running requests, in the attribute that Megatron's `MambaMetadata` has for them."""

    def __init__(self, requests: Sequence[RunningRequest]) -> None:
        self.request_to_mamba_state_idx = [request.cursor.live_slot for request in requests]


class MambaCacheContext(DynamicInferenceContext):
    """Megatron's dynamic context with prefix caching for hybrid models.

    `runner` holds the requests and the current step; it exists while the device memory is allocated. Megatron's
    constructor sets the limits, and calls `allocate_all_tensors`. Megatron's engine sets the attributes in
    `SET_BY_MEGATRON` (see `megatron_settings`).

    Raises:
        CacheCapacityError: If the configured memory cannot be allocated.
        ValueError: If the settings do not fit the model, or the configured memory is too small for it.
    """

    is_tensor_state_allocated: bool
    total_request_count = RunnerCount("requests")
    paused_request_count = RunnerCount("paused")
    num_prefill_requests = RunnerCount("prefilling")
    active_token_count = RunnerCount("tokens")
    padded_active_token_count = RunnerCount("padded_tokens")
    padded_active_request_count = RunnerCount("padded_requests")

    def __init__(
        self,
        config: CacheConfig,
        shape: HybridModelShape,
        *,
        planner: DraftPlanner | NoDrafts | None = None,
        materialize_only_last_token_logits: bool = True,
        scores_prompts: bool = False,
        ranks: Ranks | None = None,
        peers: ExpertPeers | None = None,
        weights: Callable[[], bytes] | None = None,
    ) -> None:
        self.ranks = ranks or OneRank()
        self.peers = peers or NoPeers()
        config = settings_of_peers(resolved_settings(config, shape, self.ranks), self.peers)
        self.cache_config = config
        shape.check(config)
        self.capacity = CacheCapacity.of(config, shape, self.ranks)
        self.shape = shape
        self.counters = CacheCounters()
        self.grammars = Grammars(shape.vocab_size)
        self.digest = digest_of(self.ranks, config.rank_digest_steps)
        self.weights_version = config.weights_version
        self.planner = planner or NoDrafts()
        self.scores_prompts = scores_prompts or not materialize_only_last_token_logits
        self._below = MemoryBelow(config, shape, self.capacity, self.ranks, weights)
        self._runner: StepRunner | None = None
        self._slot_allocator: StateSlotAllocator | None = None
        with step_memory(config):
            super().__init__(**megatron_settings(config, shape, only_last_logits=materialize_only_last_token_logits))

    # Memory.

    @override
    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Allocate all device memory, at the start and after a suspend; do nothing if it is already allocated."""
        if self.is_tensor_state_allocated:
            return
        memory = CacheMemory(
            self.cache_config,
            self.shape,
            self.capacity,
            self.ranks,
            max_blocks=self.max_kv_block_count,
            counters=self.counters,
            weights_version=self.weights_version,
            below=self._below,
            shares_steps=self.peers.num_ranks > 1,
        )
        limits = self.capacity.num_blocks, self.capacity.num_paused_blocks
        self.block_allocator = KVBlockAllocator(self, *limits, memory.blocks)
        self._runner = runner = StepRunner(
            memory,
            self.cache_config,
            self.ranks,
            self.planner,
            self.digest,
            self.counters,
            vocab_size=self.shape.vocab_size,
            only_last_logits=self.materialize_only_last_token_logits,
            peers=self.peers,
            grammars=self.grammars,
        )
        self._slot_allocator = StateSlotAllocator(self, memory.state_pool, memory.slots, memory.boundary_rule, runner)
        self.is_tensor_state_allocated = True
        self.reset()

    @override
    def deallocate_all_tensors(self) -> None:
        """Drop all running requests; also free the cache and its memory unless `resident_pools` is set."""
        if self.cache_config.resident_pools:
            self.reset()
            end_shared_steps(self.runner)
        else:
            self.release_memory()

    def release_memory(self) -> None:
        """Drop all running requests; free the cache, its memory and the CUDA graphs that use this memory."""
        if self._runner is not None:
            end_shared_steps(self._runner)
            self._runner.close()
            self._slot_allocator = self._runner = None
        self.is_tensor_state_allocated = False

    @override
    def reset(self) -> None:
        """Drop all running requests but keep the cache: Megatron also resets on idle and dummy steps."""
        if self._runner is not None:
            self._runner.reset()
        self.chunked_prefill_request_id, self.has_explicit_chunked_prefill_req = -1, False

    def flush(self, weights_version: str | None = None) -> None:
        """Invalidate all cached prefixes, for instance because the weights changed; all ranks call it.

        Args:
            weights_version: Version of the new weights; None keeps the current version.

        Raises:
            ValueError: On all ranks, if the version cannot be encoded as UTF-8 or differs between them; nothing has
                changed then.
            CacheError: If the disk tier could not be invalidated, so that a later server may find old entries there;
                device and host memory are flushed, and the disk tier is no longer used.
        """
        self.weights_version = agreed_version(weights_version, self.weights_version, self.ranks)
        failure = self._below.flush(is_attached=self.is_tensor_state_allocated)
        if self.is_tensor_state_allocated:
            self.cache.flush(self.weights_version, self._below.epoch)
        if failure is not None:
            raise failure

    def adopt_weights(self, weights_version: str | None) -> None:
        """Set the version of the current weights on all ranks; flush the cache only if the version changes."""
        version = agreed_version(weights_version, self.weights_version, self.ranks)
        if version != self.weights_version:
            self.flush(version)

    # Own properties.

    @property
    def runner(self) -> StepRunner:
        """Step runner over the device memory; raises `TensorStateDeallocatedError` if suspended or closed."""
        if self._runner is None:
            raise _no_memory()
        return self._runner

    @property
    def counts(self) -> StepCounts:
        """Numbers of requests and tokens in the next step; zeros while the engine is suspended."""
        return StepCounts() if self._runner is None else self._runner.step_requests.counts

    @property
    def running_requests(self) -> Sequence[RunningRequest]:
        """Admitted requests in order of admission, including paused requests; empty while the engine is suspended."""
        return () if self._runner is None else self._runner.requests.oldest_first

    @property
    def is_computing(self) -> bool:
        """True from the planning of a step until its results are processed."""
        return self._runner is not None and self._runner.is_computing

    @property
    def overlapped_step(self) -> OverlappedStep | None:
        """Next step if it was launched before the host processed the current step; None otherwise."""
        return None if self._runner is None else self._runner.overlapped_steps.launched

    @property
    def graphs(self) -> GraphsByShape | None:
        """CUDA graphs captured for the current device memory; None if steps run without graphs."""
        return None if self._runner is None else self._runner.graphs

    @property
    def memory(self) -> CacheMemory:
        """Memory pools and buffers on the device; raises the same error as `runner`."""
        return self.runner.memory

    @property
    def cache(self) -> PrefixCache:
        """Prefix cache over this context's blocks and slots."""
        return self.runner.cache

    @property
    def step(self) -> Step:
        """Current step: planned, and its results have not been processed yet."""
        return self.runner.step

    @property
    def mamba_slot_allocator(self) -> StateSlotAllocator:
        """Allocator that finds the cached state of a KV block; raises the same error as `runner`."""
        if self._slot_allocator is None:
            raise _no_memory()
        return self._slot_allocator

    @property
    def max_blocks_per_request(self) -> int:
        """Maximum number of KV blocks per request; also available while the engine is suspended."""
        return self.block_allocator.total_count - 1

    @property
    def request_rules(self) -> RequestRules:
        """Rules that every request must satisfy, such as its maximum length."""
        return RequestRules(
            self.cache_config,
            self.shape.vocab_size,
            self.max_blocks_per_request,
            scores_prompts=self.scores_prompts,
            ranks_prompts=self.scores_prompts and self.materialize_only_last_token_logits,
        )

    def admit(self, candidate: Candidate, budget: int) -> RunningRequest | Refusal:
        """Admit a request to the next step, or return why it does not fit; see `StepRequests.admit`."""
        return self.runner.step_requests.admit(candidate, budget)

    def drop_requests(self, request_ids: Container[int]) -> None:
        """Drop requests between steps; their published blocks and states stay in the cache."""
        if self._runner is not None:
            self._runner.step_requests.drop(
                [request for request in self.running_requests if request.request_id in request_ids]
            )

    def note_arrival(self) -> None:
        """Record that a request has arrived; it may join the next step unless max_requests are running."""
        if self._runner is not None and not self._runner.requests.is_full:
            self._runner.queue.note_change()

    def note_change(self) -> None:
        """Record that a request may now join the next step; see `QueueState.note_change`."""
        if self._runner is not None:
            self._runner.queue.note_change()

    def snapshot(self) -> CacheSnapshot:
        """Return the counters and the current use of slots and blocks."""
        return self.runner.snapshot()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` if the records of requests, blocks and slots contradict each other."""
        self.runner.requests.check_integrity()

    # Megatron's interface for callers without an engine: one request per call, one token per request and step.

    @override
    def add_request(self, req: Any, chunk_length: int | None = None) -> None:
        """Admit a Megatron request with complete sampling parameters; `chunk_length` limits its first prefill chunk.

        Raises:
            ValueError: If the request can never run, or its id is in use.
            ContextOverflowError: If the request does not fit now; raised as Megatron's subclass for the reason, where
                one exists.
        """
        if not self.is_tensor_state_allocated:
            raise TensorStateDeallocatedError(req.request_id)
        if any(request.request_id == req.request_id for request in self.running_requests):
            raise ValueError(f"request id {req.request_id} is in use; give each request a different id")
        budget = self.runner.requests.prompt_budget if chunk_length is None else chunk_length
        scores = not self.materialize_only_last_token_logits  # without an engine, prompts are scored inside steps
        spec = checked_spec_of(req, replace(self.request_rules, scores_prompts=scores, ranks_prompts=False))
        outcome = self.admit(Candidate(spec), budget)
        if isinstance(outcome, Refusal):
            raise _OVERFLOWS.get(outcome, ContextOverflowError)(req.request_id, outcome.value)

    @override
    def check_availability(self, req: Any) -> tuple[bool, bool, bool]:
        """Return three bools: whether a request fits in `max_requests`, in the token budget, and in the KV blocks."""
        plan = self.cache.plan(Candidate(spec_of(req)), self.runner.requests.prompt_budget)
        has_room = len(self.running_requests) < self.max_requests and not self.paused_request_count
        return has_room, plan is not Refusal.NO_TOKENS, plan is not Refusal.NO_BLOCKS

    @override
    def update_requests(self, active_requests_mask: Tensor | Sequence[int], new_tokens: Tensor | Sequence[int]) -> Any:
        """Process the results of a step with one token per request; see `StepRunner.land`.

        Args:
            active_requests_mask: [requests] 0 for requests that end with their new token.
            new_tokens: [requests] sampled tokens; ignored for requests with unfinished prefill.

        Returns:
            A dict with `newly_paused_request_ids` and `evict_request_ids`, each an int64 CPU tensor or None.
        """
        entries = zip(self.step.requests, _ints(active_requests_mask), _ints(new_tokens), strict=True)
        kept = [
            KeptTokens((token,), ends=not continues) if request.samples_this_step else KeptTokens()
            for request, continues, token in entries
        ]
        held_back = self.runner.land(StepTokens.of(kept))
        return {"newly_paused_request_ids": ids_of(held_back.paused), "evict_request_ids": ids_of(held_back.evicted)}

    @override
    def calculate_log_probs(
        self, logits: Tensor, new_tokens: Tensor, only_last_token_logits: bool | None = False
    ) -> tuple[list[list[float] | None], Tensor]:
        """Return the log-probs of each request's next tokens, and those of the whole vocabulary; requires no drafts."""
        tokens = zip(self.step.requests, new_tokens.tolist(), strict=True)
        kept = [(token,) if request.samples_this_step else () for request, token in tokens]
        followed = followed_tokens(self.step.batch, kept, only_last=bool(only_last_token_logits))
        log_probs = F.log_softmax(logits.squeeze(0).float(), dim=-1)
        return selected_log_probs(followed, log_probs), log_probs

    # Properties of the step that the model and the controller read.

    @override
    def initialize_attention_state(self, *, construct_graph_dimensions: Any = None) -> None:
        """Plan the step, with the next tokens and drafts of decode requests."""
        if construct_graph_dimensions is not None:
            raise NotImplementedError("Megatron's own CUDA graphs are not used; set CacheConfig.num_cuda_graphs")
        self.runner.plan()

    @override
    def using_cuda_graph_this_step(self) -> bool:
        """Return whether the current step runs as a CUDA graph."""
        return self.is_computing and self.step.graph is not None

    @override
    def current_input_and_position_ids(self, *, num_warmup_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the token ids and positions of the step, each [1, tokens] int64."""
        batch = self.step.batch
        return batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0)

    @property
    def token_to_pos_ids(self) -> Tensor:
        """Positions of the step's tokens in their requests, [tokens] int64."""
        return self.step.batch.positions

    token_to_position_in_request = token_to_pos_ids

    def layer_states(self, layer_number: int) -> LayerStates:
        """Return a recurrent layer's states in all slots; this rank's layers are numbered from 1."""
        return self.memory.state_pool.layer(self.layer_map[layer_number - 1])

    @override
    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return a layer's conv windows and SSM states in all slots; see `Mamba2.tensors`."""
        window, state = self.layer_states(layer_number).live.values()
        return window, state

    @override
    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values, [tokens, 1, kv heads, head dim], into the KV blocks of the step's requests."""
        key_cache, value_cache, _ = self.key_value_cache(layer_number)
        batch = self.step.batch
        keys, values = (new.squeeze(1)[: batch.num_tokens] for new in (key, value))
        targets = key_cache, value_cache, batch.token_blocks, batch.token_offsets
        append_kv(keys, values, *targets, scales=self.kv_scales(layer_number))

    def route_record(self, layer_number: int) -> RouteRecord | None:
        """Return the memory for the experts of an MoE layer, numbered from 1; None if they are not recorded."""
        return self.memory.routes.record(self.step.batch, layer_number)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED) -> Tensor:
        """Compute attention between the step's query tokens and a layer's KV blocks; see `paged_attention_ref`."""
        return self.step.attend(q, k_cache, v_cache, scales)

    def kv_scales(self, layer_number: int) -> KVScales:
        """Return the scales of an attention layer's FP8 keys and values; this rank's layers are numbered from 1."""
        return self.shape.scales_of(self.layer_map[layer_number - 1])

    @override
    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's key blocks, value blocks and the step's block table."""
        layer, buffer = self.layer_map[layer_number - 1], self.memory.kv_buffer
        return buffer[0, layer], buffer[1, layer], self.step.batch.attention.block_table

    @override
    def cu_query_lengths(self) -> tuple[Tensor, int]:
        """Return the cumulative query lengths and the maximum query length."""
        attention = self.step.batch.attention
        return attention.cu_query, max(attention.query_lens)

    @override
    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        """Return the cumulative KV lengths, the KV lengths, and the maximum KV length."""
        attention = self.step.batch.attention
        cumulative = torch.nn.functional.pad(attention.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return cumulative, attention.kv_lengths, max(attention.kv_lens)

    @override
    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Return the rows of logits or hidden states from which tokens are sampled; see `Step.select_outputs`."""
        return self.step.select_outputs(logits, are_hidden_states=self.materialize_only_last_token_logits)

    # Memory and its use, under Megatron's names.

    @override
    def get_kvcache_utilization_stats(self) -> dict[str, float]:
        """Return the values that Megatron logs: KV-block use and the numbers of requests and tokens."""
        return {
            **self.block_allocator.utilization(),
            "active_request_count": self.get_active_request_count(),
            "paused_request_count": self.paused_request_count,
            "active_token_count": self.active_token_count,
            "total_request_count": self.total_request_count,
            "max_requests": self.max_requests,
        }

    @property
    def memory_buffer(self) -> Tensor:
        """KV cache, [2, layers, blocks, block size, kv heads, head dim]."""
        return self.memory.kv_buffer

    @property
    def mamba_conv_states(self) -> Tensor:
        """Conv windows in all slots, [layers, slots, window, conv dim]."""
        return states_by_megatron(self.memory.state_pool)[0]

    @property
    def mamba_ssm_states(self) -> Tensor:
        """SSM states in all slots, [layers, slots, heads, d_state, head dim]."""
        return states_by_megatron(self.memory.state_pool)[1]

    @property
    def mamba_metadata(self) -> LiveSlots:
        """Live slots of the running requests; between steps, states after accepted drafts are first copied into them.

        Raises:
            CacheIntegrityError: If the next step has been launched and has advanced the live states.
        """
        if self.overlapped_step is not None:
            raise CacheIntegrityError(
                "the next step has already advanced the live states; set CacheConfig(run_ahead=False) to read them"
            )
        self.memory.resolve([request for request in self.running_requests if not request.scheduled])
        return LiveSlots(self.running_requests)

    @property
    def request_to_kv_block_ids(self) -> list[list[int]]:
        """KV block ids of each request."""
        return [list(request.block_ids) for request in self.running_requests]


def _no_memory() -> TensorStateDeallocatedError:
    return TensorStateDeallocatedError(None, "the engine is suspended or closed; resume it, or build another")


def _ints(values: Tensor | Sequence[int]) -> list[int]:
    """Convert a tensor or sequence of bools or integers to a list of ints."""
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]
