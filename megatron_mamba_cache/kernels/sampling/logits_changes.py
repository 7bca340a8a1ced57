"""Changes of logits in place: penalties for tokens of the text, and masks of forbidden tokens.

Layout: logits, counts and marks row-major over the vocabulary, a mask 32 tokens a word, lowest bit first. Grid: a
program for BLOCK tokens of one row of logits. Bound by bytes: penalties read a row's logits, counts and marks once, and
write the logits; of a masked row only masked logits are written. Graph safe: no host sync.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows of logits to penalize, with their texts; tensors on the logits' device.

    Args:
        logits_rows: [n] int32, distinct.
        texts: [n] int32; the row of `counts` and `in_prompt` of the text.
        cu_drafts: [n + 1] int32; start of the drafts before each position in `drafts`.
        drafts: [drafts] int32; tokens of the text that `counts` does not include.
        settings: [n, 3] float32: repetition, frequency and presence penalty.
        counts: [texts, vocab] float32; how often a text has generated each token.
        in_prompt: [texts, vocab] uint8; 1 for tokens of its prompt.
    """

    logits_rows: Tensor
    texts: Tensor
    cu_drafts: Tensor
    drafts: Tensor
    settings: Tensor
    counts: Tensor
    in_prompt: Tensor


@triton.jit(do_not_specialize=["vocab_size", "logits_stride"])
def _penalise_kernel(
    logits, logits_stride, logits_rows, texts, cu_drafts, drafts, settings, counts, in_prompt, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    text = tl.load(texts + index).to(tl.int64) * vocab_size
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    count = tl.load(counts + text + token, mask=exists, other=0.0)
    for number in range(tl.load(cu_drafts + index), tl.load(cu_drafts + index + 1)):
        count += (token == tl.load(drafts + number)).to(tl.float32)
    is_generated = count > 0
    is_seen = is_generated | (tl.load(in_prompt + text + token, mask=exists, other=0) != 0)
    repetition = tl.load(settings + 3 * index)
    frequency, presence = tl.load(settings + 3 * index + 1), tl.load(settings + 3 * index + 2)
    pointers = logits + tl.load(logits_rows + index).to(tl.int64) * logits_stride + token
    value = tl.load(pointers, mask=exists, other=0.0)
    scaled = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(is_seen, scaled, value)
    value -= frequency * count + tl.where(is_generated, presence, 0.0)
    tl.store(pointers, value, mask=exists)


def penalise(logits: Tensor, rows: PenalisedRows) -> None:
    """Apply repetition, frequency and presence penalties in place.

    Positive logits of seen tokens are divided by the repetition penalty, negative ones multiplied by it.

    Args:
        logits: [n, vocab] float32, changed in place; tokens of a row contiguous.

    Raises:
        ValueError: If shapes or dtypes disagree.

    Reference: `penalise_ref`, with the same bits. CUDA-graph safe: no host sync, one launch.
    """
    if logits.dtype != torch.float32 or rows.counts.shape != rows.in_prompt.shape:
        raise ValueError(f"need float32 logits and equal tables, found {logits.dtype} and {list(rows.counts.shape)}")
    if rows.counts.shape[1] != logits.shape[1]:
        raise ValueError(f"counts of {rows.counts.shape[1]} tokens, logits of {logits.shape[1]}")
    if not launches_kernel(logits) or logits.stride(1) != 1:
        penalise_ref(logits, rows)
    elif len(rows.logits_rows):
        vocab_size = logits.shape[1]
        _penalise_kernel[(len(rows.logits_rows), triton.cdiv(vocab_size, _BLOCK))](
            logits=logits,
            logits_stride=logits.stride(0),
            logits_rows=rows.logits_rows,
            texts=rows.texts,
            cu_drafts=rows.cu_drafts,
            drafts=rows.drafts,
            settings=rows.settings,
            counts=rows.counts,
            in_prompt=rows.in_prompt,
            vocab_size=vocab_size,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )


def penalise_ref(logits: Tensor, rows: PenalisedRows) -> None:
    """Torch reference for `penalise`, without a host sync."""
    rows_of_logits, texts = rows.logits_rows.to(torch.int64), rows.texts.to(torch.int64)
    counts = rows.counts.index_select(0, texts)
    owners = torch.searchsorted(rows.cu_drafts[1:], torch.arange(len(rows.drafts), device=logits.device), right=True)
    counts.index_put_((owners, rows.drafts.to(torch.int64)), counts.new_ones(()), accumulate=True)
    repetition, frequency, presence = (column[:, None] for column in rows.settings.unbind(1))
    found = logits.index_select(0, rows_of_logits)
    scaled = torch.where(found > 0, found / repetition, found * repetition)
    is_seen = (counts > 0) | rows.in_prompt.index_select(0, texts).bool()
    found = torch.where(is_seen, scaled, found)
    logits[rows_of_logits] = found - (frequency * counts + torch.where(counts > 0, presence, 0.0))


_MASK_BLOCK = 4096


@triton.jit(do_not_specialize=["vocab_size", "num_words", "logits_stride"])
def _bar_tokens_kernel(logits, logits_stride, masks, num_words, rows, vocab_size, BLOCK: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    word = tl.load(masks + mask * num_words + token // 32, mask=exists, other=-1)
    is_masked = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=exists & is_masked)


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Mask tokens without a bit: set their logits to minus infinity, in place.

    Args:
        logits: [n, vocab] floating point; tokens of a row contiguous.
        masks: [masks, words] int32 contiguous, bit i of word w is token 32 w + i; words cover the vocabulary.
        rows: [masks] int32; the row of logits of each mask, distinct.

    Raises:
        ValueError: If shapes or dtypes disagree.

    Reference: `mask_tokens_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(logits, masks, rows)
    if not launches_kernel(logits) or logits.stride(1) != 1:
        mask_tokens_ref(logits, masks, rows)
    elif masks.shape[0]:
        vocab_size = logits.shape[1]
        grid = (masks.shape[0], triton.cdiv(vocab_size, _MASK_BLOCK))
        _bar_tokens_kernel[grid](
            logits=logits,
            logits_stride=logits.stride(0),
            masks=masks,
            num_words=masks.shape[1],
            rows=rows,
            vocab_size=vocab_size,
            BLOCK=_MASK_BLOCK,
            enable_fp_fusion=True,
        )


def mask_tokens_ref(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Torch reference for `mask_tokens`."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
    rows_of_logits = rows.to(torch.int64)
    logits[rows_of_logits] = logits[rows_of_logits].masked_fill(~is_allowed, float("-inf"))


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
