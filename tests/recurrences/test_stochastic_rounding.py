"""Stochastic rounding is unbiased, moves a value by less than one fp16 step, and depends on nothing but its counter."""

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.stochastic_rounding import cast_state_ref, rounding_seed

FP16 = torch.float16
SEED = rounding_seed(FP16)
LARGEST, LEAST_NORMAL = 65504.0, 2.0**-14


def cast_at(states: Tensor, position: int = 0, seed: int | None = SEED) -> Tensor:
    return cast_state_ref(states, FP16, seed, torch.full(states.shape[:-3], position, device=states.device))


def values() -> Tensor:
    """Return states [4, 16, 32] of all magnitudes, from zero to beyond fp16."""
    torch.manual_seed(0)
    states = torch.randn(4, 16, 32) * torch.exp2(torch.randint(-30, 18, (4, 16, 32)).float())
    states.view(-1)[:6] = torch.tensor([0.0, -0.0, LARGEST, -70000.0, float("inf"), 65519.0])
    return states


def test_each_value_becomes_one_of_the_two_fp16_numbers_around_it() -> None:
    states = values()
    kept = states.clamp(-LARGEST, LARGEST).double()
    step = torch.exp2(torch.floor(torch.log2(kept.abs().clamp_min(LEAST_NORMAL))) - 10)
    for position in range(20):
        found = cast_at(states, position).double()
        assert ((found - kept).abs() < step).all() and (found * kept >= 0).all()


def test_the_mean_over_positions_is_the_value() -> None:
    torch.manual_seed(1)
    states, number = torch.randn(4, 16, 32).clamp(-4, 4), 4000
    found = cast_state_ref(states.expand(number, -1, -1, -1), FP16, SEED, torch.arange(number)).double()
    step = torch.exp2(torch.floor(torch.log2(states.abs().double())) - 10)
    errors = (found - states.double()) / step
    assert errors.mean().abs() < 4 * 0.41 / errors.numel() ** 0.5 + 2**-13
    assert (errors.mean(0).abs() < 5.5 * 0.5 / number**0.5).all()


def test_random_bits_of_neighbours_and_positions_are_independent() -> None:
    states = torch.full((200, 2, 32, 32), 1 + 2.0**-11)  # rounded up half of the time
    up = (cast_state_ref(states, FP16, SEED, torch.arange(200)).double() > 1).double() * 2 - 1
    assert abs(float(up.mean())) < 5 / up.numel() ** 0.5
    for dim in range(4):
        pairs = up.narrow(dim, 1, up.shape[dim] - 1) * up.narrow(dim, 0, up.shape[dim] - 1)
        assert abs(float(pairs.mean())) < 5 / pairs.numel() ** 0.5


def test_bits_depend_on_position_and_layer_but_not_on_other_states() -> None:
    states, positions = values(), torch.tensor([7, 8])
    both = cast_state_ref(torch.stack([states, states]), FP16, SEED, positions)
    assert torch.equal(both[0], cast_at(states, 7)) and torch.equal(both[1], cast_at(states, 8))
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both[0], cast_at(states, 7, rounding_seed(FP16, layer=1)))


def test_fp16_numbers_are_unchanged_and_nan_stays_nan() -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(FP16).float().view(1, 256, 256)
    found = cast_at(numbers)
    is_finite = numbers.isfinite()
    assert torch.equal(found[is_finite].view(torch.int16), numbers[is_finite].to(FP16).view(torch.int16))
    assert torch.equal(found.isnan(), numbers.isnan())
    assert torch.equal(found[numbers.isinf()].abs(), torch.full((2,), LARGEST, dtype=FP16))


def test_only_fp16_states_have_a_seed_and_all_seeds_compile_alike() -> None:
    assert rounding_seed(torch.float32) is None and rounding_seed(torch.bfloat16, layer=3) is None
    seeds = [rounding_seed(FP16, layer) for layer in range(100)]
    assert len(set(seeds)) == 100 and all(seed and seed % 16 and seed > 1 for seed in seeds)
