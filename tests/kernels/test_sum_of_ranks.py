"""The sum of expert outputs over ranks is taken in rank order, for any number of tokens."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels.experts import weighted_sum as sum_of_ranks_module
from megatron_mamba_cache.kernels.experts.weighted_sum import sum_of_ranks, sum_of_ranks_ref
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import same_bits

OPS = [sum_of_ranks, sum_of_ranks_ref]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_addend", [True, False])
@pytest.mark.parametrize(("shape", "num_tokens"), [((2, 1, 8), 1), ((4, 9, 1100), 5), ((3, 6, 64), 6)])
def test_rank_sum_adds_the_expert_outputs_of_each_token_over_all_ranks(
    shape: tuple[int, int, int], num_tokens: int, has_addend: bool, dtype: torch.dtype, op: object, device: str
) -> None:
    torch.manual_seed(num_tokens)
    outputs = shape[2]
    parts = torch.randn(shape, device=device).to(dtype)
    addend = torch.randn(num_tokens, outputs, device=device).to(dtype) if has_addend else None
    expected = sum(part[:num_tokens].double() for part in parts) + (0 if addend is None else addend.double())
    torch.testing.assert_close(op(parts, num_tokens, addend), expected.to(dtype))


def test_rank_sum_kernel_equals_its_reference_bit_for_bit_in_any_batch(device: str) -> None:
    torch.manual_seed(0)
    parts = torch.randn(4, 7, 300, device=device).bfloat16()
    together = sum_of_ranks(parts, 7)
    assert same_bits(together, sum_of_ranks_ref(parts, 7))
    assert same_bits(sum_of_ranks(parts[:, 5:6].contiguous(), 1), together[5:6])


@pytest.mark.parametrize("op", OPS)
def test_rank_sum_accepts_zero_tokens(op: object, device: str) -> None:
    assert op(torch.randn(2, 3, 8, device=device), 0).shape == (0, 8)


def test_rank_sum_does_not_recompile_for_other_token_counts(
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
) -> None:
    sums = compile_for_hopper(sum_of_ranks_module, "_sum_of_ranks_kernel")
    for num_rows in (1, 2, 16, 33):
        sum_of_ranks_module.sum_of_ranks(torch.zeros(2, num_rows, 64).bfloat16(), 1)
    assert len(sums.ptx) == 4 and len(sums.compiled) == 1
