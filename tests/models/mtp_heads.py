"""Random multi-token prediction (MTP) heads in the names of published checkpoints, and an oracle for them.

The oracle computes one whole sequence with torch only, from the formulas: an entry joins the norms of a token's
embedding and of the hidden state of the token before it, then attention and an MLP or experts each add to it. It reads
the stored tensors and the configuration, and nothing of the package.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

Tensors = dict[str, Tensor]


def head_tensors(config: PreTrainedConfig, seed: int = 0) -> Tensors:
    """Return the tensors of a random head for a model of this configuration, as its family stores them."""
    config = config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    of_family = _nemotron_shapes if config.model_type == "nemotron_h" else _qwen_shapes
    is_zero_centered = config.model_type != "nemotron_h"

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return 0.7 + 0.6 * torch.rand(shape, generator=generator) - float(is_zero_centered)
        if len(shape) == 1:  # the bias of the router
            return 0.2 * torch.rand(shape, generator=generator)
        return torch.randn(shape, generator=generator) * 1.2 / shape[-1] ** 0.5

    return {name: values(name, shape) for name, shape in of_family(config).items()}


def _nemotron_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    first, second = "mtp.layers.0.", "mtp.layers.1."
    found = {
        **{f"{first}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")},
        f"{first}eh_proj.weight": (hidden, 2 * hidden),
        f"{first}mixer.q_proj.weight": (queries, hidden),
        f"{first}mixer.k_proj.weight": (keys, hidden),
        f"{first}mixer.v_proj.weight": (keys, hidden),
        f"{first}mixer.o_proj.weight": (hidden, queries),
        **{f"{second}{name}.weight": (hidden,) for name in ("norm", "final_layernorm")},
    }
    mixer = f"{second}mixer."
    if "moe" not in config.layers_block_type:
        return found | _pair(mixer, config.intermediate_size, hidden)
    width = config.moe_latent_size or hidden
    found |= {
        f"{mixer}gate.weight": (config.n_routed_experts, hidden),
        f"{mixer}gate.e_score_correction_bias": (config.n_routed_experts,),
        **_pair(f"{mixer}shared_experts.", config.moe_shared_expert_intermediate_size, hidden),
    }
    if config.moe_latent_size:
        found |= {f"{mixer}fc1_latent_proj.weight": (width, hidden), f"{mixer}fc2_latent_proj.weight": (hidden, width)}
    for expert in range(config.n_routed_experts):
        found |= _pair(f"{mixer}experts.{expert}.", config.moe_intermediate_size, width)
    return found


def _pair(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}up_proj.weight": (inner, hidden), f"{prefix}down_proj.weight": (hidden, inner)}


def _gated(prefix: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}gate_proj.weight": (inner, hidden), **_pair(prefix, inner, hidden)}


def _qwen_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    keys = config.num_key_value_heads * dim
    layer = "mtp.layers.0."
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    found = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{name}.weight": (hidden,) for name in norms},
        **{f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
        f"{layer}self_attn.q_proj.weight": (2 * heads * dim, hidden),
        f"{layer}self_attn.k_proj.weight": (keys, hidden),
        f"{layer}self_attn.v_proj.weight": (keys, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        **{f"{layer}self_attn.{name}_norm.weight": (dim,) for name in "qk"},
    }
    if not getattr(config, "num_experts", 0):
        return found | _gated(f"{layer}mlp.", config.intermediate_size, hidden)
    found |= {
        f"{layer}mlp.gate.weight": (config.num_experts, hidden),
        f"{layer}mlp.shared_expert_gate.weight": (1, hidden),
        **_gated(f"{layer}mlp.shared_expert.", config.shared_expert_intermediate_size, hidden),
    }
    for expert in range(config.num_experts):
        found |= _gated(f"{layer}mlp.experts.{expert}.", config.moe_intermediate_size, hidden)
    return found


@dataclass(frozen=True, slots=True)
class HeadOracle:
    """A head, in the dtype of its tensors."""

    config: Any  # of the language model
    tensors: Mapping[str, Tensor]

    def outputs(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the outputs, [tokens, hidden], of all entries of a sequence from position 0 on.

        Args:
            embeddings: [tokens, hidden] of each token.
            hidden_states: [tokens, hidden] of the token before each.
        """
        return (self._of_nemotron if self.config.model_type == "nemotron_h" else self._of_qwen)(
            embeddings, hidden_states
        )

    def _of_nemotron(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        first, second = "mtp.layers.0.", "mtp.layers.1."
        joined = (self._norm(embeddings, f"{first}enorm"), self._norm(hidden_states, f"{first}hnorm"))
        x = self._times(torch.cat(joined, -1), f"{first}eh_proj")
        normed = self._norm(x, f"{first}norm")
        q, k, v = (self._heads(self._times(normed, f"{first}mixer.{name}_proj")) for name in "qkv")
        x = x + self._times(_attention(q, k, v).flatten(1), f"{first}mixer.o_proj")
        normed = self._norm(x, f"{second}norm")
        if "moe" in self.config.layers_block_type:
            x = x + self._nemotron_experts(normed, f"{second}mixer.")
        else:
            x = x + self._two_layers(normed, f"{second}mixer.")
        return self._norm(x, f"{second}final_layernorm")

    def _nemotron_experts(self, x: Tensor, prefix: str) -> Tensor:
        config = self.config
        scores = self._times(x, f"{prefix}gate").sigmoid()
        chosen_by = scores + self.tensors[f"{prefix}gate.e_score_correction_bias"]
        groups = chosen_by.unflatten(-1, (config.n_group, -1))
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1).topk(config.topk_group, -1).indices
        is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        chosen = groups.masked_fill(~is_open[..., None], -math.inf).flatten(1).topk(config.num_experts_per_tok, -1)
        weights = scores.gather(1, chosen.indices)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * config.routed_scaling_factor
        narrow = self._times(x, f"{prefix}fc1_latent_proj") if config.moe_latent_size else x
        every = torch.stack(
            [self._two_layers(narrow, f"{prefix}experts.{expert}.") for expert in range(config.n_routed_experts)], 1
        )
        routed = (every.gather(1, chosen.indices[..., None].expand(-1, -1, every.shape[-1])) * weights[..., None]).sum(
            1
        )
        if config.moe_latent_size:
            routed = self._times(routed, f"{prefix}fc2_latent_proj")
        return routed + self._two_layers(x, f"{prefix}shared_experts.")

    def _two_layers(self, x: Tensor, prefix: str) -> Tensor:
        inner = self._times(x, f"{prefix}up_proj")
        active = F.relu(inner).square() if self.config.mlp_hidden_act == "relu2" else F.silu(inner)
        return self._times(active, f"{prefix}down_proj")

    def _of_qwen(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        layer = "mtp.layers.0."
        normed = (
            self._norm(embeddings, "mtp.pre_fc_norm_embedding"),
            self._norm(hidden_states, "mtp.pre_fc_norm_hidden"),
        )
        x = self._times(torch.cat(normed, -1), "mtp.fc")
        x = x + self._qwen_attention(self._norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
        normed_x = self._norm(x, f"{layer}post_attention_layernorm")
        if getattr(self.config, "num_experts", 0):
            x = x + self._qwen_experts(normed_x, f"{layer}mlp.")
        else:
            x = x + self._swiglu(normed_x, f"{layer}mlp.")
        return self._norm(x, "mtp.norm")

    def _qwen_attention(self, x: Tensor, prefix: str) -> Tensor:
        dim = self.config.head_dim
        q, gate = self._times(x, f"{prefix}q_proj").unflatten(-1, (-1, 2 * dim)).split(dim, -1)
        k, v = (self._heads(self._times(x, f"{prefix}{name}_proj")) for name in "kv")
        rope = self.config.rope_parameters
        rotated = int(dim * rope["partial_rotary_factor"])
        q, k = (
            _rotated(self._norm(part, f"{prefix}{name}_norm"), rotated, rope["rope_theta"])
            for part, name in ((q, "q"), (k, "k"))
        )
        return self._times((_attention(q, k, v) * gate.sigmoid()).flatten(1), f"{prefix}o_proj")

    def _qwen_experts(self, x: Tensor, prefix: str) -> Tensor:
        shares, chosen = self._times(x, f"{prefix}gate").softmax(-1).topk(self.config.num_experts_per_tok, -1)
        if getattr(self.config, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        every = torch.stack(
            [self._swiglu(x, f"{prefix}experts.{expert}.") for expert in range(self.config.num_experts)], 1
        )
        routed = (every.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1])) * shares[..., None]).sum(1)
        shared = self._swiglu(x, f"{prefix}shared_expert.")
        return routed + self._times(x, f"{prefix}shared_expert_gate").sigmoid() * shared

    def _swiglu(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (self._times(x, f"{prefix}{name}_proj") for name in ("gate", "up"))
        return self._times(F.silu(gate) * up, f"{prefix}down_proj")

    def _times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        is_nemotron = self.config.model_type == "nemotron_h"
        eps = self.config.layer_norm_epsilon if is_nemotron else self.config.rms_norm_eps
        factor = self.tensors[f"{name}.weight"] + float(not is_nemotron)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention, [tokens, heads, dim]; consecutive query heads share a KV head."""
    share = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(share, dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    is_later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -math.inf).softmax(-1), v)


def _rotated(x: Tensor, num_channels: int, base: float) -> Tensor:
    """Rotate the first channels of each head, in pairs of channels that are half of them apart."""
    frequencies = base ** -(torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels)
    angles = (torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies)[:, None].to(x)
    first, second, rest = x.split([num_channels // 2, num_channels // 2, x.shape[-1] - num_channels], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
