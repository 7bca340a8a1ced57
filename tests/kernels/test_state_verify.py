"""Properties of the reference state update over a base token and drafts a row."""

import pytest
import torch

from megatron_mamba_cache.kernels.reference import state_verify_ref
from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from tests.kernels.packed_rows import assert_untouched, one_token_rows, poisoned_pool, same_bits

HEADS, HEAD_DIM, D_STATE, NUM_SLOTS = 4, 5, 7, 8


def make_step(num_rows: int, groups: int, device: str) -> dict[str, torch.Tensor]:
    step = {
        "x": torch.randn(num_rows, HEADS, HEAD_DIM),
        "dt": torch.rand(num_rows, HEADS),
        "A": -torch.rand(HEADS),
        "B": torch.randn(num_rows, groups, D_STATE),
        "C": torch.randn(num_rows, groups, D_STATE),
        "D": torch.randn(HEADS),
    }
    return {name: tensor.to(device) for name, tensor in step.items()}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [[6], [5, PAD_SLOT, 0], [PAD_SLOT, 3, 7, 1]])
def test_one_token_is_one_step_of_the_recurrence(groups: int, slots: list[int], device: str) -> None:
    torch.manual_seed(groups)
    step = make_step(len(slots), groups, device)
    written = set(slots) - {PAD_SLOT}
    pool = poisoned_pool((NUM_SLOTS, HEADS, D_STATE, HEAD_DIM), torch.float32, device, filled=sorted(written))
    before = pool.clone()
    y = state_verify_ref(**step, ssm_pool=pool, rows=one_token_rows(slots, device))

    x, dt, A, B, C, D = (tensor.double() for tensor in step.values())
    B, C = (t.repeat_interleave(HEADS // groups, 1) for t in (B, C))
    for row, slot in enumerate(slots):
        if slot == PAD_SLOT:
            assert (y[row] == 0).all()
            continue
        decayed = torch.exp(dt[row] * A)[:, None, None] * before[slot].double()
        state = decayed + torch.einsum("h,hn,hp->hnp", dt[row], B[row], x[row])
        output = torch.einsum("hn,hnp->hp", C[row], state) + D[:, None] * x[row]
        torch.testing.assert_close(pool[slot].double(), state, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y[row].double(), output, rtol=1e-5, atol=1e-5)
    assert_untouched(before, pool, written)


def test_padded_rows_of_nan_touch_nothing(device: str) -> None:
    step = {name: torch.full_like(tensor, float("nan")) for name, tensor in make_step(3, 1, device).items()}
    pool = poisoned_pool((NUM_SLOTS, HEADS, D_STATE, HEAD_DIM), torch.float32, device, filled=(0, 1))
    before = pool.clone()
    y = state_verify_ref(**step, ssm_pool=pool, rows=one_token_rows([PAD_SLOT] * 3, device))
    assert same_bits(before, pool) and (y == 0).all()


def test_pool_of_bf16_holds_the_rounded_state(device: str) -> None:
    torch.manual_seed(3)
    step = make_step(1, 2, device)
    rows = one_token_rows([2], device)
    rounded = poisoned_pool((NUM_SLOTS, HEADS, D_STATE, HEAD_DIM), torch.bfloat16, device, filled=(2,))
    exact = rounded.float()
    y_rounded = state_verify_ref(**step, ssm_pool=rounded, rows=rows)
    y_exact = state_verify_ref(**step, ssm_pool=exact, rows=rows)
    assert same_bits(rounded[2], exact[2].bfloat16())
    assert same_bits(y_rounded, y_exact)
