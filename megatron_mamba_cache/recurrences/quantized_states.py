"""States quantized to 8 bits: int8 or fp8 (e4m3) values, with one float32 scale per head and channel.

    scale = max over rows of |state| / most;  value = round(state / scale);  state' = value * scale

`most` is the largest value of the dtype. Quotients are rounded to nearest (int8: floor(x + 1/2); fp8: ties to even),
and no operations are fused, so all kernels that quantize states, and the reference, write the same bits. If the scale
of a channel would be denormal, the channel is stored as zeros.

A tile of the restore kernel covers all rows of some channels of a head. Each of n concurrent programs takes every n-th
tile of the slots that are not padding. Safe in CUDA graphs: no host sync, one launch, grid fixed at capture.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import is_computed_in_fp32, launches_kernel, resident_programs
from .batches import PAD_SLOT
from .slot_copies import copy_slots_ref, store_slots
from .slot_tiles import next_turn, numbered, of_number

WIDTH = 64
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
SLOTS_AT_A_TIME = 256
"""Number of slot numbers that one loop iteration reads."""
MOST_VALUES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Supported dtypes for quantized values, and the largest value of each."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
_PAD = tl.constexpr(PAD_SLOT)
MOST_INT8, MOST_FP8 = tl.constexpr(MOST_VALUES[torch.int8]), tl.constexpr(MOST_VALUES[torch.float8_e4m3fn])
LEAST = tl.constexpr(_LEAST_SCALE)


@dataclass(frozen=True, slots=True)
class QuantizedStates:
    """Quantized states of one layer, or of all layers with an additional first dimension.

    Args:
        values: [slots, heads, rows, channels] in a dtype of `MOST_VALUES`; each slot is contiguous.
        scales: [slots, heads, channels] float32; each slot is contiguous.
    """

    values: Tensor
    scales: Tensor

    def of_layer(self, layer: int) -> "QuantizedStates":
        """Return the states of one layer."""
        return QuantizedStates(self.values[layer], self.scales[layer])

    def check(self, pool: Tensor) -> None:
        """Raise a `ValueError` unless dtypes, device and shapes match `pool`; the number of slots may differ."""
        states, lead = pool.shape, pool.dim() - 3
        heads, d_state, head_dim = states[lead:]
        shapes = {"values": (self.values, (heads, d_state, head_dim)), "scales": (self.scales, (heads, head_dim))}
        for name, (tensor, inner) in shapes.items():
            dtypes = tuple(MOST_VALUES) if name == "values" else (torch.float32,)
            layers = tuple(tensor.shape[: lead - 1])
            is_whole = tensor[(slice(1),) * lead].is_contiguous()
            fits = tensor.dim() == lead + len(inner) and tuple(tensor.shape[lead:]) == inner and is_whole
            is_typed = tensor.dtype in dtypes and tensor.device == pool.device
            if not is_typed or not fits or layers != states[: lead - 1]:
                raise ValueError(
                    f"{name} must be contiguous with shape [..., slots, {', '.join(map(str, inner))}] and a dtype in "
                    f"{dtypes} on {pool.device}, found {tuple(tensor.shape)} with strides {tensor.stride()} and "
                    f"{tensor.dtype} on {tensor.device}"
                )


class QuantizedPointers(NamedTuple):
    """`QuantizedStates` as kernel arguments; strides count elements."""

    stored: Tensor
    scales: Tensor
    stored_layer: int
    scales_layer: int
    stored_slot: int
    scales_slot: int


def quantized_pointers(states: QuantizedStates | None) -> QuantizedPointers | None:
    """Convert quantized states to kernel arguments; None stays None."""
    if states is None:
        return None
    of_layers = states.values.dim() == 5
    layers = (states.values.stride(0), states.scales.stride(0)) if of_layers else (0, 0)
    lead = int(of_layers)
    slots = states.values.stride(lead), states.scales.stride(lead)
    return QuantizedPointers(states.values, states.scales, *layers, *slots)


@triton.jit
def store_quantized(
    pointers, layer, slot, state, head, n, p, has_n, has_p, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Quantize the channels `p` of a head's float32 state [n, p] and store them in a slot.

    Args:
        layer, slot: int64 indices.
        n: Indices of all rows, padded to a power of two.
        has_n, has_p: Masks of the rows and channels that exist; the state is zero elsewhere.
    """
    IS_INT8: tl.constexpr = pointers.stored.dtype.element_ty == tl.int8
    MOST: tl.constexpr = MOST_INT8 if IS_INT8 else MOST_FP8
    scale = tl.div_rn(tl.max(tl.abs(state), axis=0), MOST)
    scale = tl.where(scale < LEAST, 0.0, scale)
    values = tl.div_rn(state, tl.where(scale == 0.0, 1.0, scale)[None, :])
    if IS_INT8:
        values = tl.floor(values + 0.5)
    scales = pointers.scales + layer * pointers.scales_layer + slot * pointers.scales_slot + head * HEAD_DIM
    tl.store(scales + p, scale, mask=has_p)
    stored = pointers.stored + layer * pointers.stored_layer + slot * pointers.stored_slot + head * (D_STATE * HEAD_DIM)
    values = values.to(pointers.stored.dtype.element_ty)
    tl.store(stored + n[:, None] * HEAD_DIM + p[None, :], values, mask=has_n[:, None] & has_p[None, :])


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["src", "dst"])
def _restore_kernel(
    pointers, pool, layer_stride, slot_stride, src, dst, num_slots,
    SLOTS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    PARTS: tl.constexpr = (HEAD_DIM + TILE_WIDTH - 1) // TILE_WIDTH
    A_LAYER: tl.constexpr = HEADS * PARTS
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    turn = tl.program_id(0)
    for first in range(0, num_slots, SLOTS):
        index = first + tl.arange(0, SLOTS)
        sources = tl.load(src + index, mask=index < num_slots, other=_PAD).to(tl.int64)
        targets = tl.load(dst + index, mask=index < num_slots, other=_PAD).to(tl.int64)
        restores = (sources != _PAD) & (targets != _PAD)
        numbers = numbered(restores)
        for number in range(1, tl.max(numbers, axis=0) + 1):
            source, target = of_number(sources, numbers, number), of_number(targets, numbers, number)
            for tile in range(turn, LAYERS * A_LAYER, programs):
                layer = tl.cast(tile // A_LAYER, tl.int64)
                head = tile % A_LAYER // PARTS
                p = tile % PARTS * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
                inside = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
                in_slot = head * (D_STATE * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
                values = pointers.stored + layer * pointers.stored_layer + source * pointers.stored_slot + in_slot
                scales = pointers.scales + layer * pointers.scales_layer + source * pointers.scales_slot
                scales += head * HEAD_DIM
                scale = tl.load(scales + p, mask=p < HEAD_DIM, other=0.0)
                state = tl.load(values, mask=inside, other=0.0).to(tl.float32) * scale[None, :]
                states = pool + layer * layer_stride + target * slot_stride + in_slot
                tl.store(states, state.to(pool.dtype.element_ty), mask=inside)
            turn = next_turn(turn, LAYERS * A_LAYER)


def restore_states(states: QuantizedStates, pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Dequantize states into slots of a pool, for all layers, in place.

    Args:
        states: States of all layers.
        pool: [layers, slots, heads, d_state, head_dim]; each layer of a slot is contiguous.
        src: [n] int32 slots of `states`; pairs that contain PAD_SLOT are skipped.
        dst: [n] int32 slots of `pool`; distinct, except for PAD_SLOT.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `restore_states_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(states, pool, src, dst)
    if src.shape[0] == 0 or 0 in (states.values.numel(), pool.numel()):
        return
    if not launches_kernel(pool) or not is_computed_in_fp32(pool):
        restore_states_ref(states, pool, src, dst)
        return
    num_layers, _, heads, d_state, head_dim = pool.shape
    _restore_kernel[(resident_programs(pool.device, PROGRAMS_PER_SM),)](
        pointers=quantized_pointers(states),
        pool=pool,
        layer_stride=pool.stride(0),
        slot_stride=pool.stride(1),
        src=src,
        dst=dst,
        num_slots=src.shape[0],
        SLOTS=SLOTS_AT_A_TIME,
        LAYERS=num_layers,
        HEADS=heads,
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        TILE_WIDTH=min(WIDTH, triton.next_power_of_2(head_dim)),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _check(states: QuantizedStates, pool: Tensor, src: Tensor, dst: Tensor) -> None:
    if pool.dim() != 5 or not pool[:1, :1].is_contiguous():
        raise ValueError(
            "pool must have shape [layers, slots, heads, d_state, head_dim] with contiguous states, "
            f"found {tuple(pool.shape)} with strides {pool.stride()}"
        )
    states.check(pool)
    for name, slots in (("src", src), ("dst", dst)):
        if slots.dtype != torch.int32 or slots.dim() != 1 or slots.device != pool.device:
            raise ValueError(
                f"{name} must be int32 [n] on {pool.device}, found {slots.dtype} {tuple(slots.shape)} on {slots.device}"
            )
    if src.shape != dst.shape or not (src.is_contiguous() and dst.is_contiguous()):
        raise ValueError(
            f"src and dst must be contiguous and have the same length, found {src.shape[0]} and {dst.shape[0]}"
        )


def quantize(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize states [..., rows, channels]; return values in `dtype` and float32 scales [..., channels]."""
    states = states.to(torch.float32)
    largest = states.abs().amax(-2)
    scales = largest / torch.full_like(largest, MOST_VALUES[dtype])  # on CUDA, division by a scalar is inexact
    scales = torch.where(scales < _LEAST_SCALE, 0.0, scales)
    values = states / torch.where(scales == 0, 1.0, scales)[..., None, :]
    return (torch.floor(values + 0.5) if dtype == torch.int8 else values).to(dtype), scales


def store_quantized_ref(pointers: QuantizedStates, slots: Tensor, states: Tensor) -> None:
    """Quantize states [n, heads, rows, channels] into the slots [n] int32 of one layer, in place; skip PAD_SLOT."""
    values, scales = quantize(states, pointers.values.dtype)
    # Copy the values as bytes, because torch cannot index fp8 tensors.
    store_slots(pointers.values.view(torch.int8), slots, values.view(torch.int8))
    store_slots(pointers.scales, slots, scales)


def restore_states_ref(states: QuantizedStates, pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """Torch reference for `restore_states`."""
    used = src.clamp_min(0).to(torch.int64)
    values = states.values.view(torch.int8)[:, used].view(states.values.dtype).to(torch.float32)
    restored = values * states.scales[:, used, ..., None, :]
    numbers = torch.where(src < 0, src, torch.arange(src.shape[0], dtype=src.dtype, device=src.device))
    copy_slots_ref((restored,), (pool,), numbers, dst)
