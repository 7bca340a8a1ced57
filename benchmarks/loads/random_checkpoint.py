"""NemotronH models with random weights: built directly, or written in Hugging Face layout without transformers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel
from safetensors.torch import save_file
from torch import Tensor

from megatron_mamba_cache.models.architecture import HybridArchitecture
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.families.nemotron_h import architecture_of, placements_of
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model
from megatron_mamba_cache.models.placement import ModelFiller
from megatron_mamba_cache.models.rank_part import RankPart

STD = 0.02
COMMON_FIELDS = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "tie_word_embeddings": False,
}


def write_checkpoint(directory: Path, fields: dict[str, Any], max_shard_bytes: int, device: str) -> int:
    """Write the configuration and bf16 weights, drawn on a device; return the bytes of the weights.

    Args:
        fields: Fields of the configuration, besides `COMMON_FIELDS`.
        max_shard_bytes: Most bytes of a file; also roughly the host memory used for the weights.
    """
    config = COMMON_FIELDS | fields
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    architecture = architecture_of(CheckpointConfig(config, "config.json"))
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0
    for name, drawn in random_tensors(architecture, device):
        tensor = drawn.cpu()
        if shard and size + tensor.nbytes > max_shard_bytes:
            _write_shard(directory, shard, weight_map)
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    _write_shard(directory, shard, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def random_model(fields: dict[str, Any], dtype: torch.dtype) -> MambaModel:
    """Build the model of a configuration on the current device, with the weights that `write_checkpoint` writes."""
    architecture = architecture_of(CheckpointConfig(COMMON_FIELDS | fields, "the configuration"))
    model = build_hybrid_model(architecture, dtype)
    filler = ModelFiller(
        model,
        placements_of(architecture),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        RankPart.of_process(architecture).local_name,
    )
    for name, tensor in random_tensors(architecture, str(next(model.parameters()).device)):
        filler.fill(name, tensor)
    if unfilled := filler.unfilled():
        raise ValueError(f"no weights were drawn for {', '.join(unfilled)}")
    return model


def random_tensors(architecture: HybridArchitecture, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and bf16 values of each tensor of a NemotronH checkpoint, drawn on the device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in tensor_shapes(architecture):
        yield name, _drawn(name, shape, len(architecture.pattern), generator)


def tensor_shapes(architecture: HybridArchitecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each tensor of a NemotronH checkpoint, layer by layer."""
    hidden, shapes_of = architecture.hidden_size, {"M": _mamba, "*": _attention, "-": _mlp, "E": _mixture}
    yield "backbone.embeddings.weight", (architecture.vocab_size, hidden)
    for layer, symbol in enumerate(architecture.pattern):
        prefix = f"backbone.layers.{layer}."
        yield f"{prefix}norm.weight", (hidden,)
        for name, shape in shapes_of[symbol](architecture).items():
            yield f"{prefix}mixer.{name}", shape
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (architecture.vocab_size, hidden)


def _mamba(architecture: HybridArchitecture) -> dict[str, tuple[int, ...]]:
    mamba, hidden = architecture.mamba, architecture.hidden_size
    inner, bc = mamba.num_heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
    return {
        "in_proj.weight": (2 * inner + 2 * bc + mamba.num_heads, hidden),
        "conv1d.weight": (inner + 2 * bc, 1, mamba.d_conv),
        "conv1d.bias": (inner + 2 * bc,),
        "dt_bias": (mamba.num_heads,),
        "A_log": (mamba.num_heads,),
        "D": (mamba.num_heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }


def _attention(architecture: HybridArchitecture) -> dict[str, tuple[int, ...]]:
    attention, hidden = architecture.attention, architecture.hidden_size
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    return {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
    }


def _mlp(architecture: HybridArchitecture) -> dict[str, tuple[int, ...]]:
    inner, hidden = architecture.feed_forward.hidden_size, architecture.hidden_size
    return {"up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner)}


def _mixture(architecture: HybridArchitecture) -> dict[str, tuple[int, ...]]:
    experts, hidden = architecture.experts, architecture.hidden_size
    assert experts is not None
    between = experts.latent_size or hidden
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts.num_experts, hidden),
        "gate.e_score_correction_bias": (experts.num_experts,),
        "shared_experts.up_proj.weight": (experts.shared_hidden_size, hidden),
        "shared_experts.down_proj.weight": (hidden, experts.shared_hidden_size),
    }
    if experts.latent_size is not None:
        shapes |= {"fc1_latent_proj.weight": (between, hidden), "fc2_latent_proj.weight": (hidden, between)}
    for number in range(experts.num_experts):
        shapes[f"experts.{number}.up_proj.weight"] = (experts.hidden_size, between)
        shapes[f"experts.{number}.down_proj.weight"] = (between, experts.hidden_size)
    return shapes


def _drawn(name: str, shape: tuple[int, ...], num_layers: int, generator: torch.Generator) -> Tensor:
    """Draw weights that keep activations of order one at any depth."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    last = name.rpartition(".")[2]
    if last in ("A_log", "dt_bias"):
        low, high = {"A_log": (0.0, math.log(16)), "dt_bias": (-4.0, -1.0)}[last]
        return tensor.uniform_(low, high, generator=generator)
    if last == "e_score_correction_bias":
        return tensor.zero_()
    if last == "D" or "norm" in name:
        return tensor.fill_(1.0)
    if "conv1d" in name:
        return tensor.zero_() if last == "bias" else tensor.uniform_(-0.5, 0.5, generator=generator)
    into_residual = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "fc2_latent_proj.weight"))
    return tensor.normal_(0.0, STD / math.sqrt(num_layers) if into_residual else STD, generator=generator)


def _write_shard(directory: Path, shard: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    """Write the tensors to the next file, record where they are, and free them."""
    file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
    save_file(shard, directory / file, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(shard, file))
    shard.clear()
