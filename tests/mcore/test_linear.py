"""Linear layers use Megatron's autograd function only for a gradient or a bias."""

import pytest
import torch

from megatron_mamba_cache.mcore.linear import OneTokenColumnLinear, OneTokenRowLinear
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_hybrid_model


@pytest.mark.parametrize("kind", [OneTokenColumnLinear, OneTokenRowLinear])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("mode", ["inference", "no gradient", "gradient", "bias", "bias by place", "split tokens"])
def test_linear_layers_skip_the_autograd_function_if_no_gradient_is_needed(
    kind: type, num_tokens: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_hybrid_model(RandomHybridConfig(pattern="M*-"))
    layer = next(module for module in model.modules() if type(module) is kind)
    taken = []
    whole = type(layer).__mro__[1]._forward_impl

    def noted(self: object, *args: object, **settings: object) -> torch.Tensor:
        taken.append(1)
        settings["sequence_parallel"] = False  # there is one rank
        return whole(self, *args, **settings)

    monkeypatch.setattr(type(layer).__mro__[1], "_forward_impl", noted)
    x = torch.randn(num_tokens, 1, layer.weight.shape[1], device=layer.weight.device)
    x.requires_grad_(mode == "gradient")
    plain = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "tp_group": None}
    bias = torch.ones(layer.weight.shape[0], device=x.device)
    if mode == "split tokens":
        with torch.inference_mode():
            out = layer._forward_impl(input=x, weight=layer.weight, bias=None, sequence_parallel=True, **plain)
    elif mode.startswith("bias"):
        given = ((bias,), {}) if mode == "bias by place" else ((), {"bias": bias})
        with torch.inference_mode():
            out = layer._forward_impl(x, layer.weight, *given[0], sequence_parallel=False, **given[1], **plain) - bias
    else:
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "gradient"):
            out, _ = layer(x)
    torch.testing.assert_close(out, x @ layer.weight.T, rtol=1e-5, atol=1e-5)
    assert bool(taken) == (mode not in ("inference", "no gradient"))
    if mode == "gradient":
        out.sum().backward()
        assert x.grad is not None and bool((x.grad != 0).any())
