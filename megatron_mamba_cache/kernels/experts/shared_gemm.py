"""The first product of an expert that every token goes to, beside the routing of some hundreds of tokens.

It is a grouped product of one expert in long tiles, with the activation in its launch. Up to some 700 tokens they leave
multiprocessors on which the others are routed meanwhile; with more, the routing waits for the first of them, and still
no longer than for what else would come behind it. A library's matrix product behind the routing has its activation wait
for the routed experts' second product to end, as that fills the card.
"""

from functools import cache

import torch
from torch import Tensor

from ..activations import Activation
from .gemm_tiles import tile_rows_ref
from .gemm_variants import takes_long_tiles
from .grouped_gemm import grouped_gemm
from .reference_routing import ExpertOrder

MOST_TOKENS_OVERLAPPING_ROUTING = 256
"""Tokens up to which any product beside the routing takes no time from it."""
_MOST_TOKENS = 1024


def takes_shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> bool:
    """Return whether `shared_gemm` of these tokens [tokens, inputs] is the faster way."""
    is_between = MOST_TOKENS_OVERLAPPING_ROUTING < len(x) <= _MOST_TOKENS
    is_gated = activation == "gated_silu"
    return is_between and takes_long_tiles(x, weight[None], len(x), is_gathered=False, is_gated=is_gated)


def shared_gemm(x: Tensor, weight: Tensor, activation: Activation) -> Tensor:
    """Return the activated products of all tokens with an expert's weights; see `takes_shared_gemm`.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [outputs, inputs], contiguous; [2 * outputs, inputs] for `gated_silu`: gates first.

    Returns:
        [tokens, outputs] in x's dtype.

    Raises:
        ValueError: As `grouped_gemm`.

    Reference: `grouped_gemm_ref`. CUDA-graph safe once it has run for as many tokens: no host sync, one launch.
    """
    return grouped_gemm(x, weight[None], _order_of_one(len(x), x.device), activation=activation)


@cache
def _order_of_one(num_tokens: int, device: torch.device) -> ExpertOrder:
    """Return the order of tokens that all chose one expert, with its tiles: kept, as graphs read it.

    The host knows all of it: what is kept depends on no kernel, which `compiling_ahead` would not launch.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    return ExpertOrder(tokens, tokens[:, None], starts.to(device), tile_rows_ref(starts, num_tokens).to(device))
