"""Random weights for which every layer changes the logits, and greedy text does not repeat one token."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

_LOGIT_STD = 2.0
_EMBEDDING_STD = 0.2  # after all multipliers; well below what layers add, or tied embeddings copy their input
_OUTPUT_STD = 0.3
_ZERO_CENTERED = {"Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"}


@torch.no_grad()
def spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Fill all parameters and weight buffers with random values, in place."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))

    def normal(tensor: Tensor, std: float) -> None:
        tensor.copy_(std * torch.randn(tensor.shape, generator=generator))

    zero_centered = _zero_centered_norms(model)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, uniform, normal)
        if name in zero_centered:
            parameter.sub_(1.0)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            uniform(buffer, 0.0, 0.2)
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    multipliers = [getattr(model.config, f"{part}_multiplier", 1.0) for part in ("residual", "embedding")]
    normal(embeddings, _EMBEDDING_STD * multipliers[0] / multipliers[1])
    if output is not embeddings:
        normal(output, _OUTPUT_STD)
        if model.config.tie_word_embeddings:  # as a family does that declares this and has transformers tie nothing
            output.copy_(embeddings)
    wanted_std = _LOGIT_STD * getattr(model.config, "logits_scaling", 1.0)
    offset = 1.0 if zero_centered else 0.0
    factor = wanted_std / output.square().sum(-1).mean().sqrt()
    _final_norm(model).add_(offset).mul_(factor).sub_(offset)


def _fill(
    name: str, parameter: Tensor, uniform: Callable[[Tensor, float, float], None], normal: Callable[..., None]
) -> None:
    last = name.rpartition(".")[2]
    if last == "dt_bias":
        uniform(parameter, -3.0, 0.0)  # time steps of 0.05 to 0.7: states remember dozens of tokens
    elif last == "A_log":
        uniform(parameter, 0.0, 1.5)
    elif last == "D":
        uniform(parameter, 0.5, 1.0)
    elif "norm" in name:
        uniform(parameter, 0.7, 1.3)
    elif "conv1d" in name:
        normal(parameter, 0.5 if last == "weight" else 0.2)
    else:
        normal(parameter, 1.2 / parameter.shape[-1] ** 0.5)


def _zero_centered_norms(model: PreTrainedModel) -> set[str]:
    """Return the names of norm weights w whose factor is 1 + w."""
    modules = model.named_modules()
    return {f"{name}.weight" for name, module in modules if type(module).__name__ in _ZERO_CENTERED}


def _final_norm(model: PreTrainedModel) -> Tensor:
    inner = getattr(model.base_model, "language_model", model.base_model)
    names = ("norm_f", "final_layernorm", "norm")
    return next(getattr(inner, name).weight for name in names if hasattr(inner, name))
