"""The fused residual add and norm is bitwise equal to separate ops, for kernel and reference."""

import pytest
import torch

from megatron_mamba_cache.kernels.norm import residual_norm
from megatron_mamba_cache.kernels.norm.gated_norm import gated_group_norm
from megatron_mamba_cache.kernels.norm.residual_norm import add_and_norm, add_and_norm_ref
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 96), (3, 1, 1500), (2, 4096), (0, 8)])
@pytest.mark.parametrize(("multiplier", "offset"), [(1.0, 0.0), (0.22, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_residual_norm_equals_a_separate_sum_and_norm(
    shape: tuple[int, ...], multiplier: float, offset: float, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(shape[-1])
    output, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device).to(dtype)
    expected = residual + (output if multiplier == 1.0 else output * multiplier)
    normed = gated_group_norm(expected.flatten(0, -2), None, weight, shape[-1], 1e-5, offset).view(shape)
    is_launched = dtype != torch.float64 and residual.numel() > 0
    with launches_expected(residual_norm, "_add_and_norm_kernel", of_kernel=is_launched, device=device):
        found = add_and_norm(output, residual, weight, 1e-5, multiplier, offset)
    for op, (total, its_norm) in (
        ("op", found),
        ("twin", add_and_norm_ref(output, residual, weight, 1e-5, multiplier, offset)),
    ):
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(total, expected, rtol=rounding, atol=rounding, msg=op)
        torch.testing.assert_close(its_norm, normed, rtol=4 * rounding, atol=4 * rounding, msg=op)
    # The interpreter truncates instead of rounding, and the compiler fuses float32 multiplications and additions.
    if device == "cuda" and (multiplier == 1.0 or dtype != torch.float32):
        assert same_bits(found[0], expected)


def test_residual_norm_of_a_token_is_bitwise_equal_in_any_batch(device: str) -> None:
    output, residual, weight = (torch.randn(n, 768, device=device).bfloat16() for n in (9, 9, 1))
    together = add_and_norm(output, residual, weight[0], 1e-5)
    alone = add_and_norm(output[4:5], residual[4:5], weight[0], 1e-5)
    assert all(same_bits(mine, its[4:5]) for mine, its in zip(alone, together, strict=True))


def test_residual_norm_refuses_mismatched_or_strided_tensors(device: str) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    for others in ((x[:1], x, weight), (x.bfloat16(), x, weight), (x, x, weight[:4]), (x.T, x.T, weight[:2])):
        with pytest.raises(ValueError, match=r"must have the same dtype and shape|must be contiguous"):
            add_and_norm(*others, 1e-5)
