"""Experts of many tokens equal the products of what codes and scales mean: with FP8 activations, and with NVFP4."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.activations import Activation
from megatron_mamba_cache.kernels.experts import coded_gemm_hopper, prompt_experts, prompt_gemm_hopper
from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.prompt_experts import (
    QuantizedExperts,
    grouped_prompt_gemm,
    grouped_prompt_gemm_ref,
    routed_prompt_experts,
)
from megatron_mamba_cache.kernels.experts.quantized_experts import (
    can_multiply_quantized,
    quantized_grouped_gemm,
    routed_quantized_experts,
)
from megatron_mamba_cache.kernels.experts.reference_experts import grouped_gemm_ref
from megatron_mamba_cache.kernels.experts.routed_experts import routed_experts
from megatron_mamba_cache.kernels.kernel_launches import is_hopper, launches_kernel
from megatron_mamba_cache.kernels.quantized.activations import (
    ActivationScheme,
    quantize_activations,
    quantize_activations_ref,
)
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.test_grouped_gemm import choice
from tests.kernels.test_quantized_experts import fp8_experts, tokens
from tests.kernels.test_quantized_gemm import fp4_matrix

ROUNDING = 2.0**-8
BLOCKS = pytest.mark.parametrize("blocks", [None, (128, 128), (32, 64)], ids=str)


ON_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))


def scheme_of(weight: QuantizedMatrix) -> ActivationScheme:
    return ActivationScheme(None if weight.scales is None else weight.block_columns)


def takes_hopper_kernel(weight: QuantizedMatrix, device: str) -> bool:
    fits = weight.scales is None or weight.block_rows == weight.block_columns == 128
    return device == "cuda" and ON_HOPPER and fits


def check_product(weight: QuantizedMatrix, x: Tensor, ids: Tensor, activation: Activation, device: str) -> None:
    order = order_by_expert(ids, len(weight.words))
    rows = quantize_activations(x, scheme_of(weight), order.positions)
    on_hopper = takes_hopper_kernel(weight, device)
    with (
        launches_expected(prompt_experts, "_prompt_experts_kernel", of_kernel=not on_hopper, device=device),
        launches_expected(prompt_gemm_hopper, "_prompt_gemm_kernel", of_kernel=on_hopper, device=device),
    ):
        found = grouped_prompt_gemm(rows, weight, order, activation, torch.bfloat16)
    expected = grouped_prompt_gemm_ref(rows, weight, order, activation, torch.float64)
    number = int(order.starts[-1])
    # Tensor cores keep 14 bits or so of a product of FP8 numbers within 128 columns.
    assert (found.double() - expected)[:number].abs().max() <= 2 * ROUNDING * expected[:number].abs().max()


@BLOCKS
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_product_equals_the_reference(
    num_tokens: int, activation: Activation, blocks: tuple[int, int] | None, device: str
) -> None:
    weight, x = fp8_experts(3, 256, 192, blocks, device), tokens(num_tokens, 192, device)
    check_product(weight, x, choice(num_tokens, 2, 3, "random").to(device), activation, device)


@BLOCKS
@pytest.mark.parametrize("activation", ["none", "gated_silu"])
def test_product_skips_tokens_without_experts(
    activation: Activation, blocks: tuple[int, int] | None, device: str
) -> None:
    weight, x = fp8_experts(2, 128, 128, blocks, device), tokens(6, 128, device)
    if blocks == (128, 128) and activation == "gated_silu":
        pytest.skip("a block must not have both gates and what they gate")
    ids = torch.tensor([[0], [-1], [1], [-1], [1], [0]], dtype=torch.int32, device=device)
    check_product(weight, x, ids, activation, device)


@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize(("rows", "columns", "blocks"), [(1024, 2048, (128, 128)), (464, 672, None)])
def test_product_of_many_tokens_equals_the_reference(
    rows: int, columns: int, blocks: tuple[int, int] | None, activation: Activation, device: str
) -> None:
    if device != "cuda":
        pytest.skip("too slow without a GPU")
    weight, x = fp8_experts(5, rows, columns, blocks, device), tokens(700, columns, device)
    ids = torch.randint(4, (700, 3), dtype=torch.int32, device=device)  # the last expert has no tokens
    check_product(weight, x, ids, activation, device)


def test_copied_tokens_are_quantized_to_the_bit(device: str) -> None:
    x = tokens(5, 128, device)
    positions = torch.tensor([[1, 4], [-1, 2], [0, -1], [-1, -1], [6, 3]], dtype=torch.int32, device=device)
    for scheme in (ActivationScheme(64), ActivationScheme()):
        found = quantize_activations(x, scheme, positions)
        expected = quantize_activations_ref(x, scheme, positions)
        assert torch.equal(found.codes[:5].view(torch.uint8), expected.codes[:5].view(torch.uint8))
        assert torch.equal(found.scales[:, :5], expected.scales[:, :5])
        alone = quantize_activations_ref(x, scheme)
        sources = [2, 0, 1, 4, 0, 4]
        for quantized in (found, expected):
            rows = quantized.codes[[0, 1, 2, 3, 4, 6]]
            assert torch.equal(rows.view(torch.uint8), alone.codes[sources].view(torch.uint8))
            assert torch.equal(quantized.scales[:, [0, 1, 2, 3, 4, 6]], alone.scales[:, sources])


@BLOCKS
def test_layer_equals_that_of_dequantized_weights(blocks: tuple[int, int] | None, device: str) -> None:
    first, second = fp8_experts(4, 256, 128, blocks, device), fp8_experts(4, 128, 128, blocks, device)
    x, ids = tokens(9, 128, device), choice(9, 2, 4, "random").to(device)
    weights, addend = torch.rand(9, 2, device=device), tokens(9, 128, device)
    experts = QuantizedExperts(first, second, scheme_of(first), scheme_of(second))
    found = routed_prompt_experts(x, ids, weights, experts, "gated_silu", addend=lambda: addend)
    plain = (weight.dequantized(torch.float32) for weight in (first, second))
    expected = routed_experts(x.float(), ids, weights, *plain, "gated_silu", addend=addend.float)
    assert (found.float() - expected).abs().max() <= 2.0**-4 * expected.abs().max()  # a code has four significant bits


@BLOCKS
def test_a_token_does_not_depend_on_others(blocks: tuple[int, int] | None, device: str) -> None:
    weights, x = torch.rand(300, 1, device=device), tokens(300, 128, device)
    first, second = fp8_experts(2, 256, 128, blocks, device), fp8_experts(2, 128, 128, blocks, device)
    experts = QuantizedExperts(first, second, scheme_of(first), scheme_of(second))
    count = 300 if device == "cuda" else 5
    ids = torch.randint(2, (count, 1), dtype=torch.int32, device=device)
    every = routed_prompt_experts(x[:count], ids, weights[:count], experts, "gated_silu")
    for token in range(0, count, max(count // 5, 1)):
        one = slice(token, token + 1)
        alone = routed_prompt_experts(x[one], ids[one], weights[one], experts, "gated_silu")
        assert torch.equal(alone[0], every[token]) or not launches_kernel(x)  # torch's bits depend on the CPU


def test_weights_without_fp8_products_are_refused(device: str) -> None:
    order = order_by_expert(torch.zeros(2, 1, dtype=torch.int32, device=device), 2)
    rows = quantize_activations(tokens(2, 64, device), ActivationScheme())
    with pytest.raises(ValueError, match="need FP8 experts"):
        grouped_prompt_gemm(rows, fp4_matrix((2,), 64, 64, 16, device), order, "none", torch.bfloat16)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("spread", ["random", "the same"])
@pytest.mark.parametrize(
    ("activation", "experts", "rows", "columns", "num_tokens", "is_gathered"),
    [
        ("gated_silu", 3, 512, 256, 500, True),
        ("none", 80, 1264, 128, 3000, False),  # wide tiles and a narrow one
    ],
)
def test_product_with_nvfp4_equals_the_reference(
    activation: Activation,
    experts: int,
    rows: int,
    columns: int,
    num_tokens: int,
    is_gathered: bool,
    spread: str,
    device: str,
) -> None:
    torch.manual_seed(0)
    weight, ids = fp4_matrix((experts,), rows, columns, 16, device), choice(num_tokens, 2, experts, spread).to(device)
    ids[7:9] = -1
    order = order_by_expert(ids, experts)
    x = tokens(num_tokens if is_gathered else 2 * num_tokens, columns, device)
    top_k = 2 if is_gathered else None
    with launches_expected(coded_gemm_hopper, "_coded_gemm_kernel", of_kernel=True, device=device):
        found = quantized_grouped_gemm(x, weight, order, top_k=top_k, activation=activation)
    values = weight.dequantized(torch.float64)
    expected = grouped_gemm_ref(x.double(), values, order, top_k=top_k, activation=activation)
    number = int(order.starts[-1])
    assert (found.double() - expected)[:number].abs().max() <= 2 * ROUNDING * expected[:number].abs().max()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_layer_with_nvfp4_equals_that_of_dequantized_weights(device: str) -> None:
    first, second = fp4_matrix((3,), 512, 256, 16, device), fp4_matrix((3,), 256, 256, 16, device)
    x, ids = tokens(700, 256, device), torch.randint(3, (700, 2), dtype=torch.int32, device=device)
    weights = torch.rand(700, 2, device=device)
    assert can_multiply_quantized(x, ids.numel(), first, second) or not launches_kernel(x)
    found = routed_quantized_experts(x, ids, weights, first, second, "gated_silu")
    plain = (weight.dequantized(torch.float32) for weight in (first, second))
    expected = routed_experts(x.float(), ids, weights, *plain, "gated_silu")
    assert (found.float() - expected).abs().max() <= 4 * ROUNDING * expected.abs().max()
