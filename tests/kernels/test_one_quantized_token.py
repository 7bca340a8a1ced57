"""Products of one token with FP8 weights, for kernel and reference."""

import pytest
import torch

from megatron_mamba_cache.kernels.activations import Activation, activated_ref
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.quantized import one_token_gemm
from megatron_mamba_cache.kernels.quantized.few_token_gemm import multiply_ref
from megatron_mamba_cache.kernels.quantized.one_token_gemm import (
    OneTokenTiles,
    can_multiply_one_quantized_token,
    multiply_one_quantized_token,
)
from megatron_mamba_cache.kernels.quantized.product import multiply_quantized
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix, packed
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.test_quantized_gemm import (
    FP32_SUMS,
    assert_close_to_reference,
    counters,
    fp4_matrix,
    fp8_matrix,
    tokens,
)


@pytest.mark.parametrize("blocks", [None, (128, 128), (32, 64), (16, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (1, 32), (101, 1184), (6, 5120)])
def test_product_equals_the_reference(rows: int, columns: int, blocks: tuple[int, int] | None, device: str) -> None:
    torch.manual_seed(rows)
    weight, x = fp8_matrix(rows, columns, blocks, device), tokens(1, columns, device)
    with launches_expected(one_token_gemm, "_one_quantized_token_kernel", of_kernel=True, device=device):
        found = multiply_one_quantized_token(x, weight)
    assert_close_to_reference(found, x, weight, FP32_SUMS)


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
@pytest.mark.parametrize("blocks", [None, (128, 128)])
def test_activation_is_applied_before_rounding(
    blocks: tuple[int, int] | None, activation: Activation, device: str
) -> None:
    torch.manual_seed(0)
    weight, x = fp8_matrix(256, 512, blocks, device), tokens(1, 512, device)[:, None] / 512
    found = multiply_one_quantized_token(x, weight, activation)
    expected = activated_ref(multiply_ref(x.double(), weight), activation)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("num_plain", [1, 6])
def test_rows_that_are_not_quantized_follow_the_others(num_plain: int, device: str) -> None:
    torch.manual_seed(num_plain)
    weight, x = fp8_matrix(130, 1184, (128, 128), device), tokens(1, 1184, device)
    plain = torch.randn(num_plain, 1184, device=device).bfloat16()
    found = multiply_quantized(x, weight, counters(weight), plain)
    assert torch.equal(found[:, :130], multiply_one_quantized_token(x, weight))
    expected = x.double() @ plain.double().T
    assert ((found[:, 130:].double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()


def test_every_finite_code_is_multiplied_exactly(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    weight = QuantizedMatrix(packed(codes.view(8, 32), 8).to(device), 8)
    identity = torch.eye(32, device=device).bfloat16()
    found = torch.cat([multiply_one_quantized_token(row[None], weight) for row in identity])
    assert torch.equal(found.T.cpu(), codes.view(8, 32).view(torch.float8_e4m3fn).bfloat16())


@pytest.mark.parametrize("tiles", [OneTokenTiles(1, 32, 1, 1), OneTokenTiles(8, 128, 1, 4), OneTokenTiles(2, 64, 9, 2)])
def test_any_tiles_give_the_product(tiles: OneTokenTiles, device: str) -> None:
    torch.manual_seed(0)
    weight, x = fp8_matrix(20, 1184, (64, 64), device), tokens(1, 1184, device)
    assert_close_to_reference(multiply_one_quantized_token(x, weight, tiles=tiles), x, weight, FP32_SUMS)


def test_unsupported_products_are_refused(device: str) -> None:
    x, weight = tokens(1, 192, device), fp8_matrix(64, 192, (64, 64), device)
    assert can_multiply_one_quantized_token(x, weight) == (INTERPRETED or device == "cuda")
    strided = torch.stack((x, x), dim=-1)[..., 0]
    thin = QuantizedMatrix(weight.words, 8, weight.scales.repeat_interleave(64, 0), None, 1, 64)
    others = (x.repeat(2, 1), weight), (x.float(), weight), (strided, weight), (x, thin)
    for given, other in (*others, (x, fp4_matrix((), 64, 192, 16, device))):
        assert not can_multiply_one_quantized_token(given, other)
        if INTERPRETED or device == "cuda":
            with pytest.raises(ValueError, match="need one bf16 token and an FP8 weight"):
                multiply_one_quantized_token(given, other)
    with pytest.raises(ValueError, match="have no activation"):
        multiply_one_quantized_token(x, weight, "squared_relu", plain_weight=torch.zeros(1, 192, device=device))
