"""The shared expert of a few hundred tokens, computed beside the products of the others, in a graph.

Those products take the time of reading their weights, and need not all multiprocessors for it. While tokens are routed,
a matrix product of cuBLAS would hold the routing's small programs up, as its own take whole multiprocessors; and its
clusters of programs find no place beside the others' products. So it is computed as if it were one of the experts, one
that all tokens go to: by as many programs as there are multiprocessors left.
"""

import torch
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import num_multiprocessors
from .beside_experts import BesideExperts
from .few_tokens import SharedExpert
from .grouped_product import grouped_product
from .product_forms import takes_long_tiles
from .reference_routing import ExpertOrder

_MOST_TOKENS = 1024
"""Tokens up to which products take the time of reading their weights."""
SPARE = 16
"""Multiprocessors that they leave to the shared expert."""


def runs_beside_products(x: Tensor, first: Tensor, num_pairs: int, shared: SharedExpert) -> bool:
    """Return whether `shared_expert_beside` takes less time than a product of its own.

    Args:
        x: [tokens, inputs].
        first: The first weights of the experts.
        num_pairs: Pairs of a token and one of them.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return False
    # On its part of the multiprocessors it ends with the others, if it does not take much more work than reading them.
    if len(x) > _MOST_TOKENS or len(x) * shared.first.numel() > SPARE * first.numel():
        return False
    # The second product reads rows that the first one writes, which are aligned if its inputs' number is.
    return takes_long_tiles(x, first, num_pairs, is_gathered=True) and all(
        takes_long_tiles(x, weight[None], len(x), is_gathered=False) and weight.shape[1] % 64 == 0 for weight in shared
    )


def shared_expert_beside(x: Tensor, shared: SharedExpert, activation: Activation) -> BesideExperts:
    """Begin to compute [tokens, outputs] on a stream of its own; all else that is on its way comes first."""
    spare = num_multiprocessors(x.device) - SPARE

    def compute() -> Tensor:
        whole = torch.arange(0, 2 * len(x), len(x), dtype=torch.int32, device=x.device)
        order = ExpertOrder(whole.new_empty(len(x)), whole.new_empty(0), whole)  # the tokens as they are
        inner = grouped_product(x, shared.first[None], order, activation=activation, spare=spare)
        return grouped_product(inner, shared.second[None], order, follows_first=True, spare=spare)

    beside = BesideExperts(compute, x.device, gives_way=True)
    beside.launch()
    return beside
