"""Settings for routing: the top-k rule for experts, and the gate of the shared expert."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class SharedGate(NamedTuple):
    """Gate of the shared expert: sigmoid(x @ weight.T), where logit and result are rounded to the dtype of `x`.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [1, inputs], contiguous, in the dtype of `x`.
    """

    x: Tensor
    weight: Tensor


class RouteRecord(NamedTuple):
    """Memory that receives the experts of the routed tokens, or of a part of them.

    Args:
        table: [blocks, block size, top_k] int16; the experts of a token are contiguous.
        blocks: [recorded tokens] int32, the block of each token; a token with a negative block is skipped.
        offsets: [recorded tokens] int32, the offset of each token in its block.
        first: Index of the first recorded token among the routed ones; the others follow it.
    """

    table: Tensor
    blocks: Tensor
    offsets: Tensor
    first: int = 0


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """Rule that selects experts from router logits and computes their weights.

    Args:
        top_k: Number of experts per token.
        score: `sigmoid` of each logit, or `softmax` over all experts.
        num_groups: Number of equal groups of consecutive experts; 1: no groups.
        top_groups: Number of groups with the highest scores, from which a token's experts are selected.
        num_scoring: A group's score is the sum of this many of its highest expert scores.
        normalizes: If True, divide the weights of a token by their sum.
        scale: Factor for all weights.

    Raises:
        ValueError: If `score` is unknown or a number is out of range.
    """

    top_k: int
    score: Literal["sigmoid", "softmax"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    num_scoring: int = 2
    normalizes: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in ("sigmoid", "softmax"):
            raise ValueError(f"score must be 'sigmoid' or 'softmax', found {self.score!r}")
        if min(self.top_k, self.num_scoring) < 1 or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                "a routing rule must have top_k >= 1, num_scoring >= 1 and 1 <= top_groups <= num_groups; found top_k "
                f"{self.top_k}, num_scoring {self.num_scoring}, top_groups {self.top_groups}, num_groups "
                f"{self.num_groups}"
            )

    def check(self, num_experts: int) -> None:
        """Raise `ValueError` if the rule cannot be applied to this number of experts."""
        if num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts cannot be split into {self.num_groups} equal groups")
        in_reach = num_experts // self.num_groups * self.top_groups
        if self.top_k > in_reach:
            raise ValueError(f"top_k is {self.top_k}, but a token can choose from {in_reach} experts only")
