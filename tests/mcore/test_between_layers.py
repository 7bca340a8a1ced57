"""Norms and residual sums between layers match torch, in the dtype of the model's weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_mamba_cache.mcore import between_layers
from megatron_mamba_cache.mcore.between_layers import LayerNorm, LayerRMSNorm, ResidualAdd
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_hybrid_model


def config(normalization: str, dtype: torch.dtype) -> SimpleNamespace:
    unwanted = ("layernorm_zero_centered_gamma", "persist_layer_norm", "sequence_parallel")
    absent = dict.fromkeys((*unwanted, "memory_efficient_layer_norm"), False)
    return SimpleNamespace(normalization=normalization, params_dtype=dtype, **absent)


@pytest.fixture(params=["chosen", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on the chosen path and on that of the op, which is its reference on a CPU."""
    if request.param == "kernel":
        monkeypatch.setattr(between_layers, "launches_kernel", lambda x: True)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_rms_norm_matches_torch_in_every_implementation(dtype: torch.dtype, tolerance: float, device: str) -> None:
    torch.manual_seed(0)
    norm = LayerNorm(config("RMSNorm", dtype), 96, eps=1e-3).to(device)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 3, 96, device=device).to(dtype).transpose(0, 1)
    with torch.inference_mode():
        out, expected = norm(x), nn.functional.rms_norm(x.double(), (96,), norm.weight.double(), 1e-3)
    assert isinstance(norm, LayerRMSNorm) and norm.weight.dtype == out.dtype == dtype and out.shape == x.shape
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [(96,), (2, 3, 96), (0, 96)])
@pytest.mark.parametrize("step", [1, 2])
def test_rms_norm_accepts_inputs_of_any_shape(shape: tuple[int, ...], step: int, device: str) -> None:
    norm = LayerNorm(config("RMSNorm", torch.float32), 96, eps=1e-3).to(device)
    x = torch.randn(*shape[:-1], step * shape[-1], device=device)[..., ::step]
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (96,), norm.weight, 1e-3))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("step", [1, 2])
def test_zero_centered_norm_multiplies_by_one_plus_its_weights(
    dtype: torch.dtype, tolerance: float, step: int, device: str
) -> None:
    torch.manual_seed(0)
    zero_centered = SimpleNamespace(**vars(config("RMSNorm", dtype)) | {"layernorm_zero_centered_gamma": True})
    norm = LayerNorm(zero_centered, 96, eps=1e-3).to(device)
    x = torch.randn(5, 3, step * 96, device=device).to(dtype)[..., ::step]
    assert zero_centered.layernorm_zero_centered_gamma and not norm.weight.any()
    with torch.inference_mode():
        nn.init.normal_(norm.weight)
        out, expected = norm(x), nn.functional.rms_norm(x.double(), (96,), 1 + norm.weight.double(), 1e-3)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_zero_centered_layer_norm_is_refused() -> None:
    layer_norm = SimpleNamespace(**vars(config("LayerNorm", torch.float32)) | {"layernorm_zero_centered_gamma": True})
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        LayerNorm(layer_norm, 8)


def test_layer_norm_is_an_nn_layer_norm() -> None:
    norm = LayerNorm(config("LayerNorm", torch.bfloat16), 8)
    assert type(norm) is nn.LayerNorm and norm.weight.dtype == torch.bfloat16


def summed(multiplier: float = 1.0, offset: float = 0.0) -> tuple[ResidualAdd, LayerRMSNorm]:
    add, norm = ResidualAdd(multiplier), LayerRMSNorm(96, 1e-3, offset)
    nn.init.normal_(norm.weight)
    add.next_norm = norm
    return add, norm


@pytest.mark.parametrize(("multiplier", "offset"), [(1.0, 0.0), (0.5, 0.0), (1.0, 1.0)])
def test_residual_addition_also_computes_the_next_layers_norm(
    multiplier: float, offset: float, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    add, norm = summed(multiplier, offset)
    norm.to(device)
    output, residual = (torch.randn(3, 1, 96, device=device) for _ in range(2))
    with torch.inference_mode(), torch.enable_grad():  # as Megatron does for sums
        apart = residual + multiplier * output
        expected = nn.functional.rms_norm(apart, (96,), norm.weight + offset, 1e-3)
        monkeypatch.setattr(between_layers, "launches_kernel", lambda x: True)
        total = add(False, False)((output, None), residual, 0.0)
        monkeypatch.setattr(between_layers, "gated_group_norm", None)  # is not called
        normed = norm(total)
    torch.testing.assert_close(total, apart)
    torch.testing.assert_close(normed, expected)


def test_precomputed_norm_is_used_only_for_the_tensor_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    add, norm = summed()
    norm.to(device)
    with torch.inference_mode():
        monkeypatch.setattr(between_layers, "launches_kernel", lambda x: True)
        total = add(False, False)((torch.randn(3, 96, device=device), None), torch.randn(3, 96, device=device), 0.0)
        other = total + 1
        torch.testing.assert_close(norm(other), nn.functional.rms_norm(other, (96,), norm.weight, 1e-3))
        torch.testing.assert_close(norm(total), nn.functional.rms_norm(total, (96,), norm.weight, 1e-3))


def test_residual_addition_refuses_training_mode() -> None:
    with pytest.raises(NotImplementedError, match=r"call model\.eval"):
        ResidualAdd()(True, False)


def test_every_layer_computes_the_next_layers_norm() -> None:
    stack = random_hybrid_model(RandomHybridConfig(pattern="M*-ME")).decoder
    adds = [stack.layers[0].mamba_bda, stack.layers[1].self_attn_bda, stack.layers[2].mlp_bda]
    adds += [stack.layers[3].mamba_bda, stack.layers[4].mlp_bda]
    norms = [stack.layers[0].norm, stack.layers[1].input_layernorm, stack.layers[2].pre_mlp_layernorm]
    norms += [stack.layers[3].norm, stack.layers[4].pre_mlp_layernorm]
    assert [add.next_norm for add in adds] == [*norms[1:], stack.final_norm]
    assert not any("next_norm" in name for name in stack.state_dict())
