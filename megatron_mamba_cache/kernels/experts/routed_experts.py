"""The routed experts of a layer, from the choice of experts to the weighted sum."""

from collections.abc import Callable

from torch import Tensor

from ..activations import Activation
from ..kernel_launches import launches_kernel
from .expert_order import order_by_expert
from .few_tokens import FEW_TOKENS, product_of_pairs, sum_of_products
from .grouped_product import grouped_product
from .weighted_sum import weighted_sum


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
) -> Tensor:
    """Return the weighted sum of each token's experts, of those whose weights are here.

    Args:
        x: [tokens, inputs].
        ids: [tokens, top_k] int32: each token's experts; -1 for none.
        weights: [tokens, top_k] float32: what each of them weighs.
        first: [experts, inner, inputs]; [experts, 2 * inner, inputs] for gated activations, see `grouped_product`.
        second: [experts, outputs, inner].
        activation: In the first product's launch.
        apart: An activation that the first product does not have, applied to its result; None for none.
        first_expert: Number of the first expert whose weights are here.
        addend: Returns [tokens, outputs], which is added to the sum; called once all else that does not need it is
            launched, so that it may wait for another stream. None for none.

    Returns:
        [tokens, outputs] in x's dtype.

    CUDA-graph safe: no host sync; two launches for few tokens, four for more, and eight for many.
    """
    if len(ids) <= FEW_TOKENS and launches_kernel(x):
        inner = product_of_pairs(x, first, ids, activation=activation, first_expert=first_expert)
        rows = inner if apart is None else apart(inner)
        return sum_of_products(
            rows, second, ids, weights, None if addend is None else addend(), first_expert=first_expert
        )
    order = order_by_expert(ids, len(first), first_expert)
    inner = grouped_product(x, first, order, top_k=ids.shape[1], activation=activation)
    rows = grouped_product(inner if apart is None else apart(inner), second, order)
    return weighted_sum(rows, order.places, weights, None if addend is None else addend())
