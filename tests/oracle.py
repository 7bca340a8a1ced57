"""An independent hybrid model as a test oracle: whole sequences, fp64, no cache, no shared code."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from tests.oracle_layers import (
    ACTIVATIONS,
    AttentionLayer,
    ExpertLayer,
    GatedDeltaLayer,
    MambaLayer,
    MLPLayer,
    Routing,
    ToyMatrixLayer,
    ToyVectorLayer,
    rms_norm,
)

Layer = MambaLayer | GatedDeltaLayer | ToyMatrixLayer | ToyVectorLayer | AttentionLayer | MLPLayer | ExpertLayer

ROUTING_MARGIN = 1e-6

UNSUPPORTED_SETTINGS = (
    "activation_func_clamp_value",
    "add_bias_linear",
    "add_qkv_bias",
    "apply_residual_connection_post_layernorm",
    "glu_linear_offset",
    "multi_latent_attention",
    "qk_l2_norm",
    "rotary_interleaved",
    "window_size",
)


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """The extent of a comparison of generated tokens with the oracle's choices.

    Args:
        num_compared: tokens compared, a mismatch included.
        num_stopped: 1 if a margin too small for a verdict ended the comparison, else 0.
        first_mismatch: index into the generated tokens, None when every compared token agrees.
    """

    num_compared: int
    num_stopped: int
    first_mismatch: int | None


@dataclass(frozen=True, slots=True)
class HybridOracle:
    """A hybrid language model as plain fp64 weights."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [hidden]
    output: Tensor  # [vocab, hidden]
    epsilon: float

    @classmethod
    def from_megatron(cls, model: Any) -> Self:
        """Copy the weights of a megatron-core MambaModel that is on one rank and has its own norms.

        Raises:
            ValueError: If the model has a part that the oracle does not know.
        """
        _check_settings(model)
        decoder = model.decoder
        readers = {"M": _recurrent_layer, "*": _attention_layer, "-": _mlp_layer, "E": _expert_layer}
        unknown = sorted(set(decoder.layer_type_list) - set(readers))
        if unknown:
            raise ValueError(f"need layers of kind {sorted(readers)}, got {unknown}")
        kinds = zip(decoder.layer_type_list, decoder.layers, strict=True)
        embedding = _fp64(model.embedding.word_embeddings.weight)
        is_tied = model.share_embeddings_and_output_weights
        return cls(
            embedding=embedding,
            layers=tuple(readers[kind](layer, model) for kind, layer in kinds),
            final_norm=_norm_weight(decoder.final_norm, model.config),
            output=embedding if is_tied else _fp64(model.output_layer.weight),
            epsilon=model.config.layernorm_epsilon,
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each token, [tokens, vocab] fp64."""
        return self.logits_and_gaps(tokens)[0]

    @torch.no_grad()
    def logits_and_gaps(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the logits after each token, and its smallest gap between experts in any layer, [tokens] fp64."""
        hidden = self.embedding[torch.tensor(tokens, dtype=torch.long, device=self.embedding.device)]
        gaps = torch.full((len(tokens),), float("inf"), dtype=hidden.dtype, device=hidden.device)
        for layer in self.layers:
            if isinstance(layer, ExpertLayer):
                gaps = gaps.minimum(layer.routing_of(hidden)[1])
            hidden = hidden + layer(hidden)
        return rms_norm(hidden, self.final_norm, self.epsilon) @ self.output.T, gaps

    @torch.no_grad()
    def experts(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the experts that each MoE layer chooses, ascending, [tokens, layers, experts per token], and `gaps`.

        gaps: [tokens], smallest of any layer and of the tokens up to there, since a choice depends on those before it.
        """
        hidden = self.embedding[torch.tensor(tokens, dtype=torch.long, device=self.embedding.device)]
        found, gaps = [], []
        for layer in self.layers:
            if isinstance(layer, ExpertLayer):
                shares, of_layer = layer.routing_of(hidden)
                found.append(shares.topk(layer.routing.top_k).indices.sort(-1).values)
                gaps.append(of_layer)
            hidden = hidden + layer(hidden)
        return torch.stack(found, 1), torch.stack(gaps).amin(0).cummin(0).values

    def check_greedy(
        self, prompt: Sequence[int], generated: Sequence[int], margin: float = 1e-5, allowed: Tensor | None = None
    ) -> GreedyCheck:
        """Compare greedily generated tokens with the oracle's choice after the same tokens.

        Args:
            allowed: [generated, vocab] bool, which tokens may be chosen; None for any.

        Stops at the first mismatch, where the two best logits are less than `margin` apart, and where any token's last
        expert or group up to there and the next one score less than ROUTING_MARGIN apart.
        """
        if not prompt:
            raise ValueError("need a prompt of at least 1 token, got none")
        of_generated = slice(len(prompt) - 1, -1)
        logits, gaps = self.logits_and_gaps([*prompt, *generated])
        logits, routing_gaps = logits[of_generated], gaps.cummin(0).values[of_generated]
        if allowed is not None:
            logits = logits.masked_fill(~allowed.to(logits.device), float("-inf"))
        best = logits.topk(2)
        is_unsure = (best.values[:, 0] - best.values[:, 1] < margin) | (routing_gaps < ROUTING_MARGIN)
        for index, (choice, unsure) in enumerate(zip(best.indices[:, 0].tolist(), is_unsure.tolist(), strict=True)):
            if unsure:
                return GreedyCheck(num_compared=index, num_stopped=1, first_mismatch=None)
            if choice != generated[index]:
                return GreedyCheck(num_compared=index + 1, num_stopped=0, first_mismatch=index)
        return GreedyCheck(num_compared=len(generated), num_stopped=0, first_mismatch=None)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Generate `num_tokens` greedily, each from a forward over all tokens before it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def _fp64(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float64, copy=True)


def _norm_weight(norm: Any, config: Any) -> Tensor:
    """Return the factor of a norm: its weights, or one plus its weights."""
    return _fp64(norm.weight) + (1 if config.layernorm_zero_centered_gamma else 0)


def _check_settings(model: Any) -> None:
    config = model.config
    for name in UNSUPPORTED_SETTINGS:
        if getattr(config, name):
            raise ValueError(f"need {name} unset, got {getattr(config, name)}")
    if config.normalization != "RMSNorm":
        raise ValueError(f"need normalization RMSNorm, got {config.normalization}")
    if model.position_embedding_type not in ("rope", "none"):
        raise ValueError(f"need position_embedding_type rope or none, got {model.position_embedding_type}")
    if model.position_embedding_type == "rope" and model.rotary_pos_emb.seq_len_interpolation_factor is not None:
        raise ValueError("need rotary positions without interpolation, got a seq_len_interpolation_factor")


def _recurrent_layer(layer: Any, model: Any) -> Layer:
    name = getattr(getattr(layer.mixer, "recurrence", None), "name", "mamba2")
    readers = {
        "mamba2": _mamba_layer,
        "gated_delta": _gated_delta_layer,
        "toy_matrix": _toy_matrix_layer,
        "toy_vector": _toy_vector_layer,
    }
    return readers[name](layer, model)


def _toy_matrix_layer(layer: Any, model: Any) -> ToyMatrixLayer:
    mixer = layer.mixer
    return ToyMatrixLayer(
        input_norm=_norm_weight(layer.norm, model.config),
        in_proj=_fp64(mixer.in_proj),
        taps=_fp64(mixer.taps),
        decays=_fp64(mixer.decays),
        out_proj=_fp64(mixer.out_proj),
        is_first=mixer.is_first,
        epsilon=model.config.layernorm_epsilon,
    )


def _toy_vector_layer(layer: Any, model: Any) -> ToyVectorLayer:
    return ToyVectorLayer(
        input_norm=_norm_weight(layer.norm, model.config),
        in_proj=_fp64(layer.mixer.in_proj),
        out_proj=_fp64(layer.mixer.out_proj),
        epsilon=model.config.layernorm_epsilon,
    )


def _mamba_layer(layer: Any, model: Any) -> MambaLayer:
    mixer, config = layer.mixer, model.config
    return MambaLayer(
        input_norm=_norm_weight(layer.norm, model.config),
        in_proj=_fp64(mixer.in_proj.weight),
        conv_weight=_fp64(mixer.conv1d.weight)[:, 0],
        conv_bias=_fp64(mixer.conv1d.bias),
        dt_bias=_fp64(mixer.dt_bias),
        a_log=_fp64(mixer.A_log),
        skip=_fp64(mixer.D).view(len(mixer.A_log), -1),
        gated_norm=_fp64(mixer.norm.weight),
        out_proj=_fp64(mixer.out_proj.weight),
        num_groups=config.mamba_num_groups,
        epsilon=config.layernorm_epsilon,
    )


def _gated_delta_layer(layer: Any, model: Any) -> GatedDeltaLayer:
    mixer = layer.mixer
    return GatedDeltaLayer(
        input_norm=_norm_weight(layer.norm, model.config),
        in_proj=_fp64(mixer.in_proj.weight),
        conv_weight=_fp64(mixer.conv1d.weight)[:, 0],
        a_log=_fp64(mixer.A_log),
        dt_bias=_fp64(mixer.dt_bias),
        head_norm=_fp64(mixer.norm.weight),
        out_proj=_fp64(mixer.out_proj.weight),
        num_key_heads=model.config.linear_num_key_heads,
        epsilon=model.config.layernorm_epsilon,
    )


def _attention_layer(layer: Any, model: Any) -> AttentionLayer:
    config, attention = model.config, layer.self_attention
    qkv = _fp64(attention.linear_qkv.weight)
    has_rope = model.position_embedding_type == "rope"
    return AttentionLayer(
        input_norm=_norm_weight(layer.input_layernorm, config),
        qkv=qkv,
        proj=_fp64(attention.linear_proj.weight),
        num_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        scale=config.softmax_scale or config.kv_channels**-0.5,
        rope_frequencies=_fp64(model.rotary_pos_emb.inv_freq).to(qkv.device) if has_rope else None,
        epsilon=config.layernorm_epsilon,
        head_norms=_head_norms(attention, config) if config.qk_layernorm else None,
        has_gate=config.attention_output_gate,
    )


def _head_norms(attention: Any, config: Any) -> tuple[Tensor, Tensor]:
    return _norm_weight(attention.q_layernorm, config), _norm_weight(attention.k_layernorm, config)


def _expert_layer(layer: Any, model: Any) -> ExpertLayer:
    config, mlp, norm = model.config, layer.mlp, layer.pre_mlp_layernorm
    latent = [getattr(mlp, name, None) for name in ("fc1_latent_proj", "fc2_latent_proj")]
    return ExpertLayer(
        input_norm=_norm_weight(norm, config),
        router=_fp64(mlp.router.weight),
        routing=_routing(mlp.router, config),
        experts=tuple(_feed_forward(expert, norm, config) for expert in _experts(mlp.experts)),
        shared=_feed_forward(mlp.shared_experts, norm, config),
        latent=None if latent[0] is None else (_fp64(latent[0].weight), _fp64(latent[1].weight)),
        epsilon=config.layernorm_epsilon,
        shared_gate=_fp64(mlp.shared_experts.gate_weight) if config.moe_shared_expert_gate else None,
    )


def _routing(router: Any, config: Any) -> Routing:
    """Return a router's rule; Megatron's own layer has none, and one form of it is supported."""
    rule = getattr(router, "_rule", None)
    if rule is None:
        if config.moe_router_score_function != "softmax" or config.moe_router_pre_softmax:
            raise ValueError("need a router of softmax over the chosen experts")
        return Routing(config.moe_router_topk)
    return Routing(
        rule.top_k,
        _fp64(router.expert_bias) if rule.score == "sigmoid" else None,
        rule.num_groups,
        rule.top_groups,
        rule.num_scoring,
        rule.normalizes,
        rule.scale,
    )


def _experts(experts: Any) -> list[Any]:
    """Return each expert under the attributes of a separate layer."""
    if hasattr(experts, "local_experts"):
        return experts.local_experts
    return [
        SimpleNamespace(linear_fc1=SimpleNamespace(weight=first), linear_fc2=SimpleNamespace(weight=second))
        for first, second in zip(experts.linear_fc1, experts.linear_fc2, strict=True)
    ]


def _mlp_layer(layer: Any, model: Any) -> MLPLayer:
    return _feed_forward(layer.mlp, layer.pre_mlp_layernorm, model.config)


def _feed_forward(mlp: Any, norm: Any, config: Any) -> MLPLayer:
    name = getattr(config.activation_func, "__name__", repr(config.activation_func))
    if name not in ACTIVATIONS:
        raise ValueError(f"need an activation of {sorted(ACTIVATIONS)}, got {name}")
    return MLPLayer(
        input_norm=_norm_weight(norm, config),
        fc1=_fp64(mlp.linear_fc1.weight),
        fc2=_fp64(mlp.linear_fc2.weight),
        activation=ACTIVATIONS[name],
        is_gated=config.gated_linear_unit,
        epsilon=config.layernorm_epsilon,
    )
