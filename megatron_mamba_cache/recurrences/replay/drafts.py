"""Draft storage by replay: drafts need no slots, because rings keep the inputs of tokens after the live state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..batches import AlignBatch, ReplayBatch
from ..cached_form import StoredStates
from ..draft_inputs import DraftInputs
from ..interface import LiveState
from ..quantized_states import QuantizedStates
from ..stochastic_rounding import rounding_seed
from ..window import accepted_columns, columns_of
from .boundary_folds import fold_boundaries, plan_boundary_folds
from .ring import BoundaryFolds, ReplayRing

_CONV, _STATE = 0, 1  # indices of the tensors in the pool's only state group
_STEP_VALUES = 2  # number of values per head and token: the factor of x, and the log decay


class ReplayedLayer(NamedTuple):
    """Rings of one layer, used by decode and verify steps in addition to the slots.

    Args:
        ring_len: Number of tokens between two folds.
        draft_inputs: [rings, drafts, conv_dim]; continuation of the conv windows, as in `DraftInputs`. None if no
            drafts are allowed.
    """

    ring: ReplayRing
    ring_len: int
    draft_inputs: Tensor | None

    def tail(self, rows: ReplayBatch) -> DraftInputs | None:
        """Return where the conv windows of these requests continue; None without drafts."""
        return None if self.draft_inputs is None else DraftInputs(self.draft_inputs, rows.buffers)


class ReplayStorage:
    """`DraftStorage` that recomputes draft states from rings; the pool has one group, of a conv window and a matrix.

    Args:
        live: Live states of the pool.
        rings: Rings of all layers, with the layers as the first dimension.
        ring_len: Number of tokens between two folds.
        draft_inputs: [layers, rings, drafts, conv_dim]; None if no drafts are allowed.
    """

    def __init__(self, live: StoredStates, rings: ReplayRing, ring_len: int, draft_inputs: Tensor | None) -> None:
        self._live = live
        self._seed = rounding_seed(live.parts[_STATE].dtype)
        self._rings = rings
        self._ring_len = ring_len
        self._draft_inputs = draft_inputs

    def layer(self, index: int) -> ReplayedLayer:
        """Return the rings of one layer, as views."""
        rings = self._rings
        ring = ReplayRing(rings.x[index], rings.B[index], rings.steps[index])
        return ReplayedLayer(ring, self._ring_len, None if self._draft_inputs is None else self._draft_inputs[index])

    def cache_boundaries(
        self, stored: StoredStates, replay: ReplayBatch | None, rows: AlignBatch, block_size: int
    ) -> None:
        """Store the state and conv window of each request that reached a block boundary, as decided on the device."""
        assert replay is not None
        folds = plan_boundary_folds(replay, rows, self._ring_len, block_size)
        storage = stored.storage(_STATE)
        quantized = storage if isinstance(storage, QuantizedStates) else None
        fold_boundaries(self._live.parts[_STATE], self._rings, folds, self._ring_len, quantized, seed=self._seed)
        stored.align_copy(rows, block_size, tails=self._tails(replay.buffers), only_windows=True)

    def resolve(self, states: Sequence[LiveState]) -> None:
        """Fold all ring entries into the live slots, and advance the conv windows to the last accepted token."""
        folding = [state for state in states if state.folded < state.computed]
        if folding:
            lines = [(state.slot, state.buffer, state.folded, state.computed) for state in folding]
            slots, rings, folded, ends = columns_of(lines).to(self._live.device)[:, : len(lines)]
            folds = BoundaryFolds(slots, rings, folded, ends, slots)
            fold_boundaries(self._live.parts[_STATE], self._rings, folds, self._ring_len, seed=self._seed)
        shifted = [state for state in states if state.accepted > 1]
        if shifted:
            rows, buffers = accepted_columns(shifted, self._live.device)
            self._live.align_copy(rows, block_size=1, tails=self._tails(buffers), only_windows=True)

    def _tails(self, rings: Tensor) -> dict[int, DraftInputs]:
        return {} if self._draft_inputs is None else {_CONV: DraftInputs(self._draft_inputs, rings)}


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Layout of one request's ring over all recurrent layers on this rank, and of the conv inputs of its drafts.

    The conv inputs are not in the slots, so the size of a slot does not depend on the number of drafts.

    Args:
        capacity: Number of positions in a ring for B and the time steps.
        x_capacity: Number of positions in a ring for x.
        x_dtype, key_dtype: Dtypes of x and of B.
        conv_dim, conv_dtype: Number of channels and dtype of the conv inputs.
        num_drafts: Maximum number of drafts per step.
    """

    num_layers: int
    capacity: int
    x_capacity: int
    heads: int
    head_dim: int
    groups: int
    d_state: int
    x_dtype: torch.dtype
    key_dtype: torch.dtype
    conv_dim: int
    conv_dtype: torch.dtype
    num_drafts: int

    @property
    def steps_dtype(self) -> torch.dtype:
        """Dtype of the stored time steps: float64 if x is float64, else float32."""
        return torch.float64 if self.x_dtype == torch.float64 else torch.float32

    @property
    def num_bytes(self) -> int:
        """Size in bytes of one ring and its conv inputs of drafts, over all layers."""
        of_x = self.x_capacity * self.heads * self.head_dim * self.x_dtype.itemsize
        keys = self.groups * self.d_state * self.key_dtype.itemsize
        steps = _STEP_VALUES * self.heads * self.steps_dtype.itemsize
        of_drafts = self.num_drafts * self.conv_dim * self.conv_dtype.itemsize
        return self.num_layers * (of_x + self.capacity * (keys + steps) + of_drafts)

    def zeros(self, num_rings: int, device: torch.device | int | str) -> ReplayRing:
        """Return rings [layers, rings, capacity, ...] filled with zeros."""
        lead, of_x = (self.num_layers, num_rings, self.capacity), (self.num_layers, num_rings, self.x_capacity)
        return ReplayRing(
            x=torch.zeros((*of_x, self.heads, self.head_dim), dtype=self.x_dtype, device=device),
            B=torch.zeros((*lead, self.groups, self.d_state), dtype=self.key_dtype, device=device),
            steps=torch.zeros((*lead, _STEP_VALUES, self.heads), dtype=self.steps_dtype, device=device),
        )

    def draft_inputs(self, num_rings: int, device: torch.device | int | str) -> Tensor | None:
        """Return zeros [layers, rings, drafts, conv_dim] for `DraftInputs`; None if no drafts are allowed."""
        shape = (self.num_layers, num_rings, self.num_drafts, self.conv_dim)
        return torch.zeros(shape, dtype=self.conv_dtype, device=device) if self.num_drafts else None

    def storage(self, live: StoredStates, num_requests: int, fold_len: int) -> ReplayStorage:
        """Return draft storage with one ring per request, filled with zeros; a fold is due after `fold_len` tokens."""
        device = live.device
        rings, inputs = self.zeros(num_requests, device), self.draft_inputs(num_requests, device)
        return ReplayStorage(live, rings, fold_len, inputs)
