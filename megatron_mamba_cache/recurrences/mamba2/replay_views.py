"""What the kernels of replayed states read of tokens, rings and rows."""

from typing import NamedTuple

from torch import Tensor

from .replay_rows import BoundaryFolds, ReplayRing, ReplayRows
from .ssm_inputs import SSMTokens


class KernelTokens(NamedTuple):
    """The kernels' view of `SSMTokens`; strides are those between tokens."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    x_stride: int
    dt_stride: int
    B_stride: int
    C_stride: int


class KernelRing(NamedTuple):
    """The kernels' view of a layer's `ReplayRing`: strides between rings, then between positions."""

    x: Tensor
    B: Tensor
    steps: Tensor
    x_ring: int
    B_ring: int
    steps_ring: int
    x_place: int
    B_place: int
    steps_place: int


class KernelRows(NamedTuple):
    """The kernels' view of `ReplayRows`."""

    cu_tokens: Tensor
    slots: Tensor
    rings: Tensor
    folded: Tensor
    computed: Tensor


class KernelFolds(NamedTuple):
    """The kernels' view of `BoundaryFolds`."""

    slots: Tensor
    rings: Tensor
    folded: Tensor
    ends: Tensor
    targets: Tensor


class KernelLayers(NamedTuple):
    """The layers' strides of the pool and of the rings."""

    pool: int
    x: int
    B: int
    steps: int


def kernel_tokens(tokens: SSMTokens) -> KernelTokens:
    """Return what the kernels read of the tokens."""
    packed = (tokens.x, tokens.dt, tokens.B, tokens.C)
    return KernelTokens(*packed, *(tensor.stride(0) for tensor in packed))


def kernel_ring(ring: ReplayRing) -> KernelRing:
    """Return what the kernels read and write of the rings; the last two strides count rings and positions."""
    tensors = (ring.x, ring.B, ring.steps)
    return KernelRing(*tensors, *(t.stride(-4) for t in tensors), *(t.stride(-3) for t in tensors))


def kernel_rows(rows: ReplayRows) -> KernelRows:
    """Return what the kernels read of the rows."""
    return KernelRows(*(getattr(rows, name) for name in KernelRows._fields))


def kernel_folds(rows: BoundaryFolds) -> KernelFolds:
    """Return what the kernels read of the rows."""
    return KernelFolds(*(getattr(rows, name) for name in KernelFolds._fields))


def kernel_layers(pools: Tensor, rings: ReplayRing) -> KernelLayers:
    """Return how far apart the layers of pools and rings lie."""
    return KernelLayers(*(tensor.stride(0) for tensor in (pools, rings.x, rings.B, rings.steps)))
