"""A hybrid model's architecture in one value."""

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F

from ..kernels.activations import squared_relu
from ..kernels.experts.routing_rule import RoutingRule
from ..mcore.specs import check_layer_pattern
from .checkpoints.checkpoint_config import CheckpointConfig

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

    label = "Mamba"

    @property
    def grain(self) -> int:
        """Tokens of a chunk of the scan."""
        return self.ssm_chunk_size

    @property
    def divided(self) -> dict[str, int]:
        """The sizes that tensor-parallel ranks divide, by the name that errors give them."""
        return {"number of Mamba heads": self.num_heads, "number of Mamba groups": self.num_groups}

    def check(self) -> None:
        """Raise `ValueError` if the heads cannot be divided into groups."""
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} Mamba heads do not divide by {self.num_groups} groups")


@dataclass(frozen=True, slots=True)
class GatedDeltaSizes:
    """Sizes of the Gated DeltaNet mixers.

    Args:
        num_key_heads: Heads of queries and keys; consecutive value heads share one.
        key_head_dim, value_head_dim: A value head's state is [key_head_dim, value_head_dim].
        chunk_size: Tokens of a chunk of the scan.
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
        """Tokens of a chunk of the scan."""
        return self.chunk_size

    @property
    def divided(self) -> dict[str, int]:
        """The sizes that tensor-parallel ranks divide, by the name that errors give them."""
        return {"number of value heads": self.num_value_heads, "number of key heads": self.num_key_heads}

    def check(self) -> None:
        """Raise `ValueError` if value heads cannot share the key heads equally."""
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"{self.num_value_heads} value heads do not divide by {self.num_key_heads} key heads")


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of the attention layers.

    Args:
        scale: Factor on the scores; None: 1 / sqrt(head_dim).
        rotary_base: None: no position embedding.
        rotary_percent: The share of a head's channels that is rotated.
        has_output_gate: True if each head's output is multiplied by the sigmoid of a gate projected next to its query.
        has_head_norms: True if queries and keys are RMS-normalized by head, before the rotation.
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
    """Sizes of the dense feed-forward layers; `gated` ones multiply the activation by a second projection."""

    hidden_size: int
    activation: str  # a key of ACTIVATIONS
    gated: bool


@dataclass(frozen=True, slots=True)
class ExpertsSizes:
    """Sizes and routing of the mixture-of-experts layers.

    Args:
        shared_hidden_size: Of the shared expert; None without one.
        score: "sigmoid" with a selection bias, or "softmax".
        num_groups, top_groups, num_scoring: Experts are chosen from the groups whose best `num_scoring` experts score
            most together; 1 and 1: from all experts.
        normalizes: True to divide the routing weights of a token by their sum.
        scaling: Factor on the routing weights.
        latent_size: What the routed experts read and write, between two projections; None: the hidden size.
        has_shared_gate: True if the shared expert's output is multiplied by the sigmoid of one projected number per
            token.
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
        """How tokens choose experts; raises `ValueError` if the numbers do not fit each other."""
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
        pattern: One symbol per layer: M recurrent, * attention, - feed-forward, E mixture of experts.
        zero_centered_norms: True if norms but the mixers' own scale by 1 + weight, computed in fp32.
        input_multiplier, residual_multiplier, output_multiplier: As in `LocalSpecOptions`.
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
    """Raise `ValueError` for an unknown or missing kind of layer, and for inconsistent numbers of heads or experts."""
    check_layer_pattern(architecture.pattern)
    _check_heads(architecture)
    _check_experts(architecture)


def _check_heads(architecture: HybridArchitecture) -> None:
    attention = architecture.attention
    if attention.num_heads % attention.num_kv_heads:
        raise ValueError(f"{attention.num_heads} attention heads do not divide by {attention.num_kv_heads} KV heads")
    architecture.recurrent.check()
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
    if experts.has_shared_gate and experts.shared_hidden_size is None:
        raise ValueError("has_shared_gate needs a shared expert, but shared_hidden_size is None")


@dataclass(frozen=True, slots=True)
class ChoiceFields:
    """A configuration's names for the numbers of `ExpertsSizes`; empty names if it has no groups."""

    num_experts: str
    top_k: str
    num_groups: str = ""
    top_groups: str = ""


def checked_choice(config: CheckpointConfig, experts: ExpertsSizes, fields: ChoiceFields) -> ExpertsSizes:
    """Return the sizes read from a configuration; raise `ValueError` if they do not fit each other."""
    num_groups = experts.num_groups
    all_experts = config.shown(fields.num_experts, experts.num_experts)
    all_groups = config.shown(fields.num_groups, num_groups)
    if experts.num_experts % num_groups:
        raise config.error(f"{all_groups} is not supported, only divisors of {all_experts}")
    chosen_groups = config.shown(fields.top_groups, experts.top_groups)
    if experts.top_groups > num_groups:
        raise config.error(f"{chosen_groups} is not supported, only up to {all_groups}")
    in_reach = experts.top_groups * (experts.num_experts // num_groups)
    if experts.top_k > in_reach:
        limit = all_experts if num_groups == 1 else f"the {in_reach} experts of {chosen_groups}"
        raise config.error(f"{config.shown(fields.top_k, experts.top_k)} is not supported, only up to {limit}")
    return experts
