"""The norm of layers: torch's numbers, and weights of the model's dtype."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_mamba_cache.mcore import layer_norm
from megatron_mamba_cache.mcore.layer_norm import LayerNorm, LayerRMSNorm


def config(normalization: str, dtype: torch.dtype) -> SimpleNamespace:
    unwanted = ("layernorm_zero_centered_gamma", "persist_layer_norm", "sequence_parallel")
    absent = dict.fromkeys((*unwanted, "memory_efficient_layer_norm"), False)
    return SimpleNamespace(normalization=normalization, params_dtype=dtype, **absent)


@pytest.fixture(params=["chosen", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel's op compute where it would not, too; there its twin does."""
    if request.param == "kernel":
        monkeypatch.setattr(layer_norm, "launches_kernel", lambda x: True)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_an_rms_norm_has_torchs_numbers_whatever_computes_it(dtype: torch.dtype, tolerance: float, device: str) -> None:
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
def test_rows_of_any_form_are_normalized(shape: tuple[int, ...], step: int, device: str) -> None:
    norm = LayerNorm(config("RMSNorm", torch.float32), 96, eps=1e-3).to(device)
    x = torch.randn(*shape[:-1], step * shape[-1], device=device)[..., ::step]
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (96,), norm.weight, 1e-3))


def test_another_norm_is_torchs() -> None:
    norm = LayerNorm(config("LayerNorm", torch.bfloat16), 8)
    assert type(norm) is nn.LayerNorm and norm.weight.dtype == torch.bfloat16
