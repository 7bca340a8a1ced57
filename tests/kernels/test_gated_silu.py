"""The gated SiLU kernel agrees with its reference, which rounds once."""

import pytest
import torch

from megatron_mamba_cache.kernels.activations import gated_silu, gated_silu_ref

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 128), (7, 2 * 1500), (5, 2 * 1024), (0, 6), (2, 0, 4)])
def test_gated_silu_kernel_matches_its_reference(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(len(shape))
    products = (4 * torch.randn(shape, device=device)).to(dtype)
    gates, others = products.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gates) * others
    for op in (gated_silu, gated_silu_ref):
        found = op(products)
        assert (found.dtype, found.shape) == (dtype, exact.shape)
        error = ((found.double() - exact).abs() / exact.abs().clamp(min=1e-3)).max().item() if exact.numel() else 0.0
        print(f"{op.__name__}, {dtype}, {shape}: {error:.2e}")
        assert error <= ROUNDING[dtype]


@pytest.mark.parametrize("op", [gated_silu, gated_silu_ref])
def test_gated_silu_saturates_for_large_gates_and_propagates_nan(op: object, device: str) -> None:
    gates = torch.tensor([-1000.0, 1000.0, float("nan"), 1.0], device=device)
    others = torch.tensor([3.0, 3.0, 3.0, float("nan")], device=device)
    out = op(torch.cat((gates, others))).tolist()
    assert out[:2] == [0.0, 3000.0] and out[2] != out[2] and out[3] != out[3]


@pytest.mark.parametrize("op", [gated_silu, gated_silu_ref])
@pytest.mark.parametrize("view", [slice(None), slice(None, None, 2)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_gated_silu_supports_float64_and_views(
    op: object, view: slice, dtype: torch.dtype, error: float, device: str
) -> None:
    products = torch.randn(6, 16, device=device, dtype=dtype)[:, view]
    gates, others = products.chunk(2, dim=-1)
    torch.testing.assert_close(op(products), torch.nn.functional.silu(gates) * others, rtol=error, atol=error)


def test_gated_silu_refuses_an_odd_last_dimension(device: str) -> None:
    with pytest.raises(
        ValueError, match=r"the last dimension of products \(gates, then values\) must be even, found 5"
    ):
        gated_silu(torch.randn(3, 5, device=device))


def test_gated_silu_gradients_match_torch(device: str) -> None:
    products = torch.randn(3, 8, device=device, requires_grad=True)
    gated_silu(products).sum().backward()
    assert products.grad is not None and bool((products.grad != 0).all())
