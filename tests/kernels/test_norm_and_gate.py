"""The norm before the gate matches float64 and the rounding steps of its definition, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.norm import norm_and_gate as module
from megatron_mamba_cache.kernels.norm.norm_and_gate import norm_and_gate, norm_and_gate_ref
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits

EPS = 1e-6
Op = Callable[[Tensor, Tensor, Tensor, float], Tensor]
both_ops = pytest.mark.parametrize("op", [norm_and_gate, norm_and_gate_ref])
SIZES = [(1, 1, 1), (3, 32, 128), (5, 3, 7), (130, 4, 16), (2, 2, 1500), (7, 48, 128)]


def inputs(num_tokens: int, heads: int, head_dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return y, z and weights; y and z are views of wider rows."""
    channels = heads * head_dim
    rows = torch.randn(num_tokens, 2 * channels + 5, device=device).to(dtype)
    return rows[:, :channels], 4 * rows[:, channels + 5 :], torch.randn(head_dim, device=device).to(dtype)


def by_steps(y: Tensor, z: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the definition in float64, with its rounding steps to `dtype`."""
    heads = y.double().unflatten(1, (-1, len(weight)))
    normed = heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()
    scaled = (normed.to(dtype).double() * weight.double()).to(dtype).double()
    return scaled.flatten(1) * F.silu(z.double())


@both_ops
@pytest.mark.parametrize(("num_tokens", "heads", "head_dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_and_gate_applies_the_norm_before_the_gate(
    num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, op: Op, device: str
) -> None:
    torch.manual_seed(heads)
    y, z, weight = inputs(num_tokens, heads, head_dim, device, dtype)
    is_kernel = op is norm_and_gate and dtype != torch.float64
    with launches_expected(module, "_norm_and_gate_kernel", of_kernel=is_kernel, device=device):
        out = op(y, z, weight, EPS)
    assert out.dtype == dtype and out.is_contiguous()
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[dtype]
    # Each of three steps may round differently, and Triton's interpreter truncates instead.
    tolerance = rounding * (6 if INTERPRETED else 3)
    torch.testing.assert_close(out.double(), by_steps(y, z, weight, dtype), rtol=tolerance, atol=1e-7)


def test_norm_and_gate_rounds_bf16_before_the_weights_and_the_gate() -> None:
    """For these values, leaving out one of the rounding steps changes the result."""
    torch.manual_seed(0)
    y, z, weight = inputs(64, 2, 128, "cpu", torch.bfloat16)
    expected = by_steps(y, z, weight, torch.bfloat16).bfloat16()
    unrounded = by_steps(y, z, weight, torch.float64).bfloat16()
    found = norm_and_gate_ref(y, z, weight, EPS)
    assert (unrounded != expected).float().mean() > 0.2
    assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_norm_and_gate_of_a_token_is_bitwise_equal_in_any_batch(head_dim: int, dtype: torch.dtype, device: str) -> None:
    y, z, weight = inputs(9, 6, head_dim, device, dtype)
    together = norm_and_gate(y, z, weight, EPS)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(0, 8)):
        assert same_bits(norm_and_gate(y[rows], z[rows], weight, EPS), together[rows])


def test_norm_and_gate_is_finite_for_very_large_gates(device: str) -> None:
    z = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]], device=device)
    out = norm_and_gate(torch.ones_like(z), z, torch.ones(4, device=device), EPS)
    assert out.isfinite().all() and (out[0, :3] == 0).all() and out[0, 7] > 1


def test_norm_and_gate_propagates_gradients_to_its_inputs(device: str) -> None:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs(2, 3, 8, device, torch.float32)]
    norm_and_gate(*leaves, EPS).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.any() for leaf in leaves)


def test_norm_and_gate_accepts_zero_tokens(device: str) -> None:
    assert norm_and_gate(*inputs(0, 3, 8, device, torch.float32), EPS).shape == (0, 24)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"z": torch.zeros(3, 12)}, r"\[tokens, heads \* head_dim\]"),
        ({"weight": torch.zeros(7)}, r"weight \[head_dim\]"),
        ({"weight": torch.zeros(0)}, r"weight \[head_dim\]"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "the same dtype"),
        ({"y": torch.zeros(3, 48)[:, ::2]}, "channels must be contiguous"),
        ({"weight": torch.zeros(8, device="meta")}, "the same device"),
    ],
)
def test_norm_and_gate_refuses_mismatched_arguments(change: dict[str, Tensor], reason: str) -> None:
    arguments = {"y": torch.zeros(3, 24), "z": torch.zeros(3, 24), "weight": torch.zeros(8)} | change
    with pytest.raises(ValueError, match=reason):
        norm_and_gate(**arguments, eps=EPS)
