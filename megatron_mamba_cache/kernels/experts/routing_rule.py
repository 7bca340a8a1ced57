"""Routing rules: top-k choice of experts, and the gate of the shared expert."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


class SharedGate(NamedTuple):
    """Gate of the shared expert: sigmoid(x @ weight.T), both rounded to x's dtype.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [1, inputs], contiguous, of x's dtype.
    """

    x: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule by which router logits select experts and weigh them.

    Args:
        top_k: Experts of a token.
        score: `sigmoid` of each logit, or `softmax` over all experts.
        num_groups: Groups of consecutive experts, all of one size; 1 for none.
        top_groups: Groups that a token's experts may be in: those whose best experts have the highest total score.
        num_scoring: How many of a group's best experts count for its score.
        normalizes: True to divide a token's weights by their sum.
        scale: Factor on all weights.

    Raises:
        ValueError: If the numbers do not fit each other.
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
            raise ValueError(f"score is {self.score!r}; 'sigmoid' and 'softmax' are supported")
        if min(self.top_k, self.num_scoring) < 1 or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"top_k is {self.top_k}, num_scoring {self.num_scoring}, top_groups {self.top_groups} of "
                f"{self.num_groups} groups; need top_k >= 1, num_scoring >= 1 and 1 <= top_groups <= num_groups"
            )

    def check(self, num_experts: int) -> None:
        """Raise `ValueError` unless the rule fits this many experts."""
        if num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts cannot be divided into {self.num_groups} groups of one size")
        in_reach = num_experts // self.num_groups * self.top_groups
        if self.top_k > in_reach:
            raise ValueError(f"top_k is {self.top_k}, and a token can choose from {in_reach} experts")
