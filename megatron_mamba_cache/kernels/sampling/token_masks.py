"""Bar tokens from being drawn: logits of tokens without a bit become minus infinity.

Layout: logits row-major, a mask 32 tokens a word, lowest bit first. Grid: a program BLOCK tokens of one mask. Bound by
the bytes of the masked rows' logits, of which only barred ones are written. Graph safe: no host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel

_BLOCK = 4096


@triton.jit(do_not_specialize=["vocab_size", "num_words", "logits_stride"])
def _bar_tokens_kernel(logits, logits_stride, masks, num_words, rows, vocab_size, BLOCK: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    word = tl.load(masks + mask * num_words + token // 32, mask=exists, other=-1)
    is_barred = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=exists & is_barred)


def bar_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Set the logits of tokens without a bit to minus infinity, in place.

    Args:
        logits: [n, vocab] floating point; tokens of a row contiguous.
        masks: [masks, words] int32 contiguous, bit i of word w is token 32 w + i; words cover the vocabulary.
        rows: [masks] int32; the row of logits that each mask is for, distinct.

    Raises:
        ValueError: If shapes or dtypes disagree.

    Reference: `bar_tokens_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(logits, masks, rows)
    if not launches_kernel(logits) or logits.stride(1) != 1:
        bar_tokens_ref(logits, masks, rows)
    elif masks.shape[0]:
        vocab_size = logits.shape[1]
        grid = (masks.shape[0], triton.cdiv(vocab_size, _BLOCK))
        _bar_tokens_kernel[grid](
            logits=logits,
            logits_stride=logits.stride(0),
            masks=masks,
            num_words=masks.shape[1],
            rows=rows,
            vocab_size=vocab_size,
            BLOCK=_BLOCK,
            enable_fp_fusion=True,
        )


def bar_tokens_ref(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Do what `bar_tokens` does."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    places = rows.to(torch.int64)
    logits[places] = logits[places].masked_fill(~is_allowed, float("-inf"))


def _check(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    if logits.dim() != 2 or masks.dim() != 2 or rows.shape != masks.shape[:1]:
        raise ValueError(
            f"need logits [n, vocab], masks [m, words] and rows [m], found {list(logits.shape)}, {list(masks.shape)} "
            f"and {list(rows.shape)}"
        )
    if masks.dtype != torch.int32 or rows.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(f"need contiguous int32 masks and int32 rows, found {masks.dtype} and {rows.dtype}")
    if masks.shape[1] * 32 < logits.shape[1]:
        raise ValueError(f"{masks.shape[1]} words cover {masks.shape[1] * 32} tokens, of {logits.shape[1]}")
