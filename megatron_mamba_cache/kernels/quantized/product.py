"""Product of any number of tokens with a quantized weight.

Tokens of decode requests are multiplied as they are, so the result means W = code * scale. Tokens of prompts may be
quantized to FP8 first. The rule of a token does not depend on the number of tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernel_launches import launches_kernel
from .activations import ActivationScheme, quantize_activations
from .dequantize import dequantize
from .few_token_gemm import can_multiply_few_tokens, multiply_few_tokens, multiply_ref
from .one_token_gemm import can_multiply_one_quantized_token, multiply_one_quantized_token
from .prompt_gemm import multiply_prompt_tokens
from .quantized_matrix import QuantizedMatrix

_SLAB_BYTES = 2**26
"""Of dequantized weights that exist at once."""


@dataclass(frozen=True, slots=True)
class QuantizedPrompts:
    """Tokens from `first` on, which are quantized by a scheme before they are multiplied."""

    first: int
    scheme: ActivationScheme


def multiply_quantized(
    x: Tensor,
    weight: QuantizedMatrix,
    counters: Tensor,
    plain_weight: Tensor | None = None,
    prompts: QuantizedPrompts | None = None,
) -> Tensor:
    """Return x @ W.T: few tokens from the codes, many from weights that are dequantized a slab at a time.

    A single token has its own kernel, as with weights that are not quantized.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        counters: As in `multiply_few_tokens`.
        plain_weight: [more outputs, inputs] of x's dtype: rows that follow those of `weight`; None for none. Tokens
            are not quantized for them.
        prompts: Tokens that are quantized; None for none.

    Returns:
        [..., outputs, more outputs included] in x's dtype.

    Reference: `multiply_ref`, and for quantized tokens `multiply_prompt_tokens_ref`. CUDA-graph safe: no host sync.
    """
    tokens, rows = x.flatten(0, -2), weight.shape[0]
    if prompts is not None and prompts.first == 0 and plain_weight is None:
        quantized = quantize_activations(tokens, prompts.scheme)
        return multiply_prompt_tokens(quantized, weight, out=tokens.dtype).view(*x.shape[:-1], -1)
    out = tokens.new_empty(len(tokens), rows + (0 if plain_weight is None else len(plain_weight)))
    first = len(tokens) if prompts is None else prompts.first
    if first == 1 and can_multiply_one_quantized_token(tokens[:1], weight):
        multiply_one_quantized_token(tokens[:1], weight, plain_weight=plain_weight, out=out[:1])
    elif first > 0:
        _multiply_exactly(tokens[:first], weight, counters, out[:first, :rows])
        _multiply_plain(tokens[:first], plain_weight, out[:first, rows:])
    if prompts is not None and first < len(tokens):
        quantized = quantize_activations(tokens[first:], prompts.scheme)
        multiply_prompt_tokens(quantized, weight, out=out[first:, :rows])
        _multiply_plain(tokens[first:], plain_weight, out[first:, rows:])
    return out.view(*x.shape[:-1], -1)


def _multiply_plain(tokens: Tensor, weight: Tensor | None, out: Tensor) -> None:
    if weight is not None:
        torch.mm(tokens, weight.t(), out=out)


def _multiply_exactly(tokens: Tensor, weight: QuantizedMatrix, counters: Tensor, out: Tensor) -> None:
    """Write the product with W = code * scale to `out`; tokens [tokens, inputs] are not quantized."""
    if can_multiply_few_tokens(tokens, weight):
        multiply_few_tokens(tokens.contiguous(), weight, counters, out=out)
    elif not launches_kernel(tokens):
        out.copy_(multiply_ref(tokens, weight))
    else:
        rows = len(weight.words)
        step = max(_SLAB_BYTES // (2 * tokens.shape[1]) // weight.block_rows, 1) * weight.block_rows
        for first in range(0, rows, step):
            slab = dequantize(weight.row_slab(first, min(first + step, rows)), tokens.dtype)
            torch.mm(tokens, slab.t(), out=out[:, first : first + step])
