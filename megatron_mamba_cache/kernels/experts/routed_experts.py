"""Compute the routed experts of a layer, from the routed expert ids to the weighted sum."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..activations import Activation
from ..kernel_launches import is_computed_in_fp32, launches_kernel
from .expert_order import order_by_expert
from .gemm_tiles import takes_long_tiles
from .grouped_gemm import grouped_gemm
from .overlapped_expert import MOST_TOKENS_OVERLAPPING_ROUTING, OverlappedExpert
from .pair_gemms import FEW_TOKENS, pair_gemm
from .summed_gemms import summed_gemm
from .weighted_sum import weighted_sum

_MOST_SHARED_TOKENS = 2


class SharedExpert(NamedTuple):
    """Weights of the shared expert's two GEMMs.

    Args:
        first: [inner, inputs]; for gated activations [2 * inner, inputs], gates first.
        second: [outputs, inner].
    """

    first: Tensor
    second: Tensor


def takes_shared_expert(x: Tensor) -> bool:
    """Return True if `routed_experts` should also compute the shared expert: for one or two tokens, with kernels.

    These kernels read the shared weights once per token, so with more tokens a separate GEMM is faster.
    """
    return len(x) <= _MOST_SHARED_TOKENS and launches_kernel(x) and is_computed_in_fp32(x)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    *,
    apart: Callable[[Tensor], Tensor] | None = None,
    first_expert: int = 0,
    addend: Callable[[], Tensor] | None = None,
    shared: SharedExpert | None = None,
    overlapped: OverlappedExpert | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts on this rank.

    The function is long because all of its arguments are documented.

    Args:
        x: [tokens, inputs].
        ids: [tokens, top_k] int32: the experts of each token; -1: no expert.
        weights: [tokens, top_k] float32: weight of each expert; or [tokens, top_k + 1], whose last column weighs the
            output of `shared`, or `addend` without `shared`.
        first: [experts, inner, inputs]; for gated activations [experts, 2 * inner, inputs], as in `grouped_gemm`.
        second: [experts, outputs, inner].
        activation: Activation that is fused into the first GEMM.
        apart: Function that applies an activation to the first GEMM's result; None: `activation` is the only one.
        first_expert: Global index of the first expert on this rank.
        addend: Function that returns [tokens, outputs] to add to the sum. It is called after all independent work has
            been launched, so it may wait for another stream. None: nothing to add.
        shared: Weights of the shared expert, whose output is added; requires `takes_shared_expert(x)` and no `apart`.
        overlapped: Shared expert to launch where it delays other kernels least; its output is not added. None: nothing
            to launch.

    Returns:
        [tokens, outputs] in the dtype of `x`.

    Raises:
        ValueError: If `shared` is given together with `apart` or with too many tokens.

    CUDA-graph safe: no host sync; two launches for few tokens, four to eight for more.
    """
    if shared is not None and (apart is not None or not takes_shared_expert(x)):
        raise ValueError(
            f"the shared expert can be fused only for up to {_MOST_SHARED_TOKENS} tokens without a separate "
            f"activation, found {len(x)} tokens in {x.dtype}; compute it separately and pass its output as addend"
        )
    is_gated = activation == "gated_silu"
    fills_card = takes_long_tiles(x, first, ids.numel(), is_gathered=True, is_gated=is_gated)
    comes_last = fills_card and len(x) > MOST_TOKENS_OVERLAPPING_ROUTING
    if overlapped is not None and not comes_last:
        overlapped.launch(after_queued=False)
    if len(ids) <= FEW_TOKENS and launches_kernel(x):
        first_shared, second_shared = (None, None) if shared is None else shared
        inner, inner_shared = pair_gemm(x, first, ids, first_shared, activation=activation, first_expert=first_expert)
        return summed_gemm(
            inner if apart is None else apart(inner),
            second,
            ids,
            weights,
            None if addend is None else addend(),
            shared_rows=None if shared is None else inner_shared,
            shared_weight=second_shared,
            first_expert=first_expert,
            follows_pairs=apart is None and addend is None,
        )
    order = order_by_expert(ids, len(first), first_expert)
    if overlapped is not None and comes_last:
        order.tiles  # noqa: B018 (launches the tiling kernel before the shared expert)
        overlapped.launch(after_queued=True)
    inner = grouped_gemm(x, first, order, top_k=ids.shape[1], activation=activation)
    follows_first = fills_card and apart is None
    rows = grouped_gemm(inner if apart is None else apart(inner), second, order, follows_first=follows_first)
    return weighted_sum(rows, order.positions, weights, None if addend is None else addend())
