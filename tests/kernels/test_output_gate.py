"""Attention's output is multiplied by the sigmoid of its gate as in Megatron, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention import output_gate
from megatron_mamba_cache.kernels.attention.output_gate import gate_output, gate_output_ref
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits

both_ops = pytest.mark.parametrize("op", [gate_output, gate_output_ref])


def inputs_of(num_tokens: int, kv_heads: int, queries: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return attention outputs, and gates as views of a joint projection [q | gate | k | v] per KV head."""
    torch.manual_seed(2)
    joint = (4 * torch.randn(num_tokens, kv_heads, (2 * queries + 2) * dim, device=device)).to(dtype)
    gate = joint[:, :, queries * dim : 2 * queries * dim].unflatten(-1, (queries, dim))
    return [torch.randn(num_tokens, kv_heads * queries, dim, device=device).to(dtype), gate]


@both_ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "kv_heads", "queries", "dim"), [(1, 2, 8, 256), (3, 4, 6, 64), (5, 1, 3, 7)])
def test_output_gate_multiplies_outputs_by_the_sigmoid_of_their_gates(
    num_tokens: int, kv_heads: int, queries: int, dim: int, dtype: torch.dtype, op: Callable[..., Tensor], device: str
) -> None:
    attended, gate = inputs_of(num_tokens, kv_heads, queries, dim, dtype, device)
    is_kernel = op is gate_output and dtype is not torch.float64
    before = attended.clone()
    with launches_expected(output_gate, "_gate_kernel", of_kernel=is_kernel, device=device):
        found = op(attended, gate)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # Same order of operations and single rounding as in Megatron.
    expected = (attended * torch.sigmoid(gate.contiguous().view(attended.shape).to(wide))).to(dtype)
    assert found.is_contiguous() and same_bits(attended, before)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_output_gate_of_a_token_is_bitwise_equal_in_any_batch(device: str) -> None:
    attended, gate = inputs_of(4, 2, 4, 32, torch.bfloat16, device)
    together = gate_output(attended, gate)
    for token in range(4):
        own = slice(token, token + 1)
        assert same_bits(gate_output(attended[own], gate[own]), together[own])


def test_output_gate_accepts_zero_tokens(device: str) -> None:
    attended, gate = inputs_of(2, 2, 4, 32, torch.bfloat16, device)
    assert gate_output(attended[:0], gate[:0]).shape == (0, 8, 32)


@pytest.mark.parametrize(
    ("attended", "gate", "reason"),
    [
        (torch.zeros(2, 8, 4), torch.zeros(2, 2, 3, 4), "kv_heads"),
        (torch.zeros(2, 8, 4), torch.zeros(2, 2, 4, 4).bfloat16(), "the same dtype"),
        (torch.zeros(2, 8, 4), torch.zeros(2, 2, 8, 4)[:, :, ::2], "gate contiguous for each KV head"),
        (torch.zeros(2, 8, 8)[:, :, :4], torch.zeros(2, 2, 4, 4), "attended must be contiguous"),
    ],
)
def test_output_gate_refuses_mismatched_arguments(attended: Tensor, gate: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gate_output(attended, gate)
