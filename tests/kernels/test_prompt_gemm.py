"""Prompt tokens are quantized to the bit, and their FP8 products equal those of what codes and scales mean."""

import math

import pytest
import torch

from megatron_mamba_cache.kernels.quantized import activations as activations_module
from megatron_mamba_cache.kernels.quantized import prompt_gemm
from megatron_mamba_cache.kernels.quantized.activations import (
    ActivationScheme,
    quantize_activations,
    quantize_activations_ref,
)
from megatron_mamba_cache.kernels.quantized.prompt_gemm import (
    has_prompt_gemm,
    multiply_prompt_tokens,
    multiply_prompt_tokens_ref,
)
from megatron_mamba_cache.kernels.quantized.quantized_matrix import unpacked
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.test_quantized_gemm import fp4_matrix, fp8_matrix, tokens

ROUNDING = 2.0**-8
SCHEMES = {"groups": 128, "short groups": 32, "tokens": None, "fixed": None}


def scheme_of(name: str, device: str) -> ActivationScheme:
    return ActivationScheme(SCHEMES[name], torch.tensor([0.004], device=device) if name == "fixed" else None)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 32), (5, 160), (18, 1184), (0, 64)])
def test_activations_are_quantized_to_the_bit(name: str, num_tokens: int, columns: int, device: str) -> None:
    x, scheme = tokens(num_tokens, columns, device), scheme_of(name, device)
    x *= torch.rand(num_tokens, 1, device=device).exp2().mul(100)
    with launches_expected(activations_module, "_quantize_kernel", of_kernel=num_tokens > 0, device=device):
        found = quantize_activations(x, scheme)
    expected = quantize_activations_ref(x, scheme)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    assert not found.codes[num_tokens:].view(torch.uint8).any()


def test_codes_are_the_nearest_ones_in_the_order_of_weights(device: str) -> None:
    x = torch.zeros(1, 64, device=device).bfloat16()
    # The scale is 1. 17 and 19 are midway between codes: 16 and 20 have even ones. Small numbers are subnormal codes.
    x[0, :8] = torch.tensor([448, 17, 19, -21, 2**-9, 2**-10, 1.5 * 2**-9, -0.0], device=device)
    found = quantize_activations(x, ActivationScheme())
    assert found.scales[:, 0].tolist() == [1]
    codes = unpacked(found.codes.view(torch.int16), 8)[0, :8].view(torch.float8_e4m3fn)
    assert codes.float().tolist() == [448, 16, 20, -20, 2**-9, 0, 2**-8, 0]


def test_unusual_values_do_not_reach_other_tokens(device: str) -> None:
    x = torch.ones(6, 64, device=device).bfloat16()
    x[0] = 0
    x[1, 3], x[2, 3], x[3, 3] = math.nan, math.inf, 1e30
    x[4] = 1e-38
    found = quantize_activations(x, ActivationScheme(32)).dequantized(torch.float32)
    assert not found[0].any() and not found[4].any()
    assert found[1].isnan().sum() == 1
    assert found[2, :32].isnan().all()
    assert found[3].max().item() == pytest.approx(1e30, rel=2**-8)
    assert torch.equal(found[2, 32:], torch.ones(32, device=device)) and torch.equal(found[5], found[3, 32:].repeat(2))


def test_a_fixed_scale_saturates(device: str) -> None:
    x = torch.full((1, 32), 1000.0, device=device).bfloat16()
    scheme = ActivationScheme(None, torch.tensor([2.0], device=device))
    assert quantize_activations(x, scheme).dequantized(torch.float32).eq(896).all()


@pytest.mark.parametrize("uses_torch", [True, False])
@pytest.mark.parametrize("blocks", [None, (128, 128), (32, 64), (16, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (200, 160), (1, 32)])
@pytest.mark.parametrize("num_tokens", [1, 37, 64])
def test_product_equals_the_reference(
    num_tokens: int, rows: int, columns: int, blocks: tuple[int, int] | None, uses_torch: bool, device: str
) -> None:
    weight = fp8_matrix(rows, columns, blocks, device)
    x = quantize_activations(tokens(num_tokens, columns, device), ActivationScheme(blocks and blocks[1]))
    padded = torch.full((num_tokens + 1, rows + 8), 7.0, device=device).bfloat16()
    by_kernel = not (uses_torch and prompt_gemm._has_torch_form(weight) and device == "cuda")
    with launches_expected(prompt_gemm, "_prompt_gemm_kernel", of_kernel=by_kernel, device=device):
        found = multiply_prompt_tokens(x, weight, out=padded[:num_tokens, :rows], uses_torch=uses_torch)
    assert padded[num_tokens:].eq(7).all() and padded[:, rows:].eq(7).all()
    assert torch.equal(multiply_prompt_tokens(x, weight, out=torch.bfloat16, uses_torch=uses_torch), found)
    expected = multiply_prompt_tokens_ref(x, weight, torch.float64)
    # Tensor cores keep 14 bits or so of a product of FP8 numbers within 128 columns.
    sizes = x.dequantized(torch.float64).abs().sum(1, keepdim=True) * weight.dequantized(torch.float64).abs().max()
    assert ((found.double() - expected).abs() <= ROUNDING * expected.abs() + 2.0**-13 * sizes).all()


def test_the_reference_is_the_product_of_dequantized_values() -> None:
    weight, x = fp8_matrix(48, 160, (32, 64)), tokens(3, 160)
    scheme = ActivationScheme(64)
    found = multiply_prompt_tokens_ref(quantize_activations_ref(x, scheme), weight, torch.float64)
    exact = x.double() @ weight.dequantized(torch.float64).T
    assert (found - exact).abs().max() <= 2**-3 * exact.abs().max()
    quantized = quantize_activations_ref(x, scheme)
    in_order = unpacked(quantized.codes.view(torch.int16), 8).view(torch.float8_e4m3fn)[:3].double()
    in_order *= quantized.scales.t()[:3].double().repeat_interleave(64, dim=1)[:, :160]
    torch.testing.assert_close(found, in_order @ weight.dequantized(torch.float64).T)


@pytest.mark.parametrize("blocks", [None, (128, 128)])
def test_a_token_does_not_depend_on_other_tokens(blocks: tuple[int, int] | None, device: str) -> None:
    weight, x = fp8_matrix(96, 320, blocks, device), tokens(40, 320, device)
    scheme = ActivationScheme(blocks and blocks[1])
    many, few = (
        multiply_prompt_tokens(
            quantize_activations(part, scheme),
            weight,
            out=torch.empty(len(part), 96, dtype=torch.bfloat16, device=device),
            uses_torch=False,
        )
        for part in (x, x[7:8])
    )
    assert torch.equal(many[7:8], few) or device == "cpu"


def test_weights_without_fp8_products_are_refused(device: str) -> None:
    weight = fp4_matrix((), 64, 64, 16, device)
    assert not has_prompt_gemm(weight)
    with pytest.raises(ValueError, match="need an FP8 weight"):
        multiply_prompt_tokens(
            quantize_activations(tokens(2, 64, device), ActivationScheme()), weight, out=tokens(2, 64, device)
        )
