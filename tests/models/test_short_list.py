"""A short list has the tokens that requests use most, and drafts are the best of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation import short_list
from megatron_mamba_cache.speculation.short_list import ShortList
from tests.speculation.running_requests import request_of

VOCAB, SIZE, HIDDEN = 40, 12, 16
TEXTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=8)


def model_of(vocab_size: int = VOCAB) -> Any:
    weight = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
    output_layer = SimpleNamespace(weight=torch.nn.Parameter(weight))
    return SimpleNamespace(share_embeddings_and_output_weights=False, output_layer=output_layer, vocab_size=vocab_size)


def best_of(model: Any, tokens: list[int], hidden_states: torch.Tensor) -> list[int]:
    logits = hidden_states @ model.output_layer.weight.detach()[tokens].T
    return [tokens[index] for index in logits.argmax(-1).tolist()]


@torch.inference_mode()
def check(found: ShortList, model: Any, tokens: list[int]) -> None:
    """Assert that these are the tokens of the list, and that drafts are chosen from them."""
    listed = [token for token in range(VOCAB) if not found.tokens.num_unlisted([token])]
    assert listed == tokens == found.tokens.ids.tolist() and len(found) == len(tokens)
    hidden_states = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert found.most_likely(hidden_states).tolist() == best_of(model, tokens, hidden_states)


@given(TEXTS, st.integers(1, 60))
def test_list_follows_the_tokens_of_requests_that_began_before(texts: list[list[int]], first: int) -> None:
    model = model_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_list, "_FIRST_COUNT", first)
        found = ShortList(model, SIZE)
    counts, due, num_counted, expected = np.zeros(VOCAB, int), first, 0, list(range(SIZE))
    for request_id, text in enumerate(texts):
        request = request_of(text[:1], text[1:], request_id=request_id)
        half = len(text) // 2 + 1
        for is_new, new in ((True, text[:half]), (False, text[half:])):
            request.generated = text[1 : half if is_new else len(text)]
            with torch.inference_mode():
                found.count([request])
            counts += np.bincount(new, minlength=VOCAB) if new else 0
            num_counted += len(new)
            if is_new and num_counted >= due:
                expected = sorted(sorted(range(VOCAB), key=lambda token: (-counts[token], token))[:SIZE])
                counts, due, num_counted = counts // 2, 2 * due, 0
        if request_id % 2:
            found.tokens.forget(request_id)
    check(found, model, expected)


def test_rows_follow_changed_weights() -> None:
    model = model_of()
    found = ShortList(model, SIZE)
    with torch.no_grad():
        model.output_layer.weight.mul_(-1.0)
    found.copy_rows()
    check(found, model, list(range(SIZE)))


@pytest.mark.parametrize(("vocab_size", "size"), [(65_535, None), (65_536, 16_384)])
def test_only_a_large_vocabulary_has_a_list_by_default(vocab_size: int, size: int | None) -> None:
    found = ShortList.of(model_of(vocab_size))
    assert (None if found is None else len(found)) == size
