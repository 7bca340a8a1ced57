"""A laid-out step, as the model and Megatron's code around it read it from a context. Nothing here changes a row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext, TensorStateDeallocatedError
from torch import Tensor

from ..errors import CacheIntegrityError
from ..kernels.attention.kv_append import append_kv
from ..kernels.compilation import WATCH
from ..metrics import CacheCounters, CacheSnapshot
from ..policy.prefix_cache import PrefixCache
from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest
from ..state.mamba_slot_allocator import StateSlotAllocator
from ..state.state_pool import LayerStates
from ..step.batch import lay_out_step
from ..step.captured_step import Capture, CapturedStep, GraphsByShape
from ..step.log_probs import followed_tokens, selected_log_probs
from ..step.run_ahead import EarlySteps
from ..step.step import Step
from .cache_memory import CacheMemory
from .model_shape import HybridModelShape
from .ranks import Ranks


class LiveSlots:
    """Row index → live slot, under the name Megatron's metadata has."""

    def __init__(self, rows: list[RunningRequest]) -> None:
        self.request_to_mamba_state_idx = [row.live_slot for row in rows]


_STEP_COUNTS = (
    "active_token_count",
    "padded_active_token_count",
    "padded_active_request_count",
    "num_prefill_requests",
)
"""Counts of the step that is laid out, which Megatron reads."""


class StepReader(DynamicInferenceContext):
    """The reading half of `MambaCacheContext`, which owns the fields."""

    counters: CacheCounters
    ranks: Ranks
    shape: HybridModelShape
    rows: list[RunningRequest]
    _memory: CacheMemory | None
    _step: Step | None
    _early_steps: EarlySteps
    _graphs: GraphsByShape | None

    @property
    def memory(self) -> CacheMemory:
        """The device memory.

        Raises:
            TensorStateDeallocatedError: While the engine is suspended, and once it is closed.
        """
        if self._memory is None:
            advice = "the engine is suspended, resume it first; or it is closed, build another"
            raise TensorStateDeallocatedError(None, advice)
        return self._memory

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache over this context's blocks and slots."""
        return self.memory.prefix_cache

    @property
    def mamba_slot_allocator(self) -> StateSlotAllocator:
        """Cached states by KV block."""
        return self.memory.slot_allocator

    @property
    def step(self) -> Step:
        """The step that is laid out and has not landed."""
        if self._step is None:
            raise CacheIntegrityError("no step is laid out; call initialize_attention_state() first")
        return self._step

    @property
    def is_computing(self) -> bool:
        """True when a step is laid out and not finished."""
        return self._step is not None

    def lay_out(
        self,
        rows: Sequence[RunningRequest],
        draft_distributions: Sequence[Tensor | None] = (),
        *,
        purpose: DrawPurpose = DrawPurpose.SAMPLE,
    ) -> None:
        """Make scheduled rows the step that the model computes: pack every integer, send it in one copy.

        The results of the previous step must have been read back.

        Args:
            draft_distributions: See `Step`.
            purpose: What tokens are drawn for.
        """
        memory, draws_ratios = self.memory, any(drawn is not None for drawn in draft_distributions)
        batch = lay_out_step(rows, memory.step_buffers, memory.geometry, draws_ratios=draws_ratios, purpose=purpose)
        self.install(Step(batch, memory.attention.plan(batch.attention), draft_distributions=draft_distributions))
        self.counters.steps += 1

    def lay_out_graph(
        self, graph: CapturedStep, rows: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> None:
        """Make scheduled rows the step that a graph computes; the arguments are those of `lay_out`."""
        draws_ratios = any(drawn is not None for drawn in draft_distributions)
        batch = graph.lay_out(rows, draws_ratios=draws_ratios)
        self.install(
            Step(batch, graph=graph, draft_distributions=draft_distributions, wanted_outputs=graph.wanted_outputs)
        )
        self.counters.steps += 1
        self.counters.graph_steps += 1

    def using_cuda_graph_this_step(self) -> bool:
        """Return whether a graph computes the step that is laid out."""
        return self._step is not None and self._step.graph is not None

    def install(self, step: Step) -> None:
        """Make a step the one that the model and the sampler see, and count it as Megatron does."""
        self._step = step
        self.active_token_count, self.padded_active_token_count = step.batch.num_tokens, step.num_padded_tokens
        self.padded_active_request_count, self.num_prefill_requests = step.num_padded_rows, step.num_prefill_rows

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let the block lay out and compute padding; the step and all counts are restored afterwards."""
        self._early_steps.wait()
        step, counters, counts = self._step, self.counters, {name: getattr(self, name) for name in _STEP_COUNTS}
        self.counters = CacheCounters()  # the cache keeps counting with the previous ones
        try:
            yield
        finally:
            self._step, self.counters = step, counters
            for name, count in counts.items():
                setattr(self, name, count)

    def current_input_and_position_ids(self, *, num_warmup_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the step's token ids and positions, each [1, tokens] int64."""
        batch = self.step.batch
        return batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0)

    @property
    def token_to_pos_ids(self) -> Tensor:
        """Each token's position, [tokens] int64."""
        return self.step.batch.positions

    @property
    def token_to_position_in_request(self) -> Tensor:
        """The same as `token_to_pos_ids`."""
        return self.step.batch.positions

    def layer_states(self, layer_number: int) -> LayerStates:
        """Return the state pool of a Mamba layer, numbered from 1 over this rank's layers."""
        return self.memory.state_pool.layer(self.layer_map[layer_number - 1])

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return conv windows and SSM states of a layer over all slots; see `LayerStates` for their shapes."""
        states = self.layer_states(layer_number)
        return states.conv, states.ssm

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Write the step's keys and values, [tokens, 1, kv heads, head dim], into their blocks."""
        key_cache, value_cache, _ = self.key_value_cache(layer_number)
        step = self.step.batch
        num_tokens = step.num_tokens
        append_kv(
            key.squeeze(1)[:num_tokens],
            value.squeeze(1)[:num_tokens],
            key_cache,
            value_cache,
            step.token_blocks,
            step.token_offsets,
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attend the step's query tokens to the KV blocks of a layer; see `paged_attention_ref`."""
        return self.step.attend(q, k_cache, v_cache)

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's key blocks, value blocks and the step's block table."""
        layer = self.layer_map[layer_number - 1]
        buffer = self.memory.kv_buffer
        return buffer[0, layer], buffer[1, layer], self.step.batch.attention.block_table

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        """Return cumulative query lengths and the longest."""
        attention = self.step.batch.attention
        return attention.cu_query, max(attention.query_lens)

    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        """Return cumulative KV lengths, KV lengths and the longest."""
        attention = self.step.batch.attention
        cumulative = torch.nn.functional.pad(attention.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return cumulative, attention.kv_lengths, max(attention.kv_lens)

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Return, of logits or hidden states [1, tokens, n], those whose logits are wanted: [logits, n].

        These are each row's last token and, before it, the tokens that drafts follow. The step keeps them as
        `wanted_outputs`, and all hidden states as `scored_hidden_states` where prompts are scored.
        """
        step = self.step
        if self.materialize_only_last_token_logits and any(row.scores_prompt for row in step.rows):
            step.scored_hidden_states = logits.squeeze(0)
        step.wanted_outputs = logits.squeeze(0).index_select(0, step.batch.logits.tokens)
        return step.wanted_outputs

    def wanted_logits(self, logits: Tensor) -> Tensor:
        """Return the step's wanted logits, [logits, vocab], from those that the model computed, [1, n, vocab]."""
        return logits.squeeze(0) if self.materialize_only_last_token_logits else self.last_token_logits(logits)

    def calculate_log_probs(
        self, logits: Tensor, new_tokens: Tensor, only_last_token_logits: bool | None = False
    ) -> tuple[list[list[float] | None], Tensor]:
        """Return each row's log-probs of the tokens that follow, and all log-probs, in a step without drafts."""
        tokens = zip(self.step.rows, new_tokens.tolist(), strict=True)
        kept = [(token,) if row.samples_this_step else () for row, token in tokens]
        places = followed_tokens(self.step.batch, kept, only_last=bool(only_last_token_logits))
        log_probs = F.log_softmax(logits.squeeze(0).float(), dim=-1)
        return selected_log_probs(places, log_probs), log_probs

    def get_kvcache_utilization_stats(self) -> dict[str, float]:
        """Return the counts and shares of KV blocks in use, under the names Megatron logs them by."""
        total, available = max(self.block_allocator.total_count - 1, 1), self.block_allocator.total_avail
        active = self.block_allocator.get_active_used()
        return {
            "total_blocks": total,
            "allocated_blocks": total - available,
            "active_unique_blocks": active,
            "allocated_utilization": (total - available) / total,
            "active_utilization": active / total,
            "active_request_count": self.get_active_request_count(),
            "paused_request_count": self.paused_request_count,
            "block_count_avail": available,
            "active_token_count": self.active_token_count,
            "total_request_count": self.total_request_count,
            "max_requests": self.max_requests,
        }

    @property
    def max_blocks_of_a_request(self) -> int:
        """KV blocks that one request can have at most; known while suspended too."""
        return self.block_allocator.total_count - 1

    @property
    def memory_buffer(self) -> Tensor:
        """KV blocks: [2, layers, blocks, block size, kv heads, head dim]."""
        return self.memory.kv_buffer

    @property
    def mamba_conv_states(self) -> Tensor:
        """Conv windows of all slots: [layers, slots, window, conv dim]."""
        return self.memory.state_pool.conv

    @property
    def mamba_ssm_states(self) -> Tensor:
        """SSM states of all slots: [layers, slots, heads, d_state, head dim]."""
        return self.memory.state_pool.ssm

    @property
    def mamba_metadata(self) -> LiveSlots:
        """The live slot of each row of `rows`; between steps, draft windows are settled into it first.

        Raises:
            CacheIntegrityError: If the next step runs already, so that live states are a token ahead of their rows.
        """
        if self._early_steps.launched is not None:
            raise CacheIntegrityError(
                "the next step runs already, and live states with it; set CacheConfig(run_ahead=False) to look at them"
            )
        self.memory.settle([row for row in self.rows if not row.scheduled])
        return LiveSlots(self.rows)

    @property
    def request_to_kv_block_ids(self) -> list[list[int]]:
        """The KV blocks of each row of `rows`."""
        return [list(row.block_ids) for row in self.rows]

    def snapshot(self) -> CacheSnapshot:
        """Return counters and what every slot and block is used for."""
        memory, counters, compiled = self.memory, self.counters, WATCH.total
        captured = Capture() if self._graphs is None else self._graphs.capture
        return CacheSnapshot(
            counters=replace(
                counters,
                states_evicted=counters.states_evicted + memory.slots.num_evicted,
                kv_blocks_evicted=counters.kv_blocks_evicted + memory.blocks.pool.num_evicted,
            ),
            state_slots=memory.slots.count_by_owner(),
            kv_blocks=memory.blocks.count_by_kind(),
            num_compiled_kernels=compiled.num_kernels,
            compile_seconds=compiled.seconds,
            num_graphs=captured.num_graphs,
            capture_seconds=captured.seconds,
            graph_bytes=captured.num_bytes,
        )
