"""Experts with quantized weights equal those with the weights that codes and scales mean."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.activations import Activation
from megatron_mamba_cache.kernels.experts import quantized_experts, quantized_experts_hopper
from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.quantized_experts import (
    can_multiply_quantized,
    quantized_grouped_gemm,
    routed_quantized_experts,
)
from megatron_mamba_cache.kernels.experts.quantized_experts_hopper import can_multiply_on_hopper
from megatron_mamba_cache.kernels.experts.reference_experts import grouped_gemm_ref
from megatron_mamba_cache.kernels.experts.routed_experts import routed_experts
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix, packed
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits
from tests.kernels.test_grouped_gemm import choice
from tests.kernels.test_quantized_gemm import ROUNDING, fp4_matrix

BLOCKS = pytest.mark.parametrize("blocks", [None, (64, 64)], ids=str)


def fp8_experts(count: int, rows: int, columns: int, blocks: tuple[int, int] | None, device: str) -> QuantizedMatrix:
    """Return random experts with a scale a block, or a factor a row."""
    codes = torch.randn(count, rows, columns).mul_(64).to(torch.float8_e4m3fn)
    words = packed(codes.view(torch.uint8), 8).to(device)
    size = 1 / (64 * columns**0.5)
    if blocks is None:
        return QuantizedMatrix(words, 8, factors=torch.rand(count, rows, device=device).add_(0.5).mul_(size))
    grid = count, -(-rows // blocks[0]), -(-columns // blocks[1])
    return QuantizedMatrix(words, 8, torch.rand(grid, device=device).add_(0.5).mul_(size), None, *blocks)


def tokens(count: int, columns: int, device: str) -> Tensor:
    return torch.randn(count, columns, device=device).bfloat16()


@BLOCKS
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_product_equals_the_reference(
    num_tokens: int,
    activation: Activation,
    blocks: tuple[int, int] | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = fp8_experts(3, 128, 96, blocks, device), tokens(num_tokens, 96, device)
    order = order_by_expert(choice(num_tokens, 2, 3, "random").to(device), 3)
    monkeypatch.setattr(quantized_experts, "can_multiply_on_hopper", lambda *_: False)
    with launches_expected(quantized_experts, "_quantized_experts_kernel", of_kernel=True, device=device):
        found = quantized_grouped_gemm(x, weight, order, top_k=2, activation=activation)
    expected = grouped_gemm_ref(x.double(), weight.dequantized(torch.float64), order, top_k=2, activation=activation)
    assert (found.double() - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()


@pytest.mark.parametrize("activation", ["none", "gated_silu"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_product_with_nvfp4_equals_the_reference(
    num_tokens: int, activation: Activation, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = fp4_matrix((3,), 128, 192, 16, device), tokens(num_tokens, 192, device)
    weight.scales.view(torch.uint8)[:, ::7] = 3  # a subnormal number
    order = order_by_expert(choice(num_tokens, 2, 3, "random").to(device), 3)
    monkeypatch.setattr(quantized_experts, "can_multiply_on_hopper", lambda *_: False)
    with launches_expected(quantized_experts, "_quantized_experts_kernel", of_kernel=True, device=device):
        found = quantized_grouped_gemm(x, weight, order, top_k=2, activation=activation)
    expected = grouped_gemm_ref(x.double(), weight.dequantized(torch.float64), order, top_k=2, activation=activation)
    assert (found.double() - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["rows", "blocks", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 192), (9, 640), (40, 320), (80, 1344)])
def test_product_on_hopper_equals_the_reference(
    num_tokens: int, columns: int, activation: Activation, form: str, device: str
) -> None:
    weight = experts_of(form, 9, 256 if activation == "gated_silu" or form == "mxfp4" else 448, columns, device)
    x, ids = tokens(num_tokens, columns, device), choice(num_tokens, 2, 9, "random").to(device)
    if not can_multiply_on_hopper(x, weight, ids.numel(), activation):
        pytest.skip("needs a Hopper GPU")
    ids[::7, 0] = -1
    order = order_by_expert(ids, 9)
    expected = grouped_gemm_ref(x.double(), weight.dequantized(torch.float64), order, top_k=2, activation=activation)
    counts = int(order.starts[-1])
    with launches_expected(quantized_experts_hopper, "_quantized_experts_hopper_kernel", of_kernel=True, device=device):
        found = quantized_grouped_gemm(x, weight, order, top_k=2, activation=activation)
    assert (found.double() - expected)[:counts].abs().max() <= 2 * ROUNDING * expected.abs().max()
    if activation == "none":  # rows that are in order take TMA
        rows = torch.zeros(len(order.pairs), columns, device=device, dtype=x.dtype)
        rows[:counts] = x[order.pairs[:counts].long() // 2]
        assert same_bits(quantized_grouped_gemm(rows, weight, order)[:counts], found[:counts])


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["rows", "blocks", "nvfp4", "mxfp4"])
def test_a_token_does_not_depend_on_others_on_hopper(form: str, device: str) -> None:
    weight, x = experts_of(form, 64, 256, 512, device), tokens(150, 512, device)
    if not can_multiply_on_hopper(x, weight, 150, "none"):
        pytest.skip("needs a Hopper GPU")
    found = []
    for spread in (64, 3):  # tiles of different lengths
        ids = (torch.arange(150, device=device, dtype=torch.int32) % spread)[:, None]
        ids[0] = 5
        order = order_by_expert(ids, 64)
        found.append(quantized_grouped_gemm(x, weight, order, top_k=1, activation="gated_silu")[order.positions[0, 0]])
    alone = order_by_expert(torch.full((1, 1), 5, device=device, dtype=torch.int32), 64)
    found.append(quantized_grouped_gemm(x[:1], weight, alone, top_k=1, activation="gated_silu")[0])
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


def experts_of(form: str, count: int, rows: int, columns: int, device: str) -> QuantizedMatrix:
    if form in ("nvfp4", "mxfp4"):
        return fp4_matrix((count,), rows, columns, 16 if form == "nvfp4" else 32, device)
    return fp8_experts(count, rows, columns, (64, 128) if form == "blocks" else None, device)


@BLOCKS
def test_layer_equals_that_of_dequantized_weights(blocks: tuple[int, int] | None, device: str) -> None:
    first, second = fp8_experts(4, 128, 64, blocks, device), fp8_experts(4, 64, 64, blocks, device)
    x, ids = tokens(9, 64, device), choice(9, 2, 4, "random").to(device)
    weights = torch.rand(9, 2, device=device)
    assert can_multiply_quantized(x, ids.numel(), first, second) == (INTERPRETED or device == "cuda")
    found = routed_quantized_experts(x, ids, weights, first, second, "gated_silu")
    plain = (weight.dequantized(torch.float32) for weight in (first, second))
    expected = routed_experts(x.float(), ids, weights, *plain, "gated_silu")
    assert (found.float() - expected).abs().max() <= 4 * ROUNDING * expected.abs().max()


@BLOCKS
def test_a_token_does_not_depend_on_others(blocks: tuple[int, int] | None, device: str) -> None:
    weight, x = fp8_experts(2, 64, 64, blocks, device), tokens(5, 64, device)
    ids = torch.tensor([[0], [1], [0], [0], [1]], dtype=torch.int32, device=device)
    order = order_by_expert(ids, 2)
    every = quantized_grouped_gemm(x, weight, order, top_k=1)[order.positions.flatten().long()]
    for token in range(5):
        alone = order_by_expert(ids[token : token + 1], 2)
        assert torch.equal(quantized_grouped_gemm(x[token : token + 1], weight, alone, top_k=1)[0], every[token])
