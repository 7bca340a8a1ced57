"""A hybrid model's architecture in one value."""

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from ..kernels.activations import squared_relu
from ..kernels.experts.routing_rule import RoutingRule
from ..mcore.specs import check_layer_pattern

ACTIVATIONS = {"relu2": squared_relu, "silu": F.silu, "gelu": F.gelu}
"""Names of activations in a checkpoint's configuration."""


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Sizes of the Mamba2 mixers.

    Args:
        gated_norm_eps: Epsilon of the norm at a mixer's end; None: the model's.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    ssm_chunk_size: int
    d_conv: int = 4
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    gated_norm_eps: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of the attention layers.

    Args:
        scale: Factor on the scores; None: 1 / sqrt(head_dim).
        rotary_base: None: no position embedding.
        rotary_percent: The share of a head's channels that is rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    rotary_base: float | None = None
    rotary_percent: float = 1.0


@dataclass(frozen=True, slots=True)
class FeedForwardSizes:
    """Sizes of the dense feed-forward layers; `gated` ones multiply the activation by a second projection."""

    hidden_size: int
    activation: str  # a key of ACTIVATIONS
    gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsSizes:
    """Sizes and routing of the mixture-of-experts layers.

    Args:
        shared_hidden_size: Of the expert that all tokens go to; None: there is none.
        score: "sigmoid" with a selection bias, or "softmax".
        num_groups, top_groups, num_scoring: Experts are chosen from the groups whose best `num_scoring` experts score
            most together; 1 and 1: from all experts.
        normalizes: Whether the routing weights of a token are divided by their sum.
        scaling: Factor on the routing weights.
        latent_size: What the routed experts read and write, between two projections; None: the hidden size.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    shared_hidden_size: int | None
    score: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    top_groups: int = 1
    num_scoring: int = 2
    normalizes: bool = True
    scaling: float = 1.0
    latent_size: int | None = None

    @property
    def rule(self) -> RoutingRule:
        """How tokens choose experts.

        Raises:
            ValueError: If the numbers do not fit each other.
        """
        return RoutingRule(
            top_k=self.top_k,
            score=self.score,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            num_scoring=self.num_scoring,
            normalizes=self.normalizes,
            scale=self.scaling,
        )


@dataclass(frozen=True, slots=True)
class HybridArchitecture:
    """Everything a checkpoint's configuration says about a hybrid model.

    Args:
        pattern: One symbol per layer: M Mamba, * attention, - feed-forward, E mixture of experts.
        input_multiplier, residual_multiplier, output_multiplier: See `LocalSpecOptions`.
    """

    pattern: str
    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    norm_eps: float
    mamba: MambaSizes
    attention: AttentionSizes
    feed_forward: FeedForwardSizes
    experts: ExpertsSizes | None = None
    tie_embeddings: bool = False
    input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    output_multiplier: float = 1.0


def check_architecture(architecture: HybridArchitecture) -> None:
    """Raise `ValueError` for an unknown or missing kind of layer, and for inconsistent numbers of heads or experts."""
    check_layer_pattern(architecture.pattern)
    _check_heads(architecture)
    _check_experts(architecture)


def _check_heads(architecture: HybridArchitecture) -> None:
    attention, mamba = architecture.attention, architecture.mamba
    if attention.num_heads % attention.num_kv_heads:
        raise ValueError(f"{attention.num_heads} attention heads do not divide by {attention.num_kv_heads} KV heads")
    if mamba.num_heads % mamba.num_groups:
        raise ValueError(f"{mamba.num_heads} Mamba heads do not divide by {mamba.num_groups} groups")
    rotated = attention.head_dim * attention.rotary_percent
    if attention.rotary_base is not None and (int(rotated) % 2 or not 2 <= rotated <= attention.head_dim):
        raise ValueError(f"{rotated:g} of {attention.head_dim} channels of a head cannot be rotated in pairs")


def _check_experts(architecture: HybridArchitecture) -> None:
    experts = architecture.experts
    if "E" not in architecture.pattern:
        return
    if experts is None:
        raise ValueError(f"layer pattern {architecture.pattern!r} has experts (E), but their sizes are not given")
    experts.rule.check(experts.num_experts)
