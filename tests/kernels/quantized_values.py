"""Quantized states for kernel tests, filled with a pattern that reveals unexpected writes."""

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates
from tests.kernels.packed_batches import same_bits


def patterned(num_slots: int, state_shape: tuple[int, int, int], device: str, *lead: int) -> QuantizedStates:
    """Return quantized states with distinct values in each slot; `lead` is the shape of leading dimensions."""
    heads, d_state, head_dim = state_shape
    values = torch.randint(-99, 99, (*lead, num_slots, heads, d_state, head_dim), dtype=torch.int8, device=device)
    return QuantizedStates(values, torch.rand(*lead, num_slots, heads, head_dim, device=device) + 7)


def cloned(quantized: QuantizedStates) -> QuantizedStates:
    """Copy quantized states."""
    return QuantizedStates(quantized.values.clone(), quantized.scales.clone())


def holds_quantized(quantized: QuantizedStates, slot: int, state: Tensor) -> bool:
    """Return True if the slot contains exactly `state`, quantized on the CPU."""
    values, scales = by_the_formula(state.cpu())
    return same_bits(quantized.values[slot].cpu(), values) and same_bits(quantized.scales[slot].cpu(), scales)


def by_the_formula(state: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a state [heads, d_state, head_dim] with the formula, one channel at a time."""
    values = torch.zeros(state.shape, dtype=torch.int8)
    scales = torch.zeros(state.shape[0], state.shape[2])
    for head in range(state.shape[0]):
        for channel in range(state.shape[2]):
            column = state[head, :, channel].float()
            scale = column.abs().max() / 127
            if scale >= 2.0**-126:
                scales[head, channel] = scale
                values[head, :, channel] = torch.floor(column / scale + 0.5).to(torch.int8)
    return values, scales


def assert_only_written(before: QuantizedStates, after: QuantizedStates, written: set[int]) -> None:
    """Check that all slots of a layer outside `written` are bitwise unchanged."""
    for slot in range(before.values.shape[0]):
        kept = same_bits(before.values[slot], after.values[slot]) and same_bits(before.scales[slot], after.scales[slot])
        assert slot in written or kept, f"slot {slot} changed"
