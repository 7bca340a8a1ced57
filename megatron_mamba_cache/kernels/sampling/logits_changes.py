"""Change logits in place: penalize tokens that occur in the text, and mask forbidden tokens.

Layout: logits, counts and prompt flags are row-major, vocabulary contiguous; a mask holds 32 tokens per word, lowest
bit first. Grid: one program per BLOCK tokens of a row. Memory traffic limits both kernels. Penalties read the logits,
counts and flags of a row once and write the logits; masking writes only the masked logits. Safe in CUDA graphs: no host
sync.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """Rows of logits to penalize, and token counts of the texts they continue; all on the device of the logits.

    Args:
        logits_rows: [n] int32, distinct; indices of the rows of logits.
        texts: [n] int32; for each row, the index of its text in `counts` and `in_prompt`.
        cu_drafts: [n + 1] int32; drafts[cu_drafts[i]:cu_drafts[i + 1]] precede the position of row i.
        drafts: [drafts] int32; draft tokens that are not included in `counts`.
        settings: [n, 3] float32: repetition, frequency and presence penalty.
        counts: [texts, vocab] float32; number of times that each token was generated.
        in_prompt: [texts, vocab] uint8; 1 if the token occurs in the prompt.
    """

    logits_rows: Tensor
    texts: Tensor
    cu_drafts: Tensor
    drafts: Tensor
    settings: Tensor
    counts: Tensor
    in_prompt: Tensor


@triton.jit(do_not_specialize=["vocab_size", "logits_stride"])
def _penalize_kernel(
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


def penalize(logits: Tensor, rows: PenalizedRows) -> None:
    """Apply repetition, frequency and presence penalties in place.

    The repetition penalty divides positive logits of tokens that occur in prompt or reply, and multiplies negative
    logits. The frequency penalty, times the token's count, and the presence penalty are subtracted for generated
    tokens.

    Args:
        logits: [n, vocab] float32, vocabulary contiguous; changed in place.

    Raises:
        ValueError: If shapes or dtypes disagree.

    Reference: `penalize_ref`, which is bit-identical. CUDA-graph safe: no host sync, one launch.
    """
    if logits.dtype != torch.float32 or rows.counts.shape != rows.in_prompt.shape:
        raise ValueError(
            "logits must be float32, and counts and in_prompt must have the same shape, found logits "
            f"{logits.dtype}, counts {list(rows.counts.shape)}, in_prompt {list(rows.in_prompt.shape)}"
        )
    if rows.counts.shape[1] != logits.shape[1]:
        raise ValueError(
            f"counts and logits must have the same vocabulary size, found {rows.counts.shape[1]} and {logits.shape[1]}"
        )
    if not launches_kernel(logits) or logits.stride(1) != 1:
        penalize_ref(logits, rows)
    elif len(rows.logits_rows):
        vocab_size = logits.shape[1]
        _penalize_kernel[(len(rows.logits_rows), triton.cdiv(vocab_size, _BLOCK))](
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


def penalize_ref(logits: Tensor, rows: PenalizedRows) -> None:
    """Torch reference for `penalize`; does not synchronize with the host."""
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
    """Set logits to minus infinity, in place, where a token's bit in the mask is 0.

    Args:
        logits: [n, vocab] floating point, vocabulary contiguous.
        masks: [masks, words] int32, contiguous; bit i of word w is for token 32 * w + i. Covers the whole vocabulary.
        rows: [masks] int32, distinct; the row of logits to which each mask applies.

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
            f"logits must have shape [n, vocab], masks [m, words] and rows [m], found logits {list(logits.shape)}, "
            f"masks {list(masks.shape)} and rows {list(rows.shape)}"
        )
    if masks.dtype != torch.int32 or rows.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(
            f"masks must be contiguous int32 and rows int32, found masks {masks.dtype} with strides {masks.stride()} "
            f"and rows {rows.dtype}"
        )
    if masks.shape[1] * 32 < logits.shape[1]:
        raise ValueError(
            f"masks must have {-(-logits.shape[1] // 32)} words to cover {logits.shape[1]} tokens, found "
            f"{masks.shape[1]}"
        )
