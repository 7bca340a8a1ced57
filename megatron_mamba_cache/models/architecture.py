"""Architecture of a hybrid model: its layer pattern and dimensions, with consistency checks."""

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from ..kernels.activations import squared_relu
from ..kernels.experts.routing_rule import RoutingRule
from ..mcore.specs import check_layer_pattern
from .checkpoints.checkpoint_config import CheckpointConfig

ACTIVATIONS = {"relu2": squared_relu, "silu": F.silu, "gelu": F.gelu}
"""Name of an activation in a checkpoint's configuration → function."""


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Dimensions and constants of the Mamba2 mixers.

    Args:
        gated_norm_eps: Epsilon of the gated norm before the output projection; None for the model's `norm_eps`.
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

    label = "Mamba"

    @property
    def grain(self) -> int:
        """Chunk size of the scan, in tokens. With prefix caching, the block size must be a multiple of it."""
        return self.ssm_chunk_size

    @property
    def divided(self) -> dict[str, int]:
        """Dimensions that are divided among tensor-parallel ranks, keyed by their names in error messages."""
        return {"number of Mamba heads": self.num_heads, "number of Mamba groups": self.num_groups}

    def check(self) -> None:
        """Raise `ValueError` if the number of heads is not a multiple of the number of groups."""
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"the number of Mamba heads must be a multiple of the {self.num_groups} groups, found {self.num_heads}"
            )


@dataclass(frozen=True, slots=True)
class GatedDeltaSizes:
    """Dimensions of the Gated DeltaNet mixers.

    Args:
        num_key_heads: Number of query and key heads; consecutive value heads share a key head.
        key_head_dim, value_head_dim: Dimensions of each key head and each value head; a value head's state has shape
            [key_head_dim, value_head_dim].
        chunk_size: Number of tokens in one chunk of the scan.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    d_conv: int = 4
    chunk_size: int = 64

    label = "Gated DeltaNet"

    @property
    def grain(self) -> int:
        """Chunk size of the scan, in tokens. With prefix caching, the block size must be a multiple of it."""
        return self.chunk_size

    @property
    def divided(self) -> dict[str, int]:
        """Dimensions that are divided among tensor-parallel ranks, keyed by their names in error messages."""
        return {"number of value heads": self.num_value_heads, "number of key heads": self.num_key_heads}

    def check(self) -> None:
        """Raise `ValueError` if the number of value heads is not a multiple of the number of key heads."""
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"the number of value heads must be a multiple of the {self.num_key_heads} key heads, "
                f"found {self.num_value_heads}"
            )


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Dimensions and options of the attention layers.

    Args:
        scale: Factor applied to the attention scores; None for 1 / sqrt(head_dim).
        rotary_base: Base of the rotary embeddings; None for no position embeddings.
        rotary_percent: Fraction of each head's channels to which the rotation is applied, between 0 and 1.
        has_output_gate: True if each head's output is multiplied by the sigmoid of a gate projected with its query.
        has_head_norms: True if queries and keys are RMS-normalized per head before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    rotary_base: float | None = None
    rotary_percent: float = 1.0
    has_output_gate: bool = False
    has_head_norms: bool = False


@dataclass(frozen=True, slots=True)
class FeedForwardSizes:
    """Dimensions of the dense feed-forward layers. If `gated`, the layers have a gate projection, as in SwiGLU."""

    hidden_size: int
    activation: str  # a key of ACTIVATIONS
    gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsSizes:
    """Dimensions and routing of the mixture-of-experts layers.

    Args:
        shared_hidden_size: Hidden size of the shared expert; None if there is no shared expert.
        score: Scoring function of the router: "sigmoid" with a selection bias, or "softmax".
        num_groups, top_groups, num_scoring: For each token, a group's score is the sum of its `num_scoring` highest
            expert scores. The experts are selected from the `top_groups` groups with the highest scores.
        normalizes: True to divide the routing weights of each token by their sum.
        scaling: Factor applied to the routing weights.
        latent_size: Width to which the input of the routed experts is projected down, and from which their output is
            projected up; None if the routed experts have no such projections.
        has_shared_gate: True if the output of the shared expert is multiplied by the sigmoid of a learned gate, one
            number per token.
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
    has_shared_gate: bool = False

    @property
    def rule(self) -> RoutingRule:
        """Rule that routes tokens to experts; raises `ValueError` if the numbers are inconsistent."""
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
    """Architecture of a hybrid model, read from a checkpoint's configuration or given by the caller.

    Args:
        pattern: One symbol per layer: M recurrent, * attention, - feed-forward, E mixture of experts.
        zero_centered_norms: True if all norms except those inside the mixers scale by 1 + weight, computed in fp32.
        input_multiplier, residual_multiplier, output_multiplier: Factors on the embeddings, on each layer's output
            before it is added to the residual, and on the final hidden states.
    """

    pattern: str
    vocab_size: int
    hidden_size: int
    max_sequence_length: int
    norm_eps: float
    recurrent: MambaSizes | GatedDeltaSizes
    attention: AttentionSizes
    feed_forward: FeedForwardSizes
    experts: ExpertsSizes | None = None
    tie_embeddings: bool = False
    zero_centered_norms: bool = False
    input_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    output_multiplier: float = 1.0


def check_architecture(architecture: HybridArchitecture) -> None:
    """Raise `ValueError` if the layer pattern is not valid or dimensions are inconsistent."""
    check_layer_pattern(architecture.pattern)
    _check_heads(architecture)
    _check_experts(architecture)


def _check_heads(architecture: HybridArchitecture) -> None:
    attention = architecture.attention
    if attention.num_heads % attention.num_kv_heads:
        raise ValueError(
            f"the number of attention heads must be a multiple of the {attention.num_kv_heads} KV heads, "
            f"found {attention.num_heads}"
        )
    architecture.recurrent.check()
    rotated = attention.head_dim * attention.rotary_percent
    if attention.rotary_base is not None and (int(rotated) % 2 or not 2 <= rotated <= attention.head_dim):
        raise ValueError(
            f"rotary embeddings must rotate an even number of channels per head, between 2 and {attention.head_dim}; "
            f"found {rotated:g}"
        )


def _check_experts(architecture: HybridArchitecture) -> None:
    experts = architecture.experts
    if "E" not in architecture.pattern:
        return
    if experts is None:
        raise ValueError(f"layer pattern {architecture.pattern!r} has expert layers (E), but `experts` is None")
    experts.rule.check(experts.num_experts)
    if experts.has_shared_gate and experts.shared_hidden_size is None:
        raise ValueError("has_shared_gate needs a shared expert, but shared_hidden_size is None; set it")


@dataclass(frozen=True, slots=True)
class RoutingFields:
    """Names of the `config.json` fields that hold values of `ExpertsSizes`; "" if a family does not have the field."""

    num_experts: str
    top_k: str
    num_groups: str = ""
    top_groups: str = ""


def checked_routing(config: CheckpointConfig, experts: ExpertsSizes, fields: RoutingFields) -> ExpertsSizes:
    """Return `experts` unchanged; raise `ValueError`, which names the fields, if its numbers are inconsistent."""
    num_groups = experts.num_groups
    all_experts = config.shown(fields.num_experts, experts.num_experts)
    all_groups = config.shown(fields.num_groups, num_groups)
    if experts.num_experts % num_groups:
        raise config.error(f"{all_groups} is not supported; it must divide {all_experts}")
    chosen_groups = config.shown(fields.top_groups, experts.top_groups)
    if experts.top_groups > num_groups:
        raise config.error(f"{chosen_groups} is not supported; it must be at most {all_groups}")
    in_reach = experts.top_groups * (experts.num_experts // num_groups)
    if experts.top_k > in_reach:
        limit = all_experts if num_groups == 1 else f"{in_reach}, the number of experts that {chosen_groups} leaves"
        raise config.error(f"{config.shown(fields.top_k, experts.top_k)} is not supported; it must be at most {limit}")
    return experts
