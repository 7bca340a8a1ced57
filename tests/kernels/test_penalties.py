"""The penalty kernel is bitwise equal to its reference, and both match the definitions."""

from collections import Counter

import pytest
import torch

from megatron_mamba_cache.kernels.sampling.logits_changes import PenalizedRows, penalize, penalize_ref
from tests.kernels.packed_batches import same_bits

TEXTS = [[3, 3, 5], [], [7]]
PROMPTS = [[1, 5], [2], []]
ROWS: list[tuple[int, int, list[int]]] = [(0, 0, []), (1, 0, [5]), (2, 0, [5, 6, 6]), (5, 2, []), (4, 1, [2, 2])]
SETTINGS = [(1.3, 0.7, 0.2), (1.3, 0.7, 0.2), (1.3, 0.7, 0.2), (1.0, -0.5, 1.0), (0.6, 0.0, 0.3)]


def rows_of(vocab_size: int, device: str) -> PenalizedRows:
    counts = torch.zeros(len(TEXTS), vocab_size)
    in_prompt = torch.zeros(len(TEXTS), vocab_size, dtype=torch.uint8)
    for index, (text, prompt) in enumerate(zip(TEXTS, PROMPTS, strict=True)):
        for token, count in Counter(text).items():
            counts[index, token] = count
        in_prompt[index, prompt] = 1
    drafts = [draft for _, _, before in ROWS for draft in before]
    ends = torch.tensor([len(before) for _, _, before in ROWS]).cumsum(0).tolist()
    integers = {
        "logits_rows": [row for row, _, _ in ROWS],
        "texts": [text for _, text, _ in ROWS],
        "cu_drafts": [0, *ends],
        "drafts": drafts,
    }
    return PenalizedRows(
        **{name: torch.tensor(found, dtype=torch.int32, device=device) for name, found in integers.items()},
        settings=torch.tensor(SETTINGS, device=device),
        counts=counts.to(device),
        in_prompt=in_prompt.to(device),
    )


@pytest.mark.parametrize("vocab_size", [9, 2049])
def test_penalty_kernel_equals_its_reference_bit_for_bit(vocab_size: int, device: str) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, device=device) * 5
    logits[0, 3] = float("-inf")
    found, expected = logits.clone(), logits.clone()
    rows = rows_of(vocab_size, device)
    penalize(found, rows)
    penalize_ref(expected, rows)
    assert same_bits(found, expected)
    assert same_bits(found[3], logits[3]) and same_bits(found[6], logits[6])


def test_penalties_match_their_definitions(device: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 9, device=device)
    found = logits.clone()
    penalize(found, rows_of(9, device))
    for (index, text, drafts), (repetition, frequency, presence) in zip(ROWS, SETTINGS, strict=True):
        counts = Counter([*TEXTS[text], *drafts])
        for token in range(9):
            value = float(logits[index, token])
            if counts[token] or token in PROMPTS[text]:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * counts[token] + (presence if counts[token] else 0.0)
            assert float(found[index, token]) == pytest.approx(value, abs=1e-6)


def test_penalty_kernel_refuses_mismatched_arguments(device: str) -> None:
    rows = rows_of(9, device)
    with pytest.raises(ValueError, match="the same vocabulary size, found 9 and 10"):
        penalize(torch.zeros(7, 10, device=device), rows)
    with pytest.raises(ValueError, match="logits must be float32"):
        penalize(torch.zeros(7, 9, device=device, dtype=torch.bfloat16), rows)
