"""Random quantized weights, of the tensors and in the formats that published checkpoints quantize."""

import math
import re
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix
from megatron_mamba_cache.mcore.linear import QuantizableLinear
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.models.checkpoints.quantized_weights import NVFP4, WeightFormat, fp8

Weights = Literal["bf16", "fp8", "nvfp4"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)

_NEMOTRON = "nemotron_h"
QUANTIZED_FAMILIES = (_NEMOTRON, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model families whose quantized files are known here."""

_IN_BLOCKS = fp8(128, 128, "dynamic")
_PER_TENSOR = fp8(None, None, "static")
_QWEN_NAMES = re.compile(r"_proj(_qkv|_z|_qkvz)?\.weight$")  # b and a of Gated DeltaNet are not quantized
_NEMOTRON_NAMES = re.compile(
    r"layers\.(?P<layer>\d+)\.mixer\.(?P<shared>shared_experts\.)?.*\b(?P<part>\w+)_proj\.weight$"
)
_MAMBA, _EXPERTS = ("in", "out"), ("up", "down")

_LARGEST_E4M3 = 448.0
_STDS_TO_LARGEST = 4.0  # of normal weights in a block of some thousands
_E2M1_STD = 2.93  # of equally likely codes
_SCALE_RANGE = (128.0, 448.0)  # of the e4m3 scales of NVFP4
_LARGEST_ACTIVATION = 6.0
_SLAB = 2**26


def formats_of(family: str, pattern: str, names: Iterable[str], weights: Weights) -> dict[str, WeightFormat]:
    """Return the format of each tensor that published files quantize; {} for bf16.

    - Qwen: FP8 in blocks of 128 x 128, or NVFP4: all projections.
    - Nemotron, FP8: a scale per tensor; experts, MLPs and Mamba layers, except those right before attention.
    - Nemotron, NVFP4: routed experts and MLPs; FP8 as above: shared experts and all Mamba layers.

    Args:
        family: `model_type` of the model, one of `QUANTIZED_FAMILIES`.
        pattern: One symbol per layer of the model.
        names: Tensors of the checkpoint.

    Raises:
        ValueError: If the family is another one.
    """
    if weights == "bf16":
        return {}
    if family not in QUANTIZED_FAMILIES:
        raise ValueError(f"weights in {weights} need one of the families {QUANTIZED_FAMILIES}, found {family}")
    if family != _NEMOTRON:
        return dict.fromkeys(filter(_QWEN_NAMES.search, names), _IN_BLOCKS if weights == "fp8" else NVFP4)
    found = {name: _nemotron_format(name, pattern, weights) for name in names}
    return {name: format for name, format in found.items() if format is not None}


def _nemotron_format(name: str, pattern: str, weights: Weights) -> WeightFormat | None:
    match = _NEMOTRON_NAMES.search(name)
    if match is None:
        return None
    if match["part"] in _EXPERTS:
        return NVFP4 if weights == "nvfp4" and match["shared"] is None else _PER_TENSOR
    is_kept = weights == "fp8" and pattern[int(match["layer"]) + 1 :].startswith("*")
    return _PER_TENSOR if match["part"] in _MAMBA and not is_kept else None


@torch.no_grad()
def fill_quantized(model: nn.Module, std: float, residual_std: float) -> None:
    """Fill all quantized weights of a model, and the plain rows of its quantized layers, in place.

    Args:
        std, residual_std: Standard deviation of the weights, and of those whose outputs are added to the residual.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizableLinear) and (matrix := module.quantized) is not None:
            of_weights = residual_std if name.endswith(("out_proj", "linear_proj", "linear_fc2")) else std
            _fill_matrix(matrix, of_weights)
            if module.plain_weight is not None:
                module.plain_weight.normal_(0.0, of_weights)
            if module.activation_scale is not None:
                module.activation_scale.fill_(_LARGEST_ACTIVATION / _LARGEST_E4M3)
        elif isinstance(module, StackedExperts):
            for weight in module.forms:
                stack = module.weight(weight)
                assert isinstance(stack, QuantizedMatrix)
                _fill_matrix(stack, residual_std if weight == "linear_fc2" else std)
                scale = getattr(module, f"{weight}_activation_scale")
                if scale is not None:
                    scale.fill_(_LARGEST_ACTIVATION / _LARGEST_E4M3)


def _fill_matrix(matrix: QuantizedMatrix, std: float) -> None:
    """Fill codes, scales and factors so that the weights have this standard deviation."""
    for octets in matrix.words.view(torch.uint8).flatten().split(_SLAB):
        octets.copy_(_e4m3_codes(octets) if matrix.code_bits == 8 else torch.randint_like(octets, 256))
    code_std = _LARGEST_E4M3 / _STDS_TO_LARGEST if matrix.code_bits == 8 else _E2M1_STD
    factor = std / code_std
    if matrix.scales is not None and matrix.factors is None:
        matrix.scales.copy_(factor * torch.empty_like(matrix.scales).uniform_(0.8, 1.2))
    elif matrix.scales is not None:
        low, high = _SCALE_RANGE
        matrix.scales.copy_(torch.empty(matrix.scales.shape, device=matrix.scales.device).uniform_(low, high))
        factor /= math.sqrt((low * low + low * high + high * high) / 3)
    if matrix.factors is not None:
        matrix.factors.fill_(factor)


def _e4m3_codes(octets: Tensor) -> Tensor:
    """Return codes of normal values, none of which is a NaN."""
    values = torch.randn(octets.shape, device=octets.device) * (_LARGEST_E4M3 / _STDS_TO_LARGEST)
    return values.clamp_(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
