"""The mask kernel writes the same logits as its reference, and no others."""

import pytest
import torch

from megatron_mamba_cache.kernels.sampling.logits_changes import mask_tokens, mask_tokens_ref
from tests.kernels.packed_batches import same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_logits", "vocab_size", "rows"), [(3, 96, [1]), (5, 4097, [4, 0, 2]), (2, 33, [])])
def test_token_mask_kernel_equals_its_reference(
    num_logits: int, vocab_size: int, rows: list[int], dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab_size)
    wide = torch.randn(num_logits, vocab_size + 7, device=device).to(dtype)
    words = -(-vocab_size // 32) + 1
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), dtype=torch.int32, device=device)
    positions = torch.tensor(rows, dtype=torch.int32, device=device)
    found, expected = wide.clone(), wide.clone()
    mask_tokens(found[:, :vocab_size], masks, positions)
    mask_tokens_ref(expected[:, :vocab_size], masks, positions)
    assert same_bits(found, expected)
    for row in range(num_logits):
        if row not in rows:
            assert same_bits(found[row], wide[row])
    for mask, row in enumerate(rows):
        for token in range(0, vocab_size, 13):
            is_allowed = bool(int(masks[mask, token // 32]) >> (token % 32) & 1)
            assert bool(found[row, token].isneginf()) is not is_allowed


def test_token_mask_refuses_mismatched_arguments(device: str) -> None:
    logits = torch.zeros(2, 64, device=device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    masks = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="masks must have 2 words to cover 64 tokens, found 1"):
        mask_tokens(logits, masks[:, :1].contiguous(), rows)
    with pytest.raises(ValueError, match="masks must be contiguous int32"):
        mask_tokens(logits, masks.long(), rows)
    with pytest.raises(ValueError, match=r"logits must have shape \[n, vocab\]"):
        mask_tokens(logits, masks, rows[:0])
