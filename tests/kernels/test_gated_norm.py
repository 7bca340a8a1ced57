"""The group norm with and without a gate matches float64 and is bitwise equal in any batch, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from megatron_mamba_cache.kernels.norm import gated_norm
from megatron_mamba_cache.kernels.norm.gated_norm import gated_group_norm, gated_group_norm_ref
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_batches import same_bits

EPS = 1e-5
BF16_TOLERANCE = 2**-7 if INTERPRETED else 2**-8
"""Relative error of one rounding; Triton's interpreter truncates instead."""
Op = Callable[[Tensor, Tensor | None, Tensor, int, float], Tensor]
both_ops = pytest.mark.parametrize("op", [gated_group_norm, gated_group_norm_ref])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def counted_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_norm, "_gated_group_norm_kernel", CountedKernel(gated_norm._gated_group_norm_kernel))
        yield


def inputs(num_tokens: int, channels: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, z and weights; y and z are views of wider rows."""
    rows = torch.randn(num_tokens, 2 * channels + 5, device=device).to(dtype)
    return rows[:, :channels], 4 * rows[:, channels + 5 :], torch.randn(channels, device=device).to(dtype)


def expected_norm(y: Tensor, z: Tensor | None, weight: Tensor, group_size: int) -> Tensor:
    """Compute the norm in float64, one group at a time."""
    out = torch.empty(y.shape, dtype=torch.float64, device=y.device)
    for start in range(0, y.shape[1], group_size):
        group = slice(start, start + group_size)
        gate = 1.0 if z is None else z[:, group].double() * torch.sigmoid(z[:, group].double())
        gated = y[:, group].double() * gate
        out[:, group] = gated / (gated.square().mean(1, keepdim=True) + EPS).sqrt() * weight[group].double()
    return out


@both_ops
@pytest.mark.parametrize(
    ("num_tokens", "channels", "group_size"),
    [(1, 1, 1), (3, 1024, 1024), (5, 96, 32), (2, 1500, 500), (7, 63, 63), (1, 2048, 2048), (130, 24, 8), (4, 30, 5)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 8e-6), (torch.bfloat16, BF16_TOLERANCE)])
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "plain"])
def test_gated_norm_works_for_any_group_size(
    num_tokens: int,
    channels: int,
    group_size: int,
    dtype: torch.dtype,
    tolerance: float,
    is_gated: bool,
    op: Op,
    device: str,
) -> None:
    """`tolerance` is the maximum relative error."""
    torch.manual_seed(channels)
    y, gate, weight = inputs(num_tokens, channels, device, dtype)
    z = gate if is_gated else None
    before = gated_norm._gated_group_norm_kernel.launches
    out = op(y, z, weight, group_size, EPS)
    is_kernel = op is gated_group_norm and launches_kernel(y)
    assert gated_norm._gated_group_norm_kernel.launches - before == is_kernel
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.double(), expected_norm(y, z, weight, group_size), rtol=tolerance, atol=1e-7)


@both_ops
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 8e-6), (torch.bfloat16, BF16_TOLERANCE)])
def test_gated_norm_adds_the_weight_offset_in_float32(
    dtype: torch.dtype, tolerance: float, op: Callable[..., Tensor], device: str
) -> None:
    torch.manual_seed(0)
    y, _, weight = inputs(5, 96, device, dtype)
    weight = weight * 2**-9  # so small that 1 + weight rounds to 1 in bfloat16
    out = op(y, None, weight, 96, EPS, 1.0)
    expected = expected_norm(y, None, 1 + weight.double(), 96)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-7)
    if dtype == torch.bfloat16:
        folded = op(y, None, (1 + weight.float()).bfloat16(), 96, EPS)
        assert (folded != out).any()


def test_gated_norm_of_float64_stays_float64(device: str) -> None:
    y, z, weight = inputs(3, 24, device, torch.float64)
    out = gated_group_norm(y, z, weight, 8, EPS)
    torch.testing.assert_close(out, expected_norm(y, z, weight, 8), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group_size", [8, 96, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_of_a_token_is_bitwise_equal_in_any_batch(group_size: int, dtype: torch.dtype, device: str) -> None:
    y, z, weight = inputs(9, 768, device, dtype)
    together = gated_group_norm(y, z, weight, group_size, EPS)
    plain = gated_group_norm(y, None, weight, group_size, EPS)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(0, 8)):
        assert same_bits(gated_group_norm(y[rows], z[rows], weight, group_size, EPS), together[rows])
        assert same_bits(gated_group_norm(y[rows], None, weight, group_size, EPS), plain[rows])


def test_gated_norm_is_finite_for_very_large_gates(device: str) -> None:
    z = torch.tensor([[-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]], device=device)
    out = gated_group_norm(torch.ones_like(z), z, torch.ones(8, device=device), 8, EPS)
    assert out.isfinite().all() and (out[0, :3] == 0).all() and out[0, 7] > 1


def test_gated_norm_propagates_gradients_to_its_inputs(device: str) -> None:
    y, z, weight = (tensor.detach().clone().requires_grad_() for tensor in inputs(2, 24, device, torch.float32))
    gated_group_norm(y, z, weight, 8, EPS).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in (y, z, weight))


def test_gated_norm_accepts_zero_tokens(device: str) -> None:
    assert gated_group_norm(*inputs(0, 24, device, torch.float32), 8, EPS).shape == (0, 24)


def bad_calls() -> dict[str, tuple[dict[str, object], str]]:
    """Return invalid arguments, each with an excerpt of the error message."""
    return {
        "shape": ({"z": torch.zeros(3, 12)}, r"\[tokens, channels\]"),
        "weight": ({"weight": torch.zeros(23)}, r"\[channels\]"),
        "group": ({"group_size": 7}, "must divide the 24 channels"),
        "strided": ({"y": torch.zeros(3, 48)[:, ::2]}, "channels must be contiguous"),
        "device": ({"weight": torch.zeros(24, device="meta")}, "the same device"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_gated_norm_refuses_mismatched_arguments(name: str) -> None:
    changes, reason = bad_calls()[name]
    arguments = {"y": torch.zeros(3, 24), "z": torch.zeros(3, 24), "weight": torch.zeros(24), "group_size": 8}
    with pytest.raises(ValueError, match=reason):
        gated_group_norm(**arguments | {"eps": EPS} | changes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(("channels", "group_size"), [(8192, 1024), (4096, 512)])
def test_gated_norm_does_not_recompile_for_other_batch_sizes(channels: int, group_size: int) -> None:
    sizes = []
    for num_tokens in (1, 2, 16, 33, 4096):
        rows = torch.randn(num_tokens, 2 * channels, device="cuda").bfloat16()
        weight = torch.ones(channels, device="cuda")
        gated_group_norm(rows[:, :channels], rows[:, channels:], weight, group_size, EPS)
        kernel = gated_norm._gated_group_norm_kernel.kernel
        sizes.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert len(set(sizes)) == 1
