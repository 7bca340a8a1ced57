"""Product of any number of tokens with a quantized weight."""

import torch
from torch import Tensor

from ..kernel_launches import launches_kernel
from .dequantize import dequantize
from .few_token_gemm import can_multiply_few_tokens, multiply_few_tokens, multiply_ref
from .quantized_matrix import QuantizedMatrix

_SLAB_BYTES = 2**26
"""Of dequantized weights that exist at once."""


def multiply_quantized(
    x: Tensor, weight: QuantizedMatrix, counters: Tensor, plain_weight: Tensor | None = None
) -> Tensor:
    """Return x @ W.T: few tokens from the codes, many from weights that are dequantized a slab at a time.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        counters: As in `multiply_few_tokens`.
        plain_weight: [more outputs, inputs] of x's dtype: rows that follow those of `weight`; None for none.

    Returns:
        [..., outputs, more outputs included] in x's dtype.

    Reference: `multiply_ref`. CUDA-graph safe: no host sync.
    """
    tokens, rows = x.flatten(0, -2), weight.shape[0]
    out = tokens.new_empty(len(tokens), rows + (0 if plain_weight is None else len(plain_weight)))
    found = out[:, :rows]
    if can_multiply_few_tokens(tokens, weight):
        multiply_few_tokens(tokens.contiguous(), weight, counters, out=found)
    elif not launches_kernel(x):
        found.copy_(multiply_ref(tokens, weight))
    else:
        step = max(_SLAB_BYTES // (2 * x.shape[-1]) // weight.block_rows, 1) * weight.block_rows
        for first in range(0, rows, step):
            slab = dequantize(weight.row_slab(first, min(first + step, rows)), x.dtype)
            torch.mm(tokens, slab.t(), out=found[:, first : first + step])
    if plain_weight is not None:
        torch.mm(tokens, plain_weight.t(), out=out[:, rows:])
    return out.view(*x.shape[:-1], -1)
