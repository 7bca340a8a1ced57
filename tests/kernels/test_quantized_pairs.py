"""GEMMs of a few tokens with FP8 experts equal those with the weights that codes and scales mean."""

import pytest
import torch

from megatron_mamba_cache.kernels.activations import Activation
from megatron_mamba_cache.kernels.experts import quantized_pairs, quantized_sums
from megatron_mamba_cache.kernels.experts.quantized_experts import (
    QuantizedSharedExpert,
    routed_quantized_experts,
    takes_quantized_shared,
)
from megatron_mamba_cache.kernels.experts.quantized_pairs import quantized_pair_gemm, quantized_pair_gemm_ref
from megatron_mamba_cache.kernels.experts.quantized_sums import quantized_summed_gemm
from megatron_mamba_cache.kernels.experts.reference_experts import summed_gemm_ref
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.expert_layers import choice
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits
from tests.kernels.test_quantized_experts import fp8_experts, tokens
from tests.kernels.test_quantized_gemm import ROUNDING

BLOCKS = pytest.mark.parametrize("blocks", [None, (64, 64)], ids=str)


@BLOCKS
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 64), (3, 96), (2, 2240)])
def test_first_gemm_equals_the_reference(
    num_tokens: int, columns: int, activation: Activation, blocks: tuple[int, int] | None, device: str
) -> None:
    weight, shared = fp8_experts(5, 128, columns, blocks, device), fp8_experts(1, 192, columns, blocks, device)[0]
    x, ids = tokens(num_tokens, columns, device), choice(num_tokens, 3, 5, "random").to(device)
    ids[-1, 0] = -1
    with launches_expected(quantized_pairs, "_quantized_pairs_kernel", of_kernel=True, device=device):
        found = quantized_pair_gemm(x, weight, ids, shared, activation=activation)
    expected = quantized_pair_gemm_ref(x, weight, ids, shared, activation=activation)
    here = (ids.flatten() >= 0).nonzero().flatten()
    for one, other in ((found[0][here], expected[0][here]), (found[1], expected[1])):
        assert (one.float() - other.float()).abs().max() <= 4 * ROUNDING * other.abs().max()


@BLOCKS
@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("num_shares", [3, 4])
@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 64), (3, 96), (2, 2240)])
def test_sum_equals_the_reference(
    num_tokens: int, columns: int, num_shares: int, has_shared: bool, blocks: tuple[int, int] | None, device: str
) -> None:
    weight, shared = fp8_experts(5, 64, columns, blocks, device), fp8_experts(1, 64, 128, blocks, device)[0]
    rows, ids = tokens(3 * num_tokens, columns, device), choice(num_tokens, 3, 5, "random").to(device)
    ids[-1, 0] = -1
    shares = torch.rand(num_tokens, num_shares, device=device)
    given = {"shared_rows": tokens(num_tokens, 128, device)} if has_shared else {}
    addend = None if has_shared else tokens(num_tokens, 64, device)
    with launches_expected(quantized_sums, "_quantized_sum_kernel", of_kernel=True, device=device):
        found = quantized_summed_gemm(
            rows, weight, ids, shares, addend, **given, shared_weight=shared if has_shared else None
        )
    plain = shared.dequantized(torch.float64) if has_shared else None
    expected = summed_gemm_ref(
        rows.double(), weight.dequantized(torch.float64), ids, shares, addend, **given, shared_weight=plain
    )
    assert (found.double() - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()


@BLOCKS
def test_a_token_does_not_depend_on_others(blocks: tuple[int, int] | None, device: str) -> None:
    first, second = fp8_experts(6, 128, 64, blocks, device), fp8_experts(6, 64, 64, blocks, device)
    shared = QuantizedSharedExpert(
        fp8_experts(1, 128, 64, blocks, device)[0], fp8_experts(1, 64, 64, blocks, device)[0]
    )
    x, ids, weights = tokens(2, 64, device), choice(2, 2, 6, "random").to(device), torch.rand(2, 3, device=device)
    assert takes_quantized_shared(x, first, second, shared) == (INTERPRETED or device == "cuda")
    if INTERPRETED or device == "cuda":
        every = routed_quantized_experts(x, ids, weights, first, second, "gated_silu", shared=shared)
        for token in range(2):
            own = slice(token, token + 1)
            alone = routed_quantized_experts(x[own], ids[own], weights[own], first, second, "gated_silu", shared=shared)
            assert same_bits(alone, every[own])


def test_first_gemm_refuses_mismatched_tokens() -> None:
    weight = fp8_experts(2, 64, 64, None, "cpu")
    with pytest.raises(ValueError, match="rows of 64 inputs"):
        quantized_pair_gemm(tokens(2, 32, "cpu"), weight, torch.zeros(2, 1, dtype=torch.int32))
