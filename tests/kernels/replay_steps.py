"""Decode steps of requests with replayed states and random drafts, in poisoned pools and rings."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, ReplayBatch
from megatron_mamba_cache.recurrences.replay.ring import (
    BoundaryFolds,
    ReplayRing,
    least_capacity,
    least_x_capacity,
)
from tests.kernels.delta_steps import DeltaSteps
from tests.kernels.packed_batches import poisoned_pool, same_bits
from tests.kernels.ssm_steps import SSMShape, SSMSteps

Op = Callable[[Any, Any, Tensor, ReplayRing, ReplayBatch, int], Tensor]
Steps = SSMSteps | DeltaSteps


def int32(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def poisoned_ring(
    num_rings: int,
    ring_len: int,
    max_tokens: int,
    shape: SSMShape,
    device: str,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    spare: tuple[int, int] = (0, 0),
) -> ReplayRing:
    """Return replay rings filled with NaN, with more positions than needed, and even more for x.

    Args:
        dtypes: Of x and of B.
    """
    capacity, of_x = least_capacity(ring_len, max_tokens) + spare[0], least_x_capacity(ring_len, max_tokens) + spare[1]

    def random_values(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rings, *sizes), float("nan"), dtype=dtype, device=device)

    return ReplayRing(
        random_values(of_x, shape.heads, shape.head_dim, dtype=dtypes[0]),
        random_values(capacity, shape.groups, shape.d_state, dtype=dtypes[1]),
        random_values(capacity, 2, shape.heads, dtype=torch.float64 if dtypes[0] == torch.float64 else torch.float32),
    )


def ring_tensors(ring: ReplayRing) -> tuple[Tensor, Tensor, Tensor]:
    return ring.x, ring.B, ring.steps


def copied(ring: ReplayRing) -> ReplayRing:
    return ReplayRing(*(tensor.clone() for tensor in ring_tensors(ring)))


@dataclass
class Request:
    """A request: its text, whose first `computed` tokens are verified, and the slot of its state."""

    text: Any  # Steps
    slot: int
    ring: int
    computed: int = 0
    folded: int = 0
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """Tokens of a request in one step: the base token and `num_drafts` drafts, of which `kept` are accepted.

    A turn without a request is padding with the same number of tokens.
    """

    request: Request | None
    num_drafts: int = 0
    kept: int = 1


class ReplayedRequests:
    """Requests, their pool and their rings; everything not yet written is NaN."""

    def __init__(
        self,
        texts: Sequence[Steps],
        shape: SSMShape,
        ring_len: int,
        max_tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        spare: tuple[int, int] = (0, 0),
        starts: Sequence[int] | None = None,
    ) -> None:
        self.ring_len, self.max_tokens = ring_len, max_tokens
        device = str(texts[0].values.device)
        # Slot and ring indices differ from the request's index.
        number = len(texts)
        self.requests = [
            Request(text, slot=2 * i + 1, ring=number - 1 - i, computed=start, folded=start)
            for i, (text, start) in enumerate(zip(texts, starts or [0] * number, strict=True))
        ]
        slots = [request.slot for request in self.requests]
        self.pool = poisoned_pool((2 * number + 1, *shape.state), dtype, device, slots)
        self.initial = {request.slot: self.pool[request.slot].clone() for request in self.requests}
        dtypes = (texts[0].ring_dtype, texts[0].values.dtype)
        self.ring = poisoned_ring(number + 1, ring_len, max_tokens, shape, device, dtypes, spare)

    def rows(self, turns: Sequence[Turn]) -> ReplayBatch:
        """Pack the turns into a batch; the counts of padding requests are arbitrary."""
        device = str(self.pool.device)
        cu_tokens = [0, *accumulate(1 + turn.num_drafts for turn in turns)]
        padding = Request(self.requests[0].text, PAD_SLOT, ring=1000, computed=77, folded=1)
        requests = [turn.request or padding for turn in turns]
        columns = ([getattr(request, name) for request in requests] for name in ("slot", "ring", "folded", "computed"))
        return ReplayBatch(
            int32(cu_tokens, device), *(int32(column, device) for column in columns), max_tokens=self.max_tokens
        )

    def step(self, op: Op, turns: Sequence[Turn], num_tail: int = 0) -> Tensor:
        """Run a step with NaN in rejected drafts, padding and tail, check untouched memory, and accept tokens."""
        parts = []
        for turn in turns:
            length = 1 + turn.num_drafts
            request = turn.request
            first = 0 if request is None else request.computed
            part = (request or self.requests[0]).text[first : first + length]
            part.poison(slice(turn.kept if request else 0, None))
            parts.append(part)
        tail = self.requests[0].text[:num_tail]
        tail.poison(slice(None))
        packed = tail.joined_with(parts, [])
        rows = self.rows(turns)
        pool, ring = self.pool.clone(), copied(self.ring)
        y = op(packed.tokens, packed.weights, self.pool, self.ring, rows, self.ring_len)
        self._check_untouched(turns, pool, ring)
        for turn, first in zip(turns, rows.cu_tokens.tolist(), strict=False):
            if turn.request is None:
                assert (y[first : first + 1 + turn.num_drafts] == 0).all()
            else:
                turn.request.outputs.append(y[first : first + turn.kept])
                turn.request.folded = max(turn.request.folded, turn.request.computed // self.ring_len * self.ring_len)
                turn.request.computed += turn.kept
        assert (y[y.shape[0] - num_tail :] == 0).all()
        return y

    def decode(self, op: Op, draw: random.Random, length: int, num_drafts: int) -> None:
        """Decode all requests to `length` tokens, in random batches with random drafts and padding."""
        while open_requests := [request for request in self.requests if request.computed < length]:
            turns = []
            for request in draw.sample(open_requests, draw.randint(1, len(open_requests))):
                fed = draw.randint(0, num_drafts)
                turns.append(Turn(request, fed, draw.randint(1, min(1 + fed, length - request.computed))))
                if draw.random() < 0.2:
                    turns.append(Turn(None, draw.randint(0, num_drafts)))
            self.step(op, turns, num_tail=draw.randint(0, 2))

    def assert_match_the_recurrence(self, *, rtol: float, atol: float) -> None:
        """Check all outputs and stored states against the recurrence in float64."""
        for request in self.requests:
            found = torch.cat(request.outputs)
            start = request.computed - len(found)
            expected, states = request.text[start : request.computed].recurrence(self.initial[request.slot])
            torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
            stored = self.pool[request.slot].double()
            torch.testing.assert_close(stored, states[request.folded - start], rtol=rtol, atol=atol)

    def _check_untouched(self, turns: Sequence[Turn], pool: Tensor, ring: ReplayRing) -> None:
        written, appended = set(), set()
        for turn in turns:
            request = turn.request
            if request is not None:
                if request.computed // self.ring_len * self.ring_len > request.folded:
                    written.add(request.slot)
                positions = range(request.computed, request.computed + 1 + turn.num_drafts)
                appended |= {(request.ring, position) for position in positions}
        for slot in range(pool.shape[0]):
            assert slot in written or same_bits(pool[slot], self.pool[slot]), f"slot {slot} changed"
        for before, after in zip(ring_tensors(ring), ring_tensors(self.ring), strict=True):
            for number in range(before.shape[0]):
                overwritten = {
                    position % before.shape[1] for ring_number, position in appended if ring_number == number
                }
                kept = [index for index in range(before.shape[1]) if index not in overwritten]
                assert same_bits(before[number, kept], after[number, kept]), f"ring {number} changed"

    def folds(self, targets: Sequence[int], ends: Sequence[int] | None = None) -> BoundaryFolds:
        """Return the folds that write each request's state at `ends`, or after its last token, to `targets`."""
        device = str(self.pool.device)
        columns = ([getattr(request, name) for request in self.requests] for name in ("slot", "ring", "folded"))
        ends = ends or [request.computed for request in self.requests]
        return BoundaryFolds(
            *(int32(column, device) for column in columns), int32(ends, device), int32(targets, device)
        )


def layered(pool: Tensor, ring: ReplayRing) -> tuple[Tensor, ReplayRing]:
    """Return a pool and rings that are views of one layer among several."""
    return pool[None], ReplayRing(*(tensor[None] for tensor in ring_tensors(ring)))
