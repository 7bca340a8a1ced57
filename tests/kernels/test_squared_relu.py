"""The squared ReLU kernel is bitwise equal to torch's two ops."""

import pytest
import torch

from megatron_mamba_cache.kernels.activations import squared_relu, squared_relu_ref
from tests.kernels.packed_batches import same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 1, 1000), (7, 4096), (0, 5)])
def test_squared_relu_matches_torch_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    torch.manual_seed(len(shape))
    x = torch.randn(shape, device=device).to(dtype)
    assert same_bits(squared_relu(x), squared_relu_ref(x))
    assert squared_relu(x).shape == shape


@pytest.mark.parametrize("op", [squared_relu, squared_relu_ref])
def test_squared_relu_maps_negative_values_to_zero_and_propagates_nan(op: object, device: str) -> None:
    out = op(torch.tensor([-2.0, -0.0, 3.0, float("nan"), float("inf")], device=device))
    assert out[:3].tolist() == [0, 0, 9] and out[3].isnan() and out[4].isinf()


def test_squared_relu_supports_non_contiguous_views(device: str) -> None:
    x = torch.randn(6, 8, device=device)[:, ::2]
    assert same_bits(squared_relu(x), squared_relu_ref(x))
