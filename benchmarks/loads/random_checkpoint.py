"""Models with random weights, built in memory or written as a Hugging Face checkpoint without transformers."""

import json
import math
from collections.abc import Container, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from loads.random_codes import Weights, fill_quantized, formats_of
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel
from safetensors.torch import save_file
from torch import Tensor

from megatron_mamba_cache.models.architecture import HybridArchitecture
from megatron_mamba_cache.models.checkpoints.checkpoint_config import CheckpointConfig
from megatron_mamba_cache.models.checkpoints.checkpoint_family import FAMILIES
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model, check_buildable
from megatron_mamba_cache.models.kept_form import Ranks
from megatron_mamba_cache.models.parameter_shapes import filled_of
from megatron_mamba_cache.models.placement import ModelFiller, stored_shape
from megatron_mamba_cache.models.quantized_targets import QuantizedFiller
from megatron_mamba_cache.models.rank_shard import RankShard

STD = 0.02
_BLOCK = 128
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
_COMMON_FIELDS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "conv_kernel": 4,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
    },
    "bamba": {"architectures": ["BambaForCausalLM"], "mamba_conv_bias": True, "tie_word_embeddings": False},
    "granitemoehybrid": {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_conv_bias": True},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "tie_word_embeddings": False},
    "qwen3_5_text": {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": False},
    "qwen3_5_moe_text": {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": False},
}
_INTO_RESIDUAL = tuple(
    f"{name}.weight" for name in ("out_proj", "o_proj", "down_proj", "fc2_latent_proj", "output_linear")
)


def complete(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration fields with the defaults of the model family added; the default family is NemotronH."""
    family = fields.get("model_type", "nemotron_h")
    return {"model_type": family, "dtype": "bfloat16"} | _COMMON_FIELDS[family] | fields


def described(fields: dict[str, Any]) -> tuple[ModuleType, HybridArchitecture]:
    """Return the module of the model family and the architecture that a configuration describes."""
    config = complete(fields)
    family = FAMILIES[config["model_type"]]
    return family, family.architecture_of(CheckpointConfig(config, "the configuration"))


def write_checkpoint(
    directory: Path, fields: dict[str, Any], max_shard_bytes: int, device: str, is_fp8: bool = False
) -> int:
    """Write a configuration and random weights; return the size of the weights in bf16, in bytes.

    Args:
        fields: Configuration fields, to which `complete` adds defaults.
        max_shard_bytes: Maximum size of a file in bytes; also roughly the host memory needed.
        device: Device that generates the weights.
        is_fp8: If True, projections are block-quantized FP8 in the layout of transformers; otherwise all weights are
            bf16.
    """
    config = complete(fields) | ({"quantization_config": _FP8} if is_fp8 else {})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    family, architecture = described(fields)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0
    for name, value in random_tensors(family, architecture, device):
        stored = _in_blocks(name, value) if is_fp8 and "_proj" in name else {name: value.cpu()}
        num_bytes = sum(tensor.nbytes for tensor in stored.values())
        if shard and size + num_bytes > max_shard_bytes:
            _write_shard(directory, shard, weight_map)
            size = 0
        shard |= stored
        size += num_bytes
        total += value.nbytes
    _write_shard(directory, shard, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _in_blocks(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a matrix as e4m3 codes with one scale per block."""
    height, width = (-(-size // _BLOCK) for size in weight.shape)
    padded = weight.new_zeros(height * _BLOCK, width * _BLOCK, dtype=torch.float32)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(height, _BLOCK, width, _BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-6) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    stored = {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    return {part: tensor.cpu().contiguous() for part, tensor in stored.items()}


def random_model(
    fields: dict[str, Any], dtype: torch.dtype, weights: Weights = "bf16", *, quantizes_activations: bool = True
) -> MambaModel:
    """Build the model of a configuration on the current device; in bf16, with the weights of `write_checkpoint`.

    Quantized weights never take the memory of bf16.

    Args:
        quantizes_activations: True to quantize the activations of prompt tokens, as published files say.
    """
    family, architecture = described(fields)
    check_buildable(architecture)
    placements = family.placements_of(architecture)
    formats = formats_of(complete(fields)["model_type"], architecture.pattern, placements, weights)
    ranks = Ranks(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    local_name = RankShard.of_process(architecture).local_name
    shapes = _stored_shapes(family, architecture)
    kept: set[str] = set()

    def keep_quantized(model: MambaModel, device: torch.device) -> None:
        filler = QuantizedFiller(
            model,
            placements,
            formats,
            shapes,
            ranks,
            local_name,
            device,
            quantizes_activations=quantizes_activations,
        )
        kept.update(filter(filler.takes, placements))

    model = build_hybrid_model(architecture, dtype, keep_quantized if formats else None)
    fill_quantized(model, STD, _residual_std(architecture))
    others = {name: targets for name, targets in placements.items() if name not in kept}
    filler = ModelFiller(model, others, ranks.rank, ranks.size, local_name)
    for name, tensor in random_tensors(family, architecture, str(next(model.parameters()).device), kept):
        filler.fill(name, tensor)
    if unfilled := filler.unfilled():
        raise ValueError(f"no random weights were generated for {', '.join(unfilled)}")
    return model


def random_tensors(
    family: ModuleType, architecture: HybridArchitecture, device: str, left_out: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and bf16 values of each tensor of a checkpoint, except those left out, generated on `device`."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in _stored_shapes(family, architecture).items():
        if name not in left_out:
            yield name, _random_tensor(name, shape, architecture, generator)


def _stored_shapes(family: ModuleType, architecture: HybridArchitecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint by name."""
    shapes = {name: whole.shape for name, whole in filled_of(architecture).items()}
    return {name: stored_shape(targets, shapes) for name, targets in family.placements_of(architecture).items()}


def _residual_std(architecture: HybridArchitecture) -> float:
    """Return the standard deviation of weights whose outputs are added to the residual."""
    return STD / math.sqrt(len(architecture.pattern))


def _random_tensor(
    name: str, shape: tuple[int, ...], architecture: HybridArchitecture, generator: torch.Generator
) -> Tensor:
    """Return random weights with a scale that keeps activations of order one at any depth."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    last = name.rpartition(".")[2]
    if last in ("A_log", "dt_bias"):
        low, high = {"A_log": (0.0, math.log(16)), "dt_bias": (-4.0, -1.0)}[last]
        return tensor.uniform_(low, high, generator=generator)
    if last == "e_score_correction_bias":
        return tensor.zero_()
    if "norm" in name and architecture.zero_centered_norms and ".linear_attn." not in name:
        return tensor.normal_(0.0, STD, generator=generator)
    if last == "D" or "norm" in name:
        return tensor.fill_(1.0)
    if "conv1d" in name:
        return tensor.zero_() if last == "bias" else tensor.uniform_(-0.5, 0.5, generator=generator)
    std = _residual_std(architecture) if name.endswith(_INTO_RESIDUAL) else STD
    return tensor.normal_(0.0, std, generator=generator)


def _write_shard(directory: Path, shard: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    """Write the tensors to the next file, add their names to `weight_map`, and free them."""
    file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
    save_file(shard, directory / file, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(shard, file))
    shard.clear()
