"""A gated shared expert: its output times the sigmoid of one number per token, in any launch that adds it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_mamba_cache.kernels.experts import overlapped_expert, routed_experts
from megatron_mamba_cache.mcore import expert_layer, stacked_experts
from megatron_mamba_cache.mcore.expert_layer import MixtureOfExperts
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.model_ranks import initialize_single_process
from tests.mcore.configured_models import TINY_HYBRID


def gated_layer(dtype: torch.dtype = torch.float32, **settings: Any) -> MixtureOfExperts:
    """Return a layer of 7 experts, 3 per token, and a gated shared one; gated SiLU."""
    initialize_single_process()
    config = TransformerConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=2,
        num_moe_experts=7,
        moe_router_topk=3,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=48,
        moe_shared_expert_gate=True,
        activation_func=F.silu,
        gated_linear_unit=True,
        **TINY_HYBRID,
        params_dtype=dtype,
    )
    for name, value in settings.items():
        setattr(config, name, value)
    spec = local_hybrid_spec(LocalSpecOptions(num_experts=7))
    model = MambaModel(config, spec, vocab_size=64, max_sequence_length=64, hybrid_override_pattern="M*E")
    layer, generator = model.to(torch.cuda.current_device()).decoder.layers[2].mlp, torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    layer.shared_experts.gate_weight.data.mul_(4)
    return layer


def tokens(layer: MixtureOfExperts, number: int) -> Tensor:
    return torch.randn(number, 1, 64, generator=torch.Generator().manual_seed(number)).to(layer.router.weight)


def routed_and_gated(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Return the output computed separately: the layer without its shared expert, and that by Megatron's forward."""
    shared, layer.shared_experts = layer.shared_experts, None
    routed, layer.shared_experts = layer(x), shared
    ungated = shared.ungated(x)
    gated = ungated * F.linear(x, shared.gate_weight).sigmoid()
    assert not torch.equal(gated, ungated)
    return routed + gated


@pytest.fixture(params=["for the weighted sum", "for few tokens"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the launches of few tokens on a GPU, computed by references, or the others."""
    if request.param == "for few tokens":
        monkeypatch.setattr(routed_experts, "launches_kernel", lambda tensor: True)
    name: str = request.param
    return name


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_expert_kernels_apply_the_shared_experts_gate(
    num_tokens: int, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = gated_layer(dtype)
    x, taken = tokens(layer, num_tokens), []

    def noted(*args: Any, **settings: Any) -> Tensor:
        taken.append(settings["shared"] is not None)
        assert args[2].shape == (num_tokens, 4)  # a weight for each expert, and one for the shared one
        return routed_experts.routed_experts(*args, **settings)

    with torch.inference_mode():
        expected = routed_and_gated(layer, x)
        monkeypatch.setattr(stacked_experts, "routed_experts", noted)
        monkeypatch.setattr(type(layer.shared_experts), "forward", lambda *_: pytest.fail("took Megatron's forward"))
        found = layer(x)
    assert taken == [form == "for few tokens" and num_tokens <= 2]
    tolerance = (2e-2 if dtype is torch.bfloat16 else 1e-5) * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [257, 300])
def test_gate_is_applied_when_the_shared_expert_overlaps_routing(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, taken = gated_layer(), []
    x = tokens(layer, num_tokens)

    def noted_product(*args: Any) -> Tensor:
        taken.append(args)
        return overlapped_expert.shared_gemm(*args)

    with torch.inference_mode():
        expected = routed_and_gated(layer, x)
        monkeypatch.setattr(overlapped_expert, "takes_long_tiles", lambda *args, **settings: True)
        monkeypatch.setattr(expert_layer, "shared_gemm", noted_product)
        found = layer(x)
    assert len(taken) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 257])
def test_gate_is_applied_when_the_shared_expert_is_added_separately(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With latent projections, or experts on other ranks, the weighted sum lacks the shared expert."""
    monkeypatch.setattr(overlapped_expert, "takes_long_tiles", lambda *args, **settings: True)
    latent, exchanged = gated_layer(moe_latent_size=32), gated_layer()
    x = tokens(latent, num_tokens)
    with torch.inference_mode():
        expected = routed_and_gated(exchanged, x)
        torch.testing.assert_close(latent(x), routed_and_gated(latent, x), rtol=1e-4, atol=1e-5)
        exchanged.exchange = SimpleNamespace(
            gather=lambda x, num_exchanged: x,
            real_tokens=lambda batch: None,
            combine=lambda partial, num_tokens, addend: partial + addend,
        )
        torch.testing.assert_close(exchanged(x), expected, rtol=1e-4, atol=1e-5)
