"""Two toy recurrences that differ from Mamba2 as much as the engine allows.

Layers of both types alternate. The state of a `ToyMatrix` layer consists of a window of 2 inputs, a matrix and a
float64 vector; all layers share one more tensor, the last input of the first layer. The state of a `ToyVector` layer is
one vector. Tokens are computed one by one on the CPU, so results do not depend on chunks. Draft states are in slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, DecodeBatch, PrefillBatch
from megatron_mamba_cache.recurrences.interface import LayerStates, StateDtypes, StateGroup, StateTensor
from megatron_mamba_cache.recurrences.layout import SlotLayout, state_tensors
from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates, store_quantized_ref

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="toys read the numbers of a step's rows on the host")
GRAIN = 8
KEPT = 2
"""Number of inputs in a cached window."""
CHANNELS, HEADS, ROWS, LANES, MEMORIES, CELLS = 5, 2, 3, 4, 7, 6
RETENTION = 0.8
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ToyWeights:
    """Weights of a layer, without the input projection.

    Args:
        taps: [KEPT + 1, CHANNELS], oldest input first.
        decays: [HEADS].
        is_first: True for the first layer of the group, which writes the tensor that all layers share.
    """

    taps: Tensor
    decays: Tensor
    is_first: bool


class _Rows:
    """Base class that implements prefill and decode for recurrences that define the update for one token."""

    projected: ClassVar[int]
    mixed: ClassVar[int]
    grain = GRAIN

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        raise NotImplementedError

    def chunk_bytes(self, dtype: torch.dtype) -> int:
        """Return 0, because chunks need no scratch memory."""
        return 0

    def token(self, x: Tensor, state: State, weights: ToyWeights) -> tuple[State, Tensor]:
        """Apply one token; return the new state, in new tensors, and the token's output."""
        raise NotImplementedError

    def prefill(self, x: Tensor, weights: ToyWeights, states: LayerStates, rows: PrefillBatch) -> Tensor:
        """Run the recurrence over packed prompt tokens [tokens, projected]; store states at chunk and request ends."""
        y = x.new_zeros(len(x), self.mixed)
        chunk_slots, final_slots = rows.chunk_slots.tolist(), rows.final_slots.tolist()
        chunks, row_chunks = list(pairwise(rows.cu_chunks.tolist())), list(pairwise(rows.cu_request_chunks.tolist()))
        begun = [self._read(states.live, weights, slot, slot, 0) for slot in rows.initial_slots.tolist()]
        for state, (first, end), final_slot in zip(begun, row_chunks, final_slots, strict=True):
            for chunk in range(first, end):
                for position in range(*chunks[chunk]):
                    state, y[position] = self.token(x[position], state, weights)
                if chunk_slots[chunk] != PAD_SLOT and len(range(*chunks[chunk])):
                    _store(states.cached, chunk_slots[chunk], state)
            if final_slot != PAD_SLOT:
                _store(states.live, final_slot, state)
        return y

    def decode(self, x: Tensor, weights: ToyWeights, states: LayerStates, rows: DecodeBatch) -> Tensor:
        """Run the recurrence over base tokens and drafts [tokens, projected]; store the state after each token."""
        y = x.new_zeros(len(x), self.mixed)
        spans = pairwise(rows.cu_tokens.tolist())
        for (start, end), slots, accepted in zip(spans, rows.columns.tolist(), rows.accepted.tolist(), strict=True):
            if slots[0] == PAD_SLOT:
                continue
            state = self._read(states.live, weights, slots[accepted - 1], slots[0], accepted - 1)
            windows = {name: [*state[name][1:]] for name in self._windows}
            for position, slot in zip(range(start, end), slots, strict=False):
                state, y[position] = self.token(x[position], state, weights)
                for name, inputs in windows.items():
                    inputs.append(state[name][-1])
                _store(states.live, slot, {name: part for name, part in state.items() if name not in windows})
            _store(states.live, slots[0], {name: torch.stack(inputs) for name, inputs in windows.items()})
        return y

    def no_states(self, dtype: torch.dtype) -> LayerStates:
        """Return states with a single slot of zeros, for sequences that read and store no states."""
        tensors = self.tensors(StateDtypes(dtype, dtype, torch.float32))
        live = {tensor.name: torch.zeros((1, *tensor.shape), dtype=tensor.dtype) for tensor in tensors}
        return LayerStates(live, live)

    @property
    def _windows(self) -> list[str]:
        tensors = self.tensors(StateDtypes(*[torch.float32] * 3))
        return [tensor.name for tensor in tensors if tensor.motion == "window"]

    def _read(self, live: Mapping[str, Tensor], weights: ToyWeights, slot: int, window_slot: int, first: int) -> State:
        """Copy the state in `slot`; windows are read from `window_slot`, starting at `first`. Zeros for PAD_SLOT."""
        state = {}
        for tensor in self.tensors(StateDtypes(*[torch.float32] * 3)):
            if tensor.per == "slot" and not weights.is_first:
                continue
            pool, is_window = live[tensor.name], tensor.motion == "window"
            if slot == PAD_SLOT:
                state[tensor.name] = pool.new_zeros(tensor.shape)
            elif is_window:
                state[tensor.name] = pool[window_slot, first : first + tensor.shape[0]].clone()
            else:
                state[tensor.name] = pool[slot].clone()
        return state


def _store(targets: Mapping[str, Any], slot: int, state: State) -> None:
    for name, values in state.items():
        target = targets[name]
        if isinstance(target, QuantizedStates):
            store_quantized_ref(target, torch.tensor([slot], dtype=torch.int32), values[None])
        else:
            target[slot, : len(values)] = values


@dataclass(frozen=True, slots=True)
class ToyMatrix(_Rows):
    """Toy recurrence with a window, a matrix, a float64 vector, and a tensor shared by all layers."""

    name = "toy_matrix"
    projected = CHANNELS + 2 * HEADS * ROWS + HEADS * LANES + MEMORIES
    mixed = 2 * CHANNELS + HEADS * LANES + MEMORIES

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the tensors of a layer's state."""
        return (
            StateTensor("inputs", (KEPT, CHANNELS), dtypes.window, motion="window"),
            StateTensor("matrix", (HEADS, ROWS, LANES), torch.float32, is_matrix=True),
            StateTensor("memory", (MEMORIES,), torch.float64),
            StateTensor("last", (CHANNELS,), dtypes.model, per="slot"),
        )

    def token(self, x: Tensor, state: State, weights: ToyWeights) -> tuple[State, Tensor]:
        """Apply one token; return the new state, in new tensors, and the token's output."""
        sizes = [CHANNELS, HEADS * ROWS, HEADS * ROWS, HEADS * LANES, MEMORIES]
        u, k, q, v, memorized = x.split(sizes)
        inputs = torch.cat((state["inputs"], u[None].to(state["inputs"].dtype)))
        c = torch.tanh((weights.taps * inputs).sum(0))
        added = k.view(HEADS, ROWS, 1) * v.view(HEADS, 1, LANES)
        matrix = weights.decays[:, None, None] * state["matrix"] + added
        memory = RETENTION * state["memory"] + memorized.to(torch.float64)
        after = {"inputs": inputs[1:], "matrix": matrix, "memory": memory}
        last = torch.zeros_like(c)
        if weights.is_first:
            last, after["last"] = state["last"] * c, u
        read = (q.view(HEADS, ROWS, 1) * matrix).sum(1).flatten()
        return after, torch.cat((c, read, torch.tanh(memory).to(x.dtype), last))


@dataclass(frozen=True, slots=True)
class ToyVector(_Rows):
    """Toy recurrence whose state is one vector."""

    name = "toy_vector"
    projected = 3 * CELLS
    mixed = CELLS

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the only tensor of a layer's state."""
        return (StateTensor("cells", (CELLS,), torch.float32),)

    def token(self, x: Tensor, state: State, weights: ToyWeights) -> tuple[State, Tensor]:
        """Apply one token; return the new state, in new tensors, and the token's output."""
        u, gate, read = x.chunk(3)
        kept = 0.55 + 0.4 * gate
        cells = kept * state["cells"] + (1 - kept) * u
        return {"cells": cells}, cells * read


KINDS = (ToyMatrix(), ToyVector())


def toy_groups(dtype: torch.dtype = torch.bfloat16) -> tuple[StateGroup, StateGroup]:
    """Return the state groups for three toy layers of a model with this dtype."""
    many, one = (kind.tensors(StateDtypes(dtype, dtype, torch.float32)) for kind in KINDS)
    return StateGroup((0, 2), many), StateGroup((1,), one)


def toy_tensors(num_slots: int, num_drafts: int, device: str) -> tuple[Tensor, ...]:
    """Return random state tensors for `toy_groups`, with this number of slots and drafts."""
    tensors = state_tensors(SlotLayout.of(toy_groups(), num_drafts), num_slots, device)
    return tuple(tensor.normal_() for tensor in tensors)
