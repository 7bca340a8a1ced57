"""Compare models whose weights stay quantized with those of dequantized weights."""

import torch

from megatron_mamba_cache.mcore.linear import QuantizableLinear
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel


def assert_means(kept: LoadedModel, dequantized: LoadedModel) -> None:
    """Check that a model, whose weights may be quantized, means the weights of another.

    The inverse of a scale is rounded to float32, and then a weight may differ by the last bit of bf16.
    """
    plain, means = dict(dequantized.model.named_parameters()), {}
    for name, module in kept.model.named_modules():
        if isinstance(module, QuantizableLinear) and module.form is not None:
            values = [module.quantized.dequantized(torch.bfloat16)]
            values += [] if module.plain_weight is None else [module.plain_weight]
            means[f"{name}.weight"] = torch.cat(values)
        elif isinstance(module, StackedExperts) and module.forms:
            for own in ("linear_fc1", "linear_fc2"):
                weight = module.weight(own)
                means[f"{name}.{own}"] = weight if own not in module.forms else weight.dequantized(torch.bfloat16)
        else:
            means |= {f"{name}.{own}": parameter for own, parameter in module.named_parameters(recurse=False)}
    assert means.keys() == plain.keys()
    for name, values in means.items():
        torch.testing.assert_close(values, plain[name].data, rtol=2**-7, atol=0)
        assert (values == plain[name]).float().mean() > 0.99


def num_kept(loaded: LoadedModel) -> int:
    """Return how many weights of a model stay quantized, the experts of a layer as one."""
    linears = sum(isinstance(one, QuantizableLinear) and one.form is not None for one in loaded.model.modules())
    return linears + sum(len(one.forms) for one in loaded.model.modules() if isinstance(one, StackedExperts))
