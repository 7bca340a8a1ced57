"""The routed experts of a layer, from the choice of experts to the weighted sum."""

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
    """The weights of the expert that every token goes to; its activation is that of the others.

    Args:
        first: [inner, inputs]; [2 * inner, inputs] for gated activations, the gates first.
        second: [outputs, inner].
    """

    first: Tensor
    second: Tensor


def takes_shared_expert(x: Tensor) -> bool:
    """Return whether the launches of routed experts compute the shared one as well: for hardly any tokens.

    They read its weights once a token; a product of its own reads them once.
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
    beside: OverlappedExpert | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, of those whose weights are here.

    Long because of its contract.

    Args:
        x: [tokens, inputs].
        ids: [tokens, top_k] int32: each token's experts; -1 for none.
        weights: [tokens, top_k] float32: what each of them weighs; or [tokens, top_k + 1], whose last one weighs
            the shared expert, given as `shared` or as `addend`.
        first: [experts, inner, inputs]; [experts, 2 * inner, inputs] for gated activations, see `grouped_gemm`.
        second: [experts, outputs, inner].
        activation: In the first product's launch.
        apart: An activation that the first product does not have, applied to its result; None for none.
        first_expert: Number of the first expert whose weights are here.
        addend: Returns [tokens, outputs], which is added to the sum; called once all else that does not need it is
            launched, so that it may wait for another stream. None for none.
        shared: An expert of all tokens, whose product is added; only where `takes_shared_expert`, and
            without an activation `apart`.
        beside: What to launch in between, where it takes least time; None for nothing. Its result is not added.

    Returns:
        [tokens, outputs] in x's dtype.

    Raises:
        ValueError: If a shared expert is given that the launches do not compute.

    CUDA-graph safe: no host sync; two launches for few tokens, four to eight for more.
    """
    if shared is not None and (apart is not None or not takes_shared_expert(x)):
        raise ValueError(f"the shared expert of {len(x)} tokens is a product of its own; pass its result as addend")
    is_gated = activation == "gated_silu"
    fills_card = takes_long_tiles(x, first, ids.numel(), is_gathered=True, is_gated=is_gated)
    comes_behind = fills_card and len(x) > MOST_TOKENS_OVERLAPPING_ROUTING
    if beside is not None and not comes_behind:
        beside.launch(behind=False)
    if len(ids) <= FEW_TOKENS and launches_kernel(x):
        return _of_few_tokens(x, ids, weights, first, second, activation, apart, first_expert, addend, shared)
    order = order_by_expert(ids, len(first), first_expert)
    if beside is not None and comes_behind:
        order.tiles  # noqa: B018 (its launch comes first)
        beside.launch(behind=True)
    inner = grouped_gemm(x, first, order, top_k=ids.shape[1], activation=activation)
    follows_first = fills_card and apart is None
    rows = grouped_gemm(inner if apart is None else apart(inner), second, order, follows_first=follows_first)
    return weighted_sum(rows, order.places, weights, None if addend is None else addend())


def _of_few_tokens(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    activation: Activation,
    apart: Callable[[Tensor], Tensor] | None,
    first_expert: int,
    addend: Callable[[], Tensor] | None,
    shared: SharedExpert | None,
) -> Tensor:
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
