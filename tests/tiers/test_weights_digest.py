"""The digest of weights changes with every bit, name, shape and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache import build as module
from megatron_mamba_cache.build import weights_digest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weights(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"w{index}": torch.randn(size, generator=generator).to(dtype).to(DEVICE) for index, size in enumerate(sizes)
    }


def digest(tensors: dict[str, torch.Tensor]) -> bytes:
    return weights_digest(tensors.items())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.data())
def test_flipping_any_bit_changes_the_digest(size: int, data: st.DataObject) -> None:
    tensors = weights(size, 7)
    before = digest(tensors)
    octets = tensors["w0"].view(torch.uint8)
    index, bit = data.draw(st.integers(0, octets.numel() - 1)), data.draw(st.integers(0, 7))
    octets[index] ^= 1 << bit
    assert digest(tensors) != before
    octets[index] ^= 1 << bit
    assert digest(tensors) == before


def test_chunk_size_does_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights(1000, 33, 1)
    before = digest(tensors)
    monkeypatch.setattr(module, "_WORDS_AT_ONCE", 8)
    assert digest(tensors) == before


def test_names_shapes_and_dtypes_change_the_digest_but_order_does_not() -> None:
    tensors = weights(12, 24)
    before = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == before
    assert digest({"w1": tensors["w0"], "w0": tensors["w1"]}) != before
    assert digest(tensors | {"w0": tensors["w0"].view(3, 4)}) != before
    assert digest(tensors | {"w0": tensors["w0"].view(torch.int16)}) != before
    assert digest({"w0": tensors["w0"]}) != before


def test_swapped_words_change_the_digest_but_strides_do_not() -> None:
    matrix = torch.arange(64, dtype=torch.int64, device=DEVICE).view(8, 8)
    swapped = matrix.clone().view(-1)
    swapped[[3, 40]] = swapped[[40, 3]]
    assert digest({"w": matrix}) != digest({"w": swapped.view(8, 8)})
    assert digest({"w": matrix.t().contiguous().t()}) == digest({"w": matrix})


def test_empty_and_scalar_tensors_have_a_digest() -> None:
    assert digest({"w": torch.zeros(0, device=DEVICE)}) != digest({"w": torch.zeros((), device=DEVICE)})
