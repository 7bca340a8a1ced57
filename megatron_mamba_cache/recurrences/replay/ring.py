"""Batches of replayed states: a base state, and a ring of the inputs of the tokens after it.

A request's base is the state after its first `folded` tokens. The inputs of the tokens from there on are in the
request's ring, position p at index p % capacity, where later steps overwrite rejected drafts and folded tokens. A fold
applies ring entries to the base, always up to a multiple of `ring_len`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batches import ReplayBatch, check_vectors
from .tiling import FOLDED_ROWS

LEAST_RING_LEN = 4


@dataclass(frozen=True, slots=True)
class ReplayRing:
    """One layer's rings, or with one more dimension before the others all layers'; any strides between positions.

    Position p of x is at index p % x_capacity. A step appends B and time steps before it folds, and x afterwards.

    Args:
        x: [rings, x_capacity, heads, head_dim], contiguous within a position.
        B: [rings, capacity, groups, d_state], contiguous within a position.
        steps: [rings, capacity, 2, heads], contiguous within a position; time steps after softplus and limits, and
            their products with A. float32, or float64 with float64 inputs.
    """

    x: Tensor
    B: Tensor
    steps: Tensor

    @property
    def capacity(self) -> int:
        """Positions of a ring, but for x."""
        return self.steps.shape[-3]

    @property
    def x_capacity(self) -> int:
        """Positions of x in a ring."""
        return self.x.shape[-3]


class BoundaryFolds(NamedTuple):
    """States to be written into slots of their own; all tensors on the pools' device.

    Targets are distinct; a target may be its own request's base, and is never another request's.

    Args:
        slots, buffers, folded: [requests] int32; as in `ReplayBatch`, after the step.
        ends: [requests] int32, at least `folded`; tokens that the written state covers.
        targets: [requests] int32; slot that receives the state, PAD_SLOT for none.
    """

    slots: Tensor
    buffers: Tensor
    folded: Tensor
    ends: Tensor
    targets: Tensor


def least_capacity(ring_len: int, max_tokens: int) -> int:
    """Return the positions that a ring needs: a step appends its tokens before it folds earlier ones."""
    return ring_len + 2 * max_tokens - 1


def least_x_capacity(ring_len: int, max_tokens: int) -> int:
    """Return the positions that x of a ring needs: a step appends x after it has folded."""
    return ring_len + max_tokens - 1


def check_replay_batch(rows: ReplayBatch, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of `rows` fit together and are on `device`."""
    num_rows = rows.slots.shape[0]
    vectors = {name: (getattr(rows, name), num_rows) for name in ("slots", "buffers", "folded", "computed")}
    check_vectors({"cu_tokens": (rows.cu_tokens, num_rows + 1)} | vectors, device)
    if rows.max_tokens < 1:
        raise ValueError(f"need max_tokens of at least 1, found {rows.max_tokens}")


def check_boundary_folds(rows: BoundaryFolds, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of `rows` fit together and are on `device`."""
    num_rows = rows.targets.shape[0]
    check_vectors({name: (values, num_rows) for name, values in rows._asdict().items()}, device)


def check_ring_len(ring_len: int) -> None:
    """Raise a ValueError unless the kernels support `ring_len`."""
    if ring_len < LEAST_RING_LEN or ring_len & (ring_len - 1):
        raise ValueError(f"need a ring_len that is a power of two from {LEAST_RING_LEN} on, found {ring_len}")


def check_ring(ring: ReplayRing, x: Tensor, B: Tensor, ring_len: int, max_tokens: int) -> None:
    """Raise a ValueError unless `ring` has room for a step of at most `max_tokens` tokens per request.

    Args:
        x, B: Packed values and keys as the ring holds them, [tokens, ...].
    """
    check_ring_len(ring_len)
    heads, head_dim = x.shape[1:]
    check_shapes(ring, (ring.steps.shape[0],), heads, head_dim, tuple(B.shape[1:]), x.device)
    steps = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtypes = {"x": x.dtype, "B": B.dtype, "steps": steps}
    for name, dtype in dtypes.items():
        if getattr(ring, name).dtype != dtype:
            raise ValueError(f"need {name} of the ring of {dtype}, found {getattr(ring, name).dtype}")
    needed, of_x = least_capacity(ring_len, max_tokens), least_x_capacity(ring_len, max_tokens)
    if ring.capacity < needed or ring.x_capacity < of_x:
        raise ValueError(
            f"need a ring of at least {needed} positions, of x {of_x}, for a ring_len of {ring_len} and {max_tokens} "
            f"tokens a row, found {ring.capacity} and {ring.x_capacity}"
        )


def check_shapes(
    ring: ReplayRing, lead: tuple[int, ...], heads: int, head_dim: int, keys: tuple[int, ...], device: torch.device
) -> None:
    """Raise a ValueError unless the tensors of rings have these sizes and can be read.

    Args:
        lead: Dimensions before the positions.
        keys: (groups, d_state).
    """
    entries = {"x": (heads, head_dim), "B": keys, "steps": (2, heads)}
    for name, entry in entries.items():
        tensor: Tensor = getattr(ring, name)
        num_positions = tensor.shape[-3] if name == "x" and tensor.dim() >= 3 else ring.capacity
        if tuple(tensor.shape) != (*lead, num_positions, *entry):
            raise ValueError(f"need {name} of the ring {(*lead, 'capacity', *entry)}, found {tuple(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"need {name} of the ring on {device}, found {tensor.device}")
        if not tensor[(slice(1),) * (tensor.dim() - 2)].is_contiguous():
            raise ValueError(f"need {name} of the ring contiguous within a position, found strides {tensor.stride()}")


class KernelRing(NamedTuple):
    """The kernels' view of a layer's `ReplayRing`: strides between rings, then between positions."""

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
    """The kernels' view of `ReplayBatch`."""

    cu_tokens: Tensor
    slots: Tensor
    buffers: Tensor
    folded: Tensor
    computed: Tensor


class KernelLayers(NamedTuple):
    """The layers' strides of the pool and of the rings."""

    pool: int
    x: int
    B: int
    steps: int


def kernel_ring(ring: ReplayRing) -> KernelRing:
    """Return the kernels' view of the rings; the last two strides count rings and positions."""
    tensors = (ring.x, ring.B, ring.steps)
    return KernelRing(*tensors, *(t.stride(-4) for t in tensors), *(t.stride(-3) for t in tensors))


def kernel_rows(rows: ReplayBatch) -> KernelRows:
    """Return the kernels' view of a batch."""
    return KernelRows(*(getattr(rows, name) for name in KernelRows._fields))


def fold_arguments(ssm_pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int) -> dict[str, Any]:
    """Return the arguments that both kernels of boundary folds take."""
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    return {
        "pool": ssm_pools,
        "slot_stride": ssm_pools.stride(1),
        "ring": kernel_ring(rings),
        "layers": KernelLayers(*(tensor.stride(0) for tensor in (ssm_pools, rings.x, rings.B, rings.steps))),
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
