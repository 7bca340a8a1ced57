"""References of rounded states; torch only, without a host sync."""

import torch
from torch import Tensor

from .reference_slots import copy_slots_between_ref, store_slots

MOST_VALUE = 127.0
LEAST_SCALE = torch.finfo(torch.float32).tiny


def round_states(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return states [..., d_state, head_dim] as int8 values and float32 scales [..., head_dim]."""
    states = states.to(torch.float32)
    largest = states.abs().amax(-2)
    scales = largest / torch.full_like(largest, MOST_VALUE)  # by a number, CUDA multiplies with its inverse
    scales = torch.where(scales < LEAST_SCALE, 0.0, scales)
    values = torch.floor(states / torch.where(scales == 0, 1.0, scales)[..., None, :] + 0.5)
    return values.to(torch.int8), scales


def store_rounded_ref(values: Tensor, scales: Tensor, slots: Tensor, states: Tensor) -> None:
    """Round states [n, heads, d_state, head_dim] into slots [n] int32 of one layer in place; skip PAD_SLOT."""
    rounded, of_channels = round_states(states)
    store_slots(values, slots, rounded)
    store_slots(scales, slots, of_channels)


def restore_states_ref(values: Tensor, scales: Tensor, ssm_pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Write rounded states into slots of a pool, all layers, in place; see `restore_states`."""
    used = src.clamp_min(0).to(torch.int64)
    states = values.index_select(1, used) * scales.index_select(1, used)[..., None, :]
    numbers = torch.where(src < 0, src, torch.arange(src.shape[0], dtype=src.dtype, device=src.device))
    copy_slots_between_ref((states,), (ssm_pool,), numbers, dst)
