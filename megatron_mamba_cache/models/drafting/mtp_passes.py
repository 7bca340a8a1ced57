"""Passes of an MTP head that draft tokens one after another, as CUDA graphs where they are captured.

The host sends the position of each request in one copy. A pass then computes one token of each request and
leaves the inputs of the next pass on the device, so the host reads nothing before the last pass. One graph per batch
size holds a pass, and is replayed once for each draft.

After a captured step with drafts, the passes may also start from the step's outcome on the device. One more graph per
graph of such steps holds all these passes, and writes the drafts to the inputs of the next step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.interface import AttentionRows, CapturedAttention, PlannedAttention
from ...kernels.sampling.draft_passes import DraftRows, advance_drafts
from ...kernels.sampling.followed_steps import begin_drafts, follow_step
from ...mcore.mtp_chain import MTPBatch, MTPChain
from ...mcore.mtp_head import MTPStep
from ...policy.requests import RunningRequest
from ...recurrences.batches import PAD_SLOT
from ...recurrences.hidden_states import HIDDEN, last_hidden_states
from ...step.batch import write_block_table
from ...step.buffers import StepBuffers, StepLimits
from ...step.memory import CacheMemory
from ...step.overlapped_step import CapturedStep
from ...step.recorder import Recorder


@dataclass(frozen=True, slots=True)
class _FollowingPasses:
    """Recorded passes after the steps of one graph, and the next step's inputs; see `_CapturedPasses`."""

    attention: CapturedAttention
    rotary: Tensor | None
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _CapturedPasses:
    """Recorded passes of one batch size: `begin` reads the hidden states, `repeat` computes one draft per request.

    Args:
        rotary: Table that the graphs read; held here so that it is not freed, as Megatron caches only few tables.
    """

    attention: CapturedAttention
    rotary: Tensor | None
    begin: Callable[[], None]
    repeat: Callable[[], None]


class MTPPasses:
    """Passes over the memory of one engine.

    Args:
        chain: The head, whose context has this memory.
        memory: Memory with the KV blocks and state slots.
        max_drafts: Maximum number of drafts of a request.
    """

    def __init__(self, chain: MTPChain, memory: CacheMemory, max_drafts: int) -> None:
        limits, device = memory.step_buffers.limits, memory.state_pool.device
        rows = limits.max_requests
        self.memory = memory
        self._chain = chain
        self._longest = chain.context.max_sequence_length
        self._buffers = StepBuffers(
            StepLimits(rows, rows, max_chunks=0, max_blocks=limits.max_blocks, block_size=limits.block_size), device
        )
        self._drafts = torch.zeros(rows, max_drafts, dtype=torch.int64, device=device)
        self._hidden = torch.zeros_like(memory.state_pool.hidden_states.live[HIDDEN][:1, 0]).repeat(rows, 1)
        self._captured: dict[int, _CapturedPasses] = {}
        self._following: WeakKeyDictionary[CapturedStep, _FollowingPasses] = WeakKeyDictionary()

    def rehearse(self, sizes: Iterable[int]) -> None:
        """Launch the kernels of passes of these batch sizes once, with padding requests."""
        for size in sizes:
            self._send((), (), size)
            self._read_hidden_states(size)
            self._compute(size, self.memory.attention.plan(self._attention_rows(size, [1] * size)))

    def capture(self, recorder: Recorder, sizes: Iterable[int]) -> None:
        """Record passes for these batch sizes."""
        for size in sorted(sizes, reverse=True):  # largest first, so that smaller graphs reuse its memory
            self._send((), (), size)
            longest = self._attention_rows(size, [self._longest] * size)
            attention = self.memory.attention.capture(longest)

            def begin(size: int = size) -> tuple[Tensor, ...]:
                self._read_hidden_states(size)
                return ()

            def repeat(size: int = size, attention: CapturedAttention = attention) -> tuple[Tensor, ...]:
                self._compute(size, attention.begin())
                return ()

            self._captured[size] = _CapturedPasses(
                attention, self._chain.rotary(self._longest), recorder.record(begin)[1], recorder.record(repeat)[1]
            )

    def capture_following(self, recorder: Recorder, graphs: Iterable[CapturedStep]) -> None:
        """Record passes that follow the steps of these graphs, which have drafts."""
        for graph in sorted(graphs, key=lambda graph: -graph.shape.num_requests):
            size = graph.shape.num_requests
            attention = self.memory.attention.capture(self._attention_rows(size, [self._longest] * size))

            def follow(graph: CapturedStep = graph, attention: CapturedAttention = attention) -> tuple[Tensor, ...]:
                self._follow(graph, attention)
                return ()

            replay = recorder.record(follow)[1]
            self._following[graph] = _FollowingPasses(attention, self._chain.rotary(self._longest), replay)

    def can_follow(self, graph: CapturedStep) -> bool:
        """Return whether passes after steps of this graph are captured."""
        return graph in self._following

    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        """Draft for the next step from the outcome of the running step of this graph, and complete the next step."""
        following, size, steps = self._following[graph], graph.shape.num_requests, self.memory.step_buffers
        if following.attention.is_planned:
            kv_lens = steps.host("kv_lengths")[:size].tolist()  # in the same block as those of all passes
            rows = replace(self._attention_rows(size, kv_lens), host_block_table=steps.host_block_table()[:size])
            following.attention.plan_again(rows)
        following.replay()

    def _follow(self, graph: CapturedStep, attention: CapturedAttention) -> None:
        """Compute all passes after a step, and replace the step's inputs by those of the next step."""
        size, geometry, step = graph.shape.num_requests, self.memory.geometry, self.memory.step_buffers
        self._buffers.device_block_table()[:size].copy_(step.device_block_table()[:size])
        followed = step.followed_rows(size, graph.shape.num_tokens)
        begin_drafts(graph.outcome, followed, self._rows(size))
        slots = step.device_columns()[:size, 0]
        live = self.memory.state_pool.hidden_states.live[HIDDEN]
        self._hidden[:size] = last_hidden_states(live, slots, graph.outcome[:, 0])
        for _ in range(graph.shape.width - 1):
            self._compute(size, attention.begin())  # a new one for each pass, as it may read the lengths once
        follow_step(graph.outcome, self._drafts[:size], followed, geometry.block_size)

    def draft(
        self,
        requests: Sequence[RunningRequest],
        lengths: Sequence[int],
        least_size: int = 0,
        num_passes: int | None = None,
    ) -> Tensor:
        """Return the most likely next tokens of requests, [requests, most of `lengths`] int64 on the device.

        The newest token of each request is at position `computed`. Entries are written from there on.

        Args:
            least_size: Minimum number of requests in a pass, padding included.
            num_passes: Number of passes, at least the most of `lengths`, which is the default.
        """
        number = len(requests)
        least_size = max(number, least_size)
        size = min((size for size in self._captured if size >= least_size), default=least_size)
        captured = self._captured.get(size)
        self._send(requests, lengths, size)
        if captured is None:
            self._read_hidden_states(size)
        else:
            captured.begin()
        longest = [(request.computed, length) for request, length in zip(requests, lengths, strict=True)]
        longest += [(0, 1)] * (size - number)
        for index in range(max(lengths) if num_passes is None else num_passes):
            rows = self._attention_rows(size, [newest + min(index + 1, length) for newest, length in longest])
            if captured is None:
                self._compute(size, self.memory.attention.plan(rows))
            else:
                captured.attention.plan_again(rows)
                captured.repeat()
        return self._drafts[:number, : max(lengths, default=0)].contiguous()

    def _send(self, requests: Sequence[RunningRequest], lengths: Sequence[int], size: int) -> None:
        """Write the inputs of the first pass, with padding up to `size` requests, and copy them to the device."""
        buffers, geometry, number = self._buffers, self.memory.geometry, len(requests)
        buffers.begin()
        for name, values in (
            ("live_slots", [request.cursor.live_slot for request in requests]),
            ("accepted", [request.cursor.accepted for request in requests]),
            ("computed", [request.computed for request in requests]),
            ("num_drafts", lengths),
        ):
            buffers.host(name)[:number] = values
            buffers.host(name)[number:size] = {"live_slots": PAD_SLOT, "accepted": 1}.get(name, 0)
        buffers.host("scheduled")[:size] = 0
        newest = buffers.host("computed")[:size]
        table = buffers.host_block_table()
        table[number:size, 0] = geometry.dummy_block
        write_block_table(requests, buffers)
        tokens = [request.tokens(request.computed, request.computed + 1)[0] for request in requests]
        buffers.host_int64("token_ids")[:number] = tokens
        buffers.host_int64("token_positions")[:size] = newest
        rows, offsets = np.arange(size), newest % geometry.block_size
        buffers.host("token_blocks")[:size] = table[rows, newest // geometry.block_size]
        buffers.host("token_offsets")[:size] = offsets
        buffers.host("kv_lengths")[:size] = newest + 1
        buffers.host("last_block_lens")[:size] = offsets + 1
        buffers.host("cu_query")[: size + 1] = np.arange(size + 1)
        buffers.send(size)

    def _read_hidden_states(self, size: int) -> None:
        live, device = self.memory.state_pool.hidden_states.live[HIDDEN], self._buffers.device
        self._hidden[:size] = last_hidden_states(live, device("live_slots")[:size], device("accepted")[:size])

    def _compute(self, size: int, attend: PlannedAttention) -> None:
        """Compute one pass: a draft of each request, from its last token and the hidden state before it."""
        rows = self._rows(size)
        batch = MTPBatch(
            size,
            rows.positions,
            rows.token_blocks,
            rows.token_offsets,
            self._attention_rows(size, [self._longest] * size),
        )
        step = MTPStep(batch, self._chain.kv_cache, attend, self._longest)
        hidden = self._chain.outputs(rows.token_ids, self._hidden[:size], step)
        self._hidden[:size] = hidden
        advance_drafts(self.most_likely(hidden, rows), self._drafts[:size], rows)

    def most_likely(self, hidden: Tensor, rows: DraftRows) -> Tensor:
        """Return the draft, [requests] int64, that follows the tokens of a pass, from their outputs."""
        return self._chain.most_likely(hidden)

    def _rows(self, size: int) -> DraftRows:
        buffers, geometry = self._buffers, self.memory.geometry
        device = buffers.device
        return DraftRows(
            token_ids=buffers.device_int64("token_ids")[:size],
            positions=buffers.device_int64("token_positions")[:size],
            token_blocks=device("token_blocks")[:size],
            token_offsets=device("token_offsets")[:size],
            kv_lengths=device("kv_lengths")[:size],
            last_block_lens=device("last_block_lens")[:size],
            num_found=device("scheduled")[:size],
            newest=device("computed")[:size],
            num_drafts=device("num_drafts")[:size],
            block_table=buffers.device_block_table()[:size],
            dummy_block=geometry.dummy_block,
            block_size=geometry.block_size,
        )

    def _attention_rows(self, size: int, kv_lens: Sequence[int]) -> AttentionRows:
        buffers = self._buffers
        return AttentionRows(
            cu_query=buffers.device("cu_query")[: size + 1],
            kv_lengths=buffers.device("kv_lengths")[:size],
            block_table=buffers.device_block_table()[:size],
            query_lens=(1,) * size,
            kv_lens=tuple(kv_lens),
            host_block_table=buffers.host_block_table()[:size],
            num_decode_requests=size,
            last_block_lens=buffers.device("last_block_lens")[:size],
        )
