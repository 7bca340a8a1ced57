"""Properties of slot sizes."""

import math

import pytest
import torch

from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.layout import SlotLayout
from tests.recurrences.state_groups import window_and_matrix

LAYOUT = SlotLayout.of([window_and_matrix(2, (3, 160), (8, 16, 32), torch.bfloat16, torch.float32)])


def test_slot_size_includes_every_layer_and_both_state_types() -> None:
    assert LAYOUT.slot_bytes == 2 * (3 * 160 * 2 + 8 * 16 * 32 * 4)


SHAPES = {"8B": (24, 10240, (128, 128, 64)), "Nemotron 3 Nano": (23, 6144, (64, 128, 64))}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("live", "least"), [(torch.float32, 3.6), (torch.bfloat16, 1.85)])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantization_shrinks_states_by_the_documented_factor(
    name: str, live: torch.dtype, least: float, form: str
) -> None:
    """The size includes conv windows and scales, without alignment."""
    layers, conv_dim, ssm = SHAPES[name]
    groups = [window_and_matrix(layers, (3, conv_dim), ssm, torch.bfloat16, live)]
    exact = SlotLayout.of(groups)
    quantized = CACHED_FORMS[form].layout(groups, exact)
    assert quantized.slot_bytes == layers * (2 * 3 * conv_dim + math.prod(ssm) + 4 * ssm[0] * ssm[2])
    assert exact.slot_bytes / quantized.slot_bytes >= least
    assert exact.aligned_bytes / quantized.aligned_bytes >= least
