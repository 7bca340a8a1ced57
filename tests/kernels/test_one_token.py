"""Linear layers for a single token, for kernel and reference."""

import pytest
import torch

from megatron_mamba_cache.kernels import one_token
from megatron_mamba_cache.kernels.activations import Activation, activated_ref
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.one_token import (
    MOST_INPUTS,
    can_multiply_one_token,
    multiply_one_token,
    multiply_one_token_ref,
)
from tests.kernels.kernel_stand_ins import launches_expected


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 40), (64, 256), (33, 130), (3, 8200), (2, 21504)])
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token_gemm_matches_a_matmul(
    outputs: int, inputs: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(outputs)
    is_gated = activation == "gated_silu"
    if is_gated and inputs > 8192:
        pytest.skip("is left to matrix products")
    x = torch.randn(1, 1, inputs).to(dtype).to(device)
    weight = torch.randn(outputs * (1 + is_gated), inputs).div(inputs**0.5).to(dtype).to(device)
    expected = activated_ref(x.double() @ weight.double().T, activation)
    with launches_expected(one_token, "_one_token_kernel", of_kernel=True, device=device):
        out = multiply_one_token(x, weight, activation)
    for found in (out, multiply_one_token_ref(x, weight, activation)):
        assert found.dtype == dtype and found.shape == (1, 1, outputs)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
def test_one_token_gemm_propagates_nan(activation: Activation, device: str) -> None:
    x, weight = torch.ones(1, 16).bfloat16().to(device), torch.ones(4, 16).bfloat16().to(device)
    weight[1, 3] = float("nan")
    out = multiply_one_token(x, weight, activation)
    assert out.isnan().any(dim=0).tolist() == [False, True, *[False] * (out.shape[1] - 2)]


def test_one_token_gemm_uses_a_matmul_for_unsupported_shapes(device: str) -> None:
    x, weight = torch.zeros(1, 8).bfloat16().to(device), torch.zeros(4, 8).bfloat16().to(device)
    assert can_multiply_one_token(x, weight) == (INTERPRETED or device == "cuda")
    wide = torch.zeros(1, MOST_INPUTS + 8).bfloat16().to(device)
    for others in (
        (x.expand(2, 8).contiguous(), weight),
        (x.float(), weight.float()),
        (x, weight.float()),
        (x, weight.repeat(1, 2)[:, ::2]),
        (wide, wide.repeat(2, 1)),
    ):
        assert not can_multiply_one_token(*others)
        if INTERPRETED or device == "cuda":
            with pytest.raises(
                ValueError, match="contiguous and have the same 16-bit dtype, and x must hold one token"
            ):
                multiply_one_token(*others)
