"""The first GEMM and its activation are one kernel, for one token, and for hundreds in a shared expert."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_mamba_cache.kernels import one_token
from megatron_mamba_cache.kernels.activations import gated_silu_ref, squared_relu
from megatron_mamba_cache.kernels.experts import overlapped_expert
from megatron_mamba_cache.mcore import expert_layer, feed_forward, linear
from megatron_mamba_cache.mcore.feed_forward import FeedForward, SharedFeedForward, fused_activation
from megatron_mamba_cache.models.architecture import FeedForwardSizes
from megatron_mamba_cache.models.hybrid_model import build_hybrid_model
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_architecture, random_hybrid_model


def config(**changed: Any) -> SimpleNamespace:
    plain = {"activation_func": squared_relu, "gated_linear_unit": False, "glu_linear_offset": 0.0}
    return SimpleNamespace(**plain | {"activation_func_clamp_value": None} | changed)


GATED = {"activation_func": nn.functional.silu, "gated_linear_unit": True}


@pytest.mark.parametrize(
    ("changed", "activation"),
    [
        ({}, "squared_relu"),
        ({"gated_linear_unit": True}, "none"),
        ({"activation_func": nn.functional.silu}, "none"),
        ({"activation_func": nn.functional.silu, "gated_linear_unit": True}, "gated_silu"),
        ({"activation_func": nn.functional.silu, "gated_linear_unit": True, "glu_linear_offset": 1.0}, "none"),
        (
            {"activation_func": nn.functional.silu, "gated_linear_unit": True, "activation_func_clamp_value": 7.0},
            "none",
        ),
    ],
)
def test_only_supported_activations_are_fused(changed: dict[str, Any], activation: str) -> None:
    assert fused_activation(config(**changed)) == activation


@pytest.mark.parametrize("kind", [FeedForward, SharedFeedForward])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_single_token_step_uses_the_fused_gemm(
    kind: type, num_tokens: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    model = random_hybrid_model(RandomHybridConfig(pattern="M*-E")).to(torch.bfloat16)
    layer = model.decoder.layers[2].mlp if kind is FeedForward else model.decoder.layers[3].mlp.shared_experts
    assert type(layer) is kind
    x = torch.randn(num_tokens, 1, layer.config.hidden_size, device=next(layer.parameters()).device).bfloat16()
    calls = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, activation: Any = "none") -> torch.Tensor:
        calls.append(activation)
        return one_token.multiply_one_token_ref(x, weight, activation)

    with torch.inference_mode():
        expected = layer(x)
        monkeypatch.setattr(one_token, "launches_kernel", lambda x: True)
        monkeypatch.setattr(linear, "multiply_one_token", multiply)
        found = layer(x)
    assert calls == ([fused_activation(layer.config), "none"] if num_tokens == 1 else [])
    pair = [(out[0] if isinstance(out, tuple) else out).float() for out in (found, expected)]
    torch.testing.assert_close(*pair, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("activation", "gated"), [("relu2", False), ("silu", True)])
@pytest.mark.parametrize("latent_size", [None, 32])
@pytest.mark.parametrize("num_tokens", [256, 257, 1024, 1025])
def test_overlapping_the_shared_expert_with_routing_changes_no_output(
    num_tokens: int, latent_size: int | None, activation: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first GEMM is then a grouped one; on a GPU in long tiles."""
    sizes = random_architecture(RandomHybridConfig(pattern="M*E"))
    assert sizes.experts is not None
    experts, dense = replace(sizes.experts, latent_size=latent_size), FeedForwardSizes(64, activation, gated)
    model = build_hybrid_model(replace(sizes, experts=experts, feed_forward=dense), torch.float32)
    layer, generator, taken = model.decoder.layers[2].mlp, torch.Generator().manual_seed(0), []
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    x = torch.randn(num_tokens, 1, layer.config.hidden_size, generator=generator).to(layer.router.weight.device)

    def noted_product(*args: Any) -> torch.Tensor:
        taken.append(args)
        return overlapped_expert.shared_gemm(*args)

    with torch.inference_mode():
        expected = layer(x)
        monkeypatch.setattr(overlapped_expert, "takes_long_tiles", lambda *args, **settings: True)
        monkeypatch.setattr(expert_layer, "shared_gemm", noted_product)
        found = layer(x)
    assert len(taken) == (256 < num_tokens <= 1024)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{num_tokens} tokens, {activation}: {error:.2e} of the largest output")
    assert error < 1e-5


@pytest.mark.parametrize("kind", [FeedForward, SharedFeedForward])
def test_gated_layers_run_one_kernel_between_their_gemms(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_hybrid_model(RandomHybridConfig(pattern="M*-E", gated=True))
    layer = model.decoder.layers[2].mlp if kind is FeedForward else model.decoder.layers[3].mlp.shared_experts
    x = torch.randn(5, 1, layer.config.hidden_size, device=next(layer.parameters()).device)
    shapes = []

    def noted(products: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(products.shape))
        return gated_silu_ref(products)

    with torch.inference_mode():
        expected = super(FeedForward, layer).forward(x)[0]  # Megatron's
        monkeypatch.setattr(feed_forward, "gated_silu", noted)
        found = layer(x)
    assert shapes == [(5, 1, layer.linear_fc1.weight.shape[0])]
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, expected)


@pytest.mark.parametrize("reason", ["bias", "gradient", "scale", "split tokens"])
def test_gated_layers_with_unsupported_features_run_megatrons_code(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_hybrid_model(RandomHybridConfig(pattern="M*-", gated=True)).decoder.layers[2].mlp
    weight = layer.linear_fc1.weight
    x = torch.randn(5, 1, layer.config.hidden_size, device=weight.device, requires_grad=reason == "gradient")
    scale = 2 * torch.ones(5, 1, device=x.device) if reason == "scale" else None
    if reason == "bias":
        layer.linear_fc1.bias = nn.Parameter(torch.ones(weight.shape[0], device=x.device))
    monkeypatch.setattr(layer.config, "sequence_parallel", reason == "split tokens")
    monkeypatch.setattr(feed_forward, "gated_silu", lambda products: pytest.fail("took the kernel"))
    with torch.inference_mode(reason != "gradient"), torch.set_grad_enabled(reason == "gradient"):
        assert torch.equal(layer(x, scale)[0], super(FeedForward, layer).forward(x, scale)[0])
