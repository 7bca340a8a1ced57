"""Random hybrid models whose weights are quantized, for tests that do not depend on the values of weights."""

import torch
from torch import Tensor

from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedForm, QuantizedMatrix
from megatron_mamba_cache.mcore.linear import PromptTokens, QuantizableLinear
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.stacked_experts import EXPERT_WEIGHTS, StackedExperts
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig
from tests.mcore.engine_runs import Hybrid, build_model, hybrid

QUANTIZED_FORMS = {
    "FP8 rows": QuantizedForm(8, has_factors=True),
    "FP8 blocks": QuantizedForm(8, torch.float32, block_rows=16, block_columns=32),
    "NVFP4": QuantizedForm(4, torch.float8_e4m3fn, has_factors=True, block_columns=16),
}


def quantized_hybrid(sizes: RandomHybridConfig, form: QuantizedForm, *, quantizes_activations: bool) -> Hybrid:
    """Return a model of these sizes with zeros as its quantized weights: all layers but the output layer."""
    model = build_model(sizes)
    device, prompt_tokens = next(model.parameters()).device, PromptTokens()
    for name, module in model.decoder.named_modules():
        matrices: list[QuantizedMatrix | Tensor | None] = []
        if isinstance(module, QuantizableLinear):
            module.keep_quantized(form, 0, device)
            if quantizes_activations:
                module.quantize_activations(prompt_tokens, None)
            matrices.append(module.quantized)
        elif isinstance(module, StackedExperts):
            for weight in EXPERT_WEIGHTS:
                module.keep_quantized(weight, form, device)
                matrices.append(module.weight(weight))
            if quantizes_activations:
                module.quantize_activations(prompt_tokens, dict.fromkeys(EXPERT_WEIGHTS))
        for matrix in matrices:
            assert isinstance(matrix, QuantizedMatrix), name
            for part in (matrix.words, matrix.scales, matrix.factors):
                if part is not None:
                    part.view(torch.uint8).zero_()
    return Hybrid(sizes, model, hybrid(sizes).oracle, model_shape_of(model))
