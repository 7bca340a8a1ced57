"""Checkpoints as Megatron-LM's training writes them: Transformer Engine's names, arguments, and other state."""

import io
import math
import signal
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer.enums import AttnBackend, AttnMaskType

from megatron_mamba_cache.models.architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    HybridArchitecture,
    MambaSizes,
)
from megatron_mamba_cache.models.checkpoints.checkpoint_writer import InProcessSaveStrategy
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model

ITERATION = 100
FUSED_NORMS = {
    "M": ("norm.weight", "mixer.in_proj.layer_norm_weight"),
    "*": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "-": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
}
"""Layer symbol → names of its norm here and in Transformer Engine; a layer of experts does not fuse its norm."""


def random_model(architecture: HybridArchitecture, dtype: torch.dtype = torch.float32) -> MambaModel:
    """Return a model on the current device with random weights and buffers."""
    model, generator = build_hybrid_model(architecture, dtype), torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) / math.sqrt(tensor.shape[-1]))
    return model


def write_training_checkpoint(
    model: MambaModel, architecture: HybridArchitecture, run: Path, *, singleton_experts: bool = False, **changed: Any
) -> Path:
    """Write one iteration of a run, all ranks together, and return its directory.

    Args:
        singleton_experts: True if each expert's tensors have their own names, as newer versions write them.
        changed: Arguments of the run that differ from those of the architecture.
    """
    directory = run / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True)
    state: dict[str, Any] = {
        "args": Namespace(**{**arguments_of(architecture), **changed}),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "optimizer": {"param_groups": [{"lr": 1e-3, "step": ITERATION}], "mask": AttnMaskType.causal},
        "model": _model_state(model, architecture, singleton_experts),
        "moments": _sharded("optimizer.state.exp_avg.embedding.word_embeddings.weight"),
        "chained": _sharded("chained_1.optimizer.state.exp_avg.decoder.final_norm.weight"),
        "rng_state": ShardedObject("rng_state", [{"seed": 1}], (1,), (0,)),
    }
    content = {"singleton_local_shards": singleton_experts}
    dist_checkpointing.save(state, str(directory), InProcessSaveStrategy(), content_metadata=content)
    (run / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return directory


def arguments_of(architecture: HybridArchitecture) -> dict[str, Any]:
    """Return Megatron-LM's command-line arguments for a model, and some unrelated ones."""
    mamba, attention, experts = architecture.recurrent, architecture.attention, architecture.experts
    assert isinstance(mamba, MambaSizes)
    feed_forward = architecture.feed_forward
    arguments = {
        "hybrid_override_pattern": architecture.pattern,
        "num_layers": len(architecture.pattern),
        "padded_vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "max_position_embeddings": architecture.max_sequence_length,
        "normalization": "RMSNorm",
        "norm_epsilon": architecture.norm_eps,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not architecture.tie_embeddings,
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "mamba_state_dim": mamba.state_dim,
        "mamba_num_groups": mamba.num_groups,
        "num_attention_heads": attention.num_heads,
        "group_query_attention": attention.num_heads != attention.num_kv_heads,
        "num_query_groups": attention.num_kv_heads if attention.num_heads != attention.num_kv_heads else 1,
        "kv_channels": attention.head_dim,
        "position_embedding_type": "none" if attention.rotary_base is None else "rope",
        "rotary_base": int(attention.rotary_base or 10_000),
        "rotary_percent": attention.rotary_percent,
        "ffn_hidden_size": feed_forward.hidden_size,
        "swiglu": feed_forward.gated,
        "squared_relu": feed_forward.activation == "relu2",
        "params_dtype": torch.bfloat16,
        "attention_backend": AttnBackend.flash,
        "attention_mask_type": AttnMaskType.causal,  # of a class that torch.load does not allow
        "exit_signal": signal.SIGTERM,
        "data_path": ["corpus"],
        "world_size": 8,
    }
    if experts is not None:
        arguments |= {
            "num_experts": experts.num_experts,
            "moe_router_topk": experts.top_k,
            "moe_ffn_hidden_size": experts.hidden_size,
            "moe_shared_expert_intermediate_size": experts.shared_hidden_size,
            "moe_router_score_function": experts.score,
            "moe_router_enable_expert_bias": experts.score == "sigmoid",
            "moe_router_topk_scaling_factor": experts.scaling if experts.score == "sigmoid" else None,
            "moe_latent_size": experts.latent_size,
            "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
            "moe_router_group_topk": experts.top_groups if experts.num_groups > 1 else None,
            "moe_router_load_balancing_type": "aux_loss",
        }
    return arguments


def _model_state(model: MambaModel, architecture: HybridArchitecture, singleton_experts: bool) -> dict[str, Any]:
    state = model.sharded_state_dict(metadata={"singleton_local_shards": singleton_experts})
    for layer, symbol in enumerate(architecture.pattern):
        if symbol in FUSED_NORMS:
            here, fused = (f"decoder.layers.{layer}.{name}" for name in FUSED_NORMS[symbol])
            state[here].key = fused
    for part in state.values():
        if isinstance(part, ShardedObject):
            part.data = io.BytesIO(b"scales of quantized training")
    return state


def _sharded(name: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(name, torch.ones(4))


DENSE = HybridArchitecture(
    pattern="M-*-M",
    vocab_size=128,
    hidden_size=32,
    max_sequence_length=512,
    norm_eps=1e-4,
    recurrent=MambaSizes(4, 8, 8, 2, ssm_chunk_size=128, gated_norm_eps=1e-5),
    attention=AttentionSizes(4, 2, 8),
    feed_forward=FeedForwardSizes(48, "relu2", gated=False),
)

EXPERTS = replace(DENSE, pattern="ME*E", experts=ExpertsSizes(4, 2, 24, 40, "sigmoid", scaling=2.5))
