"""Rings of a replay: the inputs of the tokens after each request's base state.

The base is the state after a request's first `folded` tokens. The ring holds the inputs of the following tokens, with
position p at index p % capacity. Later steps overwrite rejected drafts and folded tokens. To fold is to apply ring
entries to the base; a step folds up to a multiple of `ring_len`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batches import PAD_SLOT, ReplayBatch, check_vectors
from .tiling import FOLDED_ROWS

LEAST_RING_LEN = 4
_PAD = tl.constexpr(PAD_SLOT)


@dataclass(frozen=True, slots=True)
class ReplayRing:
    """Rings of one layer, or of all layers if a layer dimension precedes the others; any stride between positions.

    To fold an entry is S = exp(decay) * S + B (factor * x). Mamba2 stores its x and B, and in `steps` the factor dt and
    the decay dt * A. Gated DeltaNet stores as x the corrected values w of `gated_delta.replay.factors`, as B the keys,
    and in `steps` 1 and its log decays; heads are value heads, head_dim is value_dim, groups are key heads, and d_state
    is key_dim.

    Position p of x is at index p % x_capacity. A step appends B and `steps` before it folds, but x after it has folded,
    so x needs fewer positions.

    Args:
        x: [rings, x_capacity, heads, head_dim], contiguous within a position.
        B: [rings, capacity, groups, d_state], contiguous within a position.
        steps: [rings, capacity, 2, heads], contiguous within a position; the factor (for Mamba2 the time step after
            softplus and limits), then the decay. float32, or float64 if x is float64.
    """

    x: Tensor
    B: Tensor
    steps: Tensor

    @property
    def capacity(self) -> int:
        """Number of positions in a ring for B and the time steps."""
        return self.steps.shape[-3]

    @property
    def x_capacity(self) -> int:
        """Number of positions in a ring for x."""
        return self.x.shape[-3]


class BoundaryFolds(NamedTuple):
    """Folds that each write one request's state to a target slot; all tensors are on the device of the pools.

    Targets are distinct. A target may be the slot of the same request's base, but not of another request's.

    Args:
        slots, buffers: [requests] int32; as in `ReplayBatch`.
        folded: [requests] int32; number of tokens included in the base after the step.
        ends: [requests] int32, at least `folded`; number of tokens that the written state includes.
        targets: [requests] int32; slot that receives the state; PAD_SLOT: do not store it.
    """

    slots: Tensor
    buffers: Tensor
    folded: Tensor
    ends: Tensor
    targets: Tensor


def least_capacity(ring_len: int, max_tokens: int) -> int:
    """Return the minimum capacity of a ring: a step appends B and time steps before it folds older entries."""
    return ring_len + 2 * max_tokens - 1


def least_x_capacity(ring_len: int, max_tokens: int) -> int:
    """Return the minimum capacity of a ring for x: a step appends x after it has folded older entries."""
    return ring_len + max_tokens - 1


def check_replay_batch(rows: ReplayBatch, device: torch.device) -> None:
    """Raise a `ValueError` unless the tensors of the batch match each other and are on `device`."""
    num_rows = rows.slots.shape[0]
    vectors = {name: (getattr(rows, name), num_rows) for name in ("slots", "buffers", "folded", "computed")}
    check_vectors({"cu_tokens": (rows.cu_tokens, num_rows + 1)} | vectors, device)
    if rows.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, found {rows.max_tokens}")


def check_boundary_folds(rows: BoundaryFolds, device: torch.device) -> None:
    """Raise a `ValueError` unless the tensors match each other and are on `device`."""
    num_rows = rows.targets.shape[0]
    check_vectors({name: (values, num_rows) for name, values in rows._asdict().items()}, device)


def check_ring_len(ring_len: int) -> None:
    """Raise a `ValueError` unless the kernels support `ring_len`."""
    if ring_len < LEAST_RING_LEN or ring_len & (ring_len - 1):
        raise ValueError(f"ring_len must be a power of two and at least {LEAST_RING_LEN}, found {ring_len}")


def check_ring(ring: ReplayRing, x: Tensor, B: Tensor, ring_len: int, max_tokens: int) -> None:
    """Raise a `ValueError` unless the ring matches `x` and `B` and has space for steps of `max_tokens` per request.

    Args:
        x, B: [tokens, heads, head_dim] and [tokens, groups, d_state]; packed tokens with the ring's dtypes.
    """
    check_ring_len(ring_len)
    heads, head_dim = x.shape[1:]
    check_shapes(ring, (ring.steps.shape[0],), heads, head_dim, tuple(B.shape[1:]), x.device)
    steps = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtypes = {"x": x.dtype, "B": B.dtype, "steps": steps}
    for name, dtype in dtypes.items():
        if getattr(ring, name).dtype != dtype:
            raise ValueError(f"{name} of the ring must be {dtype}, found {getattr(ring, name).dtype}")
    needed, of_x = least_capacity(ring_len, max_tokens), least_x_capacity(ring_len, max_tokens)
    if ring.capacity < needed or ring.x_capacity < of_x:
        raise ValueError(
            f"capacity and x_capacity of the ring must be at least {needed} and {of_x} for ring_len {ring_len} and "
            f"{max_tokens} tokens per request, found {ring.capacity} and {ring.x_capacity}"
        )


def check_shapes(
    ring: ReplayRing, lead: tuple[int, ...], heads: int, head_dim: int, keys: tuple[int, ...], device: torch.device
) -> None:
    """Raise a `ValueError` unless the rings have these dimensions and device, and are contiguous within a position.

    Args:
        lead: Dimensions before the position: (rings,) or (layers, rings).
        keys: (groups, d_state).
    """
    entries = {"x": (heads, head_dim), "B": keys, "steps": (2, heads)}
    for name, entry in entries.items():
        tensor: Tensor = getattr(ring, name)
        num_positions = tensor.shape[-3] if name == "x" and tensor.dim() >= 3 else ring.capacity
        if tuple(tensor.shape) != (*lead, num_positions, *entry):
            raise ValueError(
                f"{name} of the ring must have shape {(*lead, num_positions, *entry)}, found {tuple(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"{name} of the ring must be on {device}, found {tensor.device}")
        if not tensor[(slice(1),) * (tensor.dim() - 2)].is_contiguous():
            raise ValueError(
                f"{name} of the ring must be contiguous within a position, found strides {tensor.stride()}"
            )


class KernelRing(NamedTuple):
    """`ReplayRing` as kernel arguments: `*_ring` are strides between rings, `*_stride` between positions."""

    x: Tensor
    B: Tensor
    steps: Tensor
    x_ring: int
    B_ring: int
    steps_ring: int
    x_stride: int
    B_stride: int
    steps_stride: int


class KernelRows(NamedTuple):
    """`ReplayBatch` as kernel arguments."""

    cu_tokens: Tensor
    slots: Tensor
    buffers: Tensor
    folded: Tensor
    computed: Tensor


@triton.jit
def load_request(rows, row):
    """Load slot, first packed token, number of tokens, ring, `folded` and `computed` of the request at index `row`."""
    slot = tl.load(rows.slots + row).to(tl.int64)
    start = tl.load(rows.cu_tokens + row)
    count = tl.load(rows.cu_tokens + row + 1) - start
    number = tl.load(rows.buffers + row).to(tl.int64)
    return slot, start, count, number, tl.load(rows.folded + row), tl.load(rows.computed + row)


@triton.jit
def load_request_or_tail(rows, row, num_rows, num_tokens):
    """Load slot, first packed token, end of its tokens, ring, `folded` and `computed` of the request at index `row`.

    At index `num_rows`, the tokens after the last request are returned as padding. For padding, only the slot and the
    tokens are defined.
    """
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows.slots + row, mask=is_row, other=_PAD)
    is_live = slot != _PAD
    number = tl.load(rows.buffers + row, mask=is_live, other=0).to(tl.int64)
    folded = tl.load(rows.folded + row, mask=is_live, other=0)
    computed = tl.load(rows.computed + row, mask=is_live, other=0)
    return slot, start, end, number, folded, computed


class KernelLayers(NamedTuple):
    """Strides between layers, of the pool and of the tensors of the rings."""

    pool: int
    x: int
    B: int
    steps: int


def kernel_ring(ring: ReplayRing) -> KernelRing:
    """Convert the rings of one or all layers to kernel arguments."""
    tensors = (ring.x, ring.B, ring.steps)
    return KernelRing(*tensors, *(t.stride(-4) for t in tensors), *(t.stride(-3) for t in tensors))


def kernel_rows(rows: ReplayBatch) -> KernelRows:
    """Convert a batch to kernel arguments."""
    return KernelRows(*(getattr(rows, name) for name in KernelRows._fields))


def fold_arguments(
    pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int, seed: int | None
) -> dict[str, Any]:
    """Return the arguments that are common to both fold kernels (Triton and Gluon)."""
    num_layers, _, heads, d_state, head_dim = pools.shape
    return {
        "pool": pools,
        "slot_stride": pools.stride(1),
        "seed": seed,
        "ring": kernel_ring(rings),
        "layers": KernelLayers(*(tensor.stride(0) for tensor in (pools, rings.x, rings.B, rings.steps))),
        "rows": rows,
        "num_rows": rows.targets.shape[0],
        "ROWS": FOLDED_ROWS,
        "LAYERS": num_layers,
        "HEADS": heads,
        "HEADS_A_GROUP": heads // rings.B.shape[3],
        "D_STATE": d_state,
        "HEAD_DIM": head_dim,
        "CAPACITY": rings.capacity,
        "X_CAPACITY": rings.x_capacity,
        "RING": ring_len,
    }
