"""Router logits: multiply tokens by the router's weights, accumulating in fp32.

An ordinary GEMM for up to 2,048 tokens (4,096 with at most 128 experts) would use few multiprocessors. The input
dimension is therefore split into parts, and the routing kernel adds the partial logits in a fixed order. A single token
in a 16-bit dtype uses `multiply_one_token`.

Safe in CUDA graphs. A token's logits are bit-identical for all batch sizes within one range; the ranges end at 1, 256,
2,048 and 4,096 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED, is_computed_in_fp32, launches_kernel
from ..one_token import can_multiply_one_token, multiply_one_token
from ..overlap import await_inputs, overlapping
from .reference_experts import router_logits_ref

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_FEW_TOKENS = 256
_EXPERTS = 64
_DEPTH = 64
"""Number of experts and number of inputs per tile."""


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x, gate, logits, stride, num_tokens,
    INPUTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute one part of the logits for a tile of tokens and a tile of experts."""
    await_inputs(OVERLAPS)
    part = tl.program_id(2)
    token, element = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DEPTH)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    length: tl.constexpr = (INPUTS + PARTS * DEPTH - 1) // (PARTS * DEPTH) * DEPTH
    tokens = x + token.to(tl.int64)[None, :] * stride + element[:, None]
    weights = gate + expert[:, None] * INPUTS + element[None, :]
    total = tl.zeros([EXPERTS, TILE], tl.float32)
    for begin in range(part * length, min((part + 1) * length, INPUTS), DEPTH):
        is_input = begin + element < INPUTS
        weight = tl.load(weights + begin, mask=is_expert[:, None] & is_input[None, :], other=0)
        given = tl.load(tokens + begin, mask=is_token[None, :] & is_input[:, None], other=0)
        if _IS_INTERPRETED:  # the interpreter would multiply bf16 bit patterns as integers
            weight, given = weight.to(tl.float32), given.to(tl.float32)
        total = tl.dot(weight, given, total, input_precision=PRECISION)
    row = part.to(tl.int64) * num_tokens + token
    pointers = logits + row[None, :] * NUM_EXPERTS + expert[:, None]
    tl.store(pointers, total, mask=is_expert[:, None] & is_token[None, :])


def router_logits(x: Tensor, gate: Tensor) -> Tensor:
    """Return partial router logits, which `route` sums.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        gate: [experts, inputs], contiguous, in the dtype of `x`.

    Returns:
        [parts, tokens, experts] float32; the logits are the sum over parts.

    Raises:
        ValueError: If shapes, strides, dtypes or devices disagree.

    Reference: `router_logits_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check_products(x, gate)
    if not launches_kernel(x) or not is_computed_in_fp32(x):
        return router_logits_ref(x, gate)
    if can_multiply_one_token(x, gate):
        return multiply_one_token(x, gate, dtype=torch.float32)[None]
    (num_tokens, num_inputs), num_experts = x.shape, gate.shape[0]
    parts, tile = _parts_of_inputs(num_tokens, num_experts), 16 if num_tokens <= _FEW_TOKENS else 64
    logits = torch.empty(parts, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if not num_tokens:
        return logits
    _logits_kernel[(triton.cdiv(num_tokens, tile), triton.cdiv(num_experts, _EXPERTS), parts)](
        x=x,
        gate=gate,
        logits=logits,
        stride=x.stride(0),
        num_tokens=num_tokens,
        INPUTS=num_inputs,
        NUM_EXPERTS=num_experts,
        PARTS=parts,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        TILE=tile,
        EXPERTS=_EXPERTS,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return logits


def _parts_of_inputs(num_tokens: int, num_experts: int) -> int:
    if num_tokens <= 2048:
        return 8
    # More experts give enough programs without a split, which would only add memory traffic.
    return 4 if num_tokens <= 4096 and num_experts <= 2 * _EXPERTS else 1


def _check_products(x: Tensor, gate: Tensor) -> None:
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1]:
        raise ValueError(
            f"x must have shape [tokens, inputs] and gate [experts, inputs], found x {tuple(x.shape)} and gate "
            f"{tuple(gate.shape)}"
        )
    if x.dtype != gate.dtype or x.device != gate.device:
        found = f"x {x.dtype} on {x.device}, gate {gate.dtype} on {gate.device}"
        raise ValueError(f"x and gate must have the same dtype and device, found {found}")
    if not gate.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"inputs of x and gate must be contiguous, found strides x {x.stride()}, gate {gate.stride()}")
