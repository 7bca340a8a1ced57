"""Hidden states of the tokens before those of a step, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.recurrences import hidden_states
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.hidden_states import (
    last_hidden_states,
    previous_in_decode,
    previous_in_decode_ref,
    previous_in_prompts,
    previous_in_prompts_ref,
)
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import (
    RowSpec,
    VerifySpec,
    assert_untouched,
    pack_rows,
    pack_verify,
    poisoned_pool,
    random_verify_specs,
    row_slices,
    same_bits,
    scan_specs,
    written_slots,
)

HIDDEN, CHUNK, NUM_SLOTS = 37, 8, 13
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[previous_in_prompts, previous_in_prompts_ref])
def in_prompts(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., Tensor]]:
    is_op = request.param is previous_in_prompts
    with launches_expected(hidden_states, "_prompts_kernel", of_kernel=is_op, device=device):
        yield request.param


@pytest.fixture(params=[previous_in_decode, previous_in_decode_ref])
def in_decode(request: pytest.FixtureRequest, device: str) -> Iterator[Callable[..., Tensor]]:
    is_op = request.param is previous_in_decode
    with launches_expected(hidden_states, "_decode_kernel", of_kernel=is_op, device=device):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("has_own_ends", [False, True])
def test_prompts_read_the_state_before_them_and_store_their_last(
    in_prompts: Callable[..., Tensor], device: str, dtype: torch.dtype, num_padding: int, has_own_ends: bool
) -> None:
    torch.manual_seed(1)
    specs = [*scan_specs(CHUNK), RowSpec(40)]
    rows = pack_rows(specs, CHUNK, device, num_padding)
    num_tokens = sum(spec.length for spec in specs)
    x = torch.randn(num_tokens + num_padding, HIDDEN, device=device).to(dtype)
    pool = poisoned_pool((NUM_SLOTS, 3, HIDDEN), dtype, device, filled=(1, 11))
    ends = poisoned_pool((NUM_SLOTS, 1, HIDDEN), dtype, device) if has_own_ends else pool
    before, ends_before = pool.clone(), ends.clone()
    y = in_prompts(x, pool, rows, ends)
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = torch.zeros_like(x[0]) if spec.initial == PAD_SLOT else before[spec.initial, 0]
        history = torch.cat((initial[None], x[tokens]))
        assert same_bits(y[tokens], history[:-1])
        if spec.final != PAD_SLOT:
            assert same_bits(pool[spec.final, 0], history[-1])
        for position, slot in spec.boundaries.items():
            assert same_bits(ends[slot, 0], history[position - spec.start])
    assert not y[num_tokens:].any()
    assert same_bits(pool[:, 1:], before[:, 1:])
    finals, boundaries = {spec.final for spec in specs}, {slot for spec in specs for slot in spec.boundaries.values()}
    if has_own_ends:
        assert_untouched(before, pool, finals)
        assert_untouched(ends_before, ends, boundaries)
    else:
        assert_untouched(before, pool, written_slots(specs))


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_prompts_without_requests_are_padding(in_prompts: Callable[..., Tensor], device: str, num_tokens: int) -> None:
    x = torch.randn(num_tokens, HIDDEN, device=device)
    pool = poisoned_pool((2, 1, HIDDEN), torch.float32, device)
    assert same_bits(in_prompts(x, pool, pack_rows([], CHUNK, device, 2), pool), torch.zeros_like(x))
    assert pool.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_decode_reads_the_accepted_state_and_stores_one_per_token(
    in_decode: Callable[..., Tensor], device: str, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    num_slots, window = 60, 10
    specs = [*random_verify_specs(seed, num_slots), VerifySpec(1, (num_slots,), accepted=3)]
    rows = pack_verify(specs, device)
    num_tokens = sum(spec.length for spec in specs)
    x = torch.randn(num_tokens + 2, HIDDEN, device=device).to(dtype)
    pool = poisoned_pool((num_slots + 1, window, HIDDEN), dtype, device)
    for spec in specs:
        if spec.columns:
            pool[spec.columns[0], spec.accepted - 1] = torch.randn(HIDDEN, device=device).to(dtype)
    before = pool.clone()
    y = in_decode(x, pool, rows)
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        if not spec.columns:
            assert not y[tokens].any()
            continue
        slot = spec.columns[0]
        history = torch.cat((before[slot, spec.accepted - 1][None], x[tokens]))
        assert same_bits(y[tokens], history[:-1])
        assert same_bits(pool[slot, : spec.length], history[1:])
        assert same_bits(pool[slot, spec.length :], before[slot, spec.length :])
    assert not y[num_tokens:].any()
    assert_untouched(before, pool, {spec.columns[0] for spec in specs if spec.columns})


def test_last_state_is_that_of_the_accepted_tokens(device: str) -> None:
    pool = torch.randn(4, 3, HIDDEN, device=device)
    slots, accepted = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([2, -1, 0], [3, 1, 1]))
    found = last_hidden_states(pool, slots, accepted)
    assert same_bits(found, torch.stack((pool[2, 2], torch.zeros_like(pool[0, 0]), pool[0, 0])))


def test_disagreeing_shapes_and_dtypes_are_errors(device: str) -> None:
    x, rows = torch.randn(2, HIDDEN, device=device), pack_verify([VerifySpec(2, (0, 1))], device)
    with pytest.raises(ValueError, match="at least 2, hidden"):
        previous_in_decode(x, torch.zeros(2, 1, HIDDEN, device=device), rows)
    with pytest.raises(ValueError, match="same dtype"):
        previous_in_decode(x, torch.zeros(2, 2, HIDDEN, device=device, dtype=torch.bfloat16), rows)
