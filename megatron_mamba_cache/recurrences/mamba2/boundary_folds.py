"""Write states at block boundaries into slots of their own: a checkpoint and the ring entries that follow it."""

from torch import Tensor

from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ..rounded_states import RoundedStates
from .boundary_folds_portable import fold_portably
from .reference_replay import fold_boundaries_ref
from .replay_rows import BoundaryFolds, ReplayRing, check_boundary_folds, check_ring_len, check_shapes
from .replay_tiling import folds_by_products


def fold_boundaries(
    ssm_pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int, rounded: RoundedStates | None = None
) -> None:
    """Write each row's state after its first `ends` tokens into its target, all layers, in place.

    The state is the row's checkpoint and the ring entries from `folded` to `ends`, folded as `state_replay` does: at a
    multiple of the ring's length it is bit-equal to the checkpoint that a later step would write, unless it is rounded.
    A row without a target or slot writes nothing, whatever its counts. Every other slot stays as it is.

    Args:
        ssm_pools: [layers, slots, heads, d_state, head_dim]; a slot's state contiguous.
        rings: With the layers as first dimension.
        ring_len: As in `state_replay`.
        rounded: Where the states go, and whose slots the targets are; None: those of `ssm_pools`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `fold_boundaries_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(ssm_pools, rings, ring_len)
    check_boundary_folds(rows, ssm_pools.device)
    if rounded is not None:
        rounded.check(ssm_pools)
    if 0 in (rows.targets.shape[0], ssm_pools.numel()):
        return
    if not launches_kernel(ssm_pools) or not is_computed_in_fp32(rings.x, ssm_pools):
        fold_boundaries_ref(ssm_pools, rings, rows, ring_len, rounded)
        return
    if rounded is None and folds_by_products(ssm_pools, rings.x.dtype):
        from .boundary_folds_products import fold_by_products  # Gluon is imported where it is used

        fold_by_products(ssm_pools, rings, rows, ring_len)
    else:
        fold_portably(ssm_pools, rings, rows, ring_len, rounded)


def _check(ssm_pools: Tensor, rings: ReplayRing, ring_len: int) -> None:
    check_ring_len(ring_len)
    if ssm_pools.dim() != 5 or not ssm_pools[:1, :1].is_contiguous():
        raise ValueError(
            "need ssm_pools [layers, slots, heads, d_state, head_dim] of contiguous states, "
            f"found {tuple(ssm_pools.shape)} with strides {ssm_pools.stride()}"
        )
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    groups = rings.B.shape[3] if rings.B.dim() == 5 else 0
    if groups == 0 or heads % groups:
        raise ValueError(f"need B [layers, rings, capacity, groups, d_state], found {tuple(rings.B.shape)}")
    num_rings = rings.steps.shape[1]
    check_shapes(rings, (num_layers, num_rings), heads, head_dim, (groups, d_state), ssm_pools.device)
