"""Multiply attention outputs by the sigmoid of their gates, which are a view of the joint QKV projection.

The multiplication is a separate launch. If it were fused into the next GEMM, each of about a thousand programs would
repeat it.

Layout: the outputs of a token are contiguous. The gates for one KV head's queries are contiguous; KV heads may be
strided. Arithmetic is in fp32 and rounds once. Safe in CUDA graphs: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping
from ..reference import compute_dtype

_WIDTH = 1024


@triton.jit
def _gate_kernel(
    attended, gate, out, gate_stride, gate_head_stride,
    CHANNELS: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < CHANNELS
    values = tl.load(attended + token * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
    gates = gate + token * gate_stride + channel // RUN * gate_head_stride + channel % RUN
    gates = tl.load(gates, mask=inside, other=0).to(tl.float32)
    gated = values * (1 / (1 + tl.exp(-gates)))
    tl.store(out + token * CHANNELS + channel, gated.to(out.dtype.element_ty), mask=inside)


def gate_output(attended: Tensor, gate: Tensor) -> Tensor:
    """Return attended * sigmoid(gate), computed in fp32 and rounded once.

    Args:
        attended: [tokens, kv_heads * queries, dim], contiguous.
        gate: [tokens, kv_heads, queries, dim], the gates of one KV head contiguous.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `gate_output_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(attended, gate)
    if attended.numel() == 0 or not launches_kernel(attended) or not is_computed_in_fp32(attended):
        return gate_output_ref(attended, gate)
    out, channels = torch.empty_like(attended), attended.shape[1] * attended.shape[2]
    _gate_kernel[(len(attended), triton.cdiv(channels, _WIDTH))](
        attended=attended,
        gate=gate,
        out=out,
        gate_stride=gate.stride(0),
        gate_head_stride=gate.stride(1),
        CHANNELS=channels,
        RUN=gate.shape[2] * gate.shape[3],
        WIDTH=_WIDTH,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(attended.device),
    )
    return out


def gate_output_ref(attended: Tensor, gate: Tensor) -> Tensor:
    """Torch reference for `gate_output`."""
    dtype = compute_dtype(attended)
    return (attended.to(dtype) * gate.flatten(1, 2).to(dtype).sigmoid()).to(attended.dtype)


def _check(attended: Tensor, gate: Tensor) -> None:
    if gate.dim() != 4 or attended.shape != (len(gate), gate.shape[1] * gate.shape[2], gate.shape[3]):
        raise ValueError(
            "attended must have shape [tokens, kv_heads * queries, dim] and gate [tokens, kv_heads, queries, dim], "
            f"found attended {tuple(attended.shape)} and gate {tuple(gate.shape)}"
        )
    if attended.dtype != gate.dtype or attended.device != gate.device:
        raise ValueError(
            f"attended and gate must have the same dtype and device, found attended {attended.dtype} on "
            f"{attended.device} and gate {gate.dtype} on {gate.device}"
        )
    if not attended.is_contiguous() or gate.stride()[2:] != (gate.shape[3], 1):
        raise ValueError(
            "attended must be contiguous, and gate contiguous for each KV head; found strides "
            f"{attended.stride()} and {gate.stride()}"
        )
