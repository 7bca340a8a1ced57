"""Properties of the size of a slot and of what a budget buys."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.layout import SlotLayout
from tests.recurrences.state_groups import window_and_matrix

LAYOUT = SlotLayout.of([window_and_matrix(2, (3, 160), (8, 16, 32), torch.bfloat16, torch.float32)])


def least_in(message: str) -> float:
    """Return the figure that the message tells the user to set."""
    found = re.search(r"prefix-caching-mamba-gb to (?:at least )?(\d+\.\d+)", message)
    assert found, message
    return float(found[1])


def test_slot_holds_every_layer_of_both_types() -> None:
    assert LAYOUT.slot_bytes == 2 * (3 * 160 * 2 + 8 * 16 * 32 * 4)


SHAPES = {"8B": (24, 10240, (128, 128, 64)), "Nemotron 3 Nano": (23, 6144, (64, 128, 64))}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("live", "least"), [(torch.float32, 3.6), (torch.bfloat16, 1.85)])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantized_states_of_published_models_are_so_much_smaller(
    name: str, live: torch.dtype, least: float, form: str
) -> None:
    """Conv windows and scales counted, packed and where a slot's bytes lie together."""
    layers, conv_dim, ssm = SHAPES[name]
    groups = [window_and_matrix(layers, (3, conv_dim), ssm, torch.bfloat16, live)]
    exact = SlotLayout.of(groups)
    quantized = CACHED_FORMS[form].layout(groups, exact)
    assert quantized.slot_bytes == layers * (2 * 3 * conv_dim + math.prod(ssm) + 4 * ssm[0] * ssm[2])
    assert exact.slot_bytes / quantized.slot_bytes >= least
    assert exact.aligned_bytes / quantized.aligned_bytes >= least


def test_what_else_a_budget_pays_is_counted_first() -> None:
    slot_gb = LAYOUT.slot_bytes / 2**30
    assert LAYOUT.num_slots_in(10 * slot_gb, 0, beside_bytes=7 * LAYOUT.slot_bytes) == 3
    with pytest.raises(ValueError, match="draft states of max_requests requests and one cached state take") as error:
        LAYOUT.num_slots_in(7 * slot_gb, 0, beside_bytes=7 * LAYOUT.slot_bytes)
    assert "or --draft-states replay" in str(error.value)
    assert LAYOUT.num_slots_in(least_in(str(error.value)), 0, beside_bytes=7 * LAYOUT.slot_bytes) == 1


def test_budget_buys_cached_states_beside_one_live_row_a_request() -> None:
    assert LAYOUT.num_slots_in(10 * LAYOUT.slot_bytes / 2**30, num_live=5) == 15
    assert LAYOUT.num_slots_in((11 * LAYOUT.slot_bytes - 1) / 2**30, num_live=5) == 15


def test_tiny_budget_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ValueError, match=r"1e-05 GiB.*34688 bytes.*no-prefix-caching") as error:
        LAYOUT.num_slots_in(1e-5, num_live=4)
    assert LAYOUT.num_slots_in(least_in(str(error.value)), num_live=4) == 5


def test_no_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="one cached state takes"):
        LAYOUT.num_slots_in(0.0, num_live=4)


def test_drafts_of_one_request_need_no_more_than_the_budget_buys() -> None:
    for num_drafts in range(9):
        least = max(1, num_drafts) * LAYOUT.slot_bytes / 2**30
        assert LAYOUT.num_slots_in(least, 5, num_drafts) == 5 + max(1, num_drafts)
        assert LAYOUT.num_slots_in(10 * least, 5, num_drafts) == 5 + 10 * max(1, num_drafts)


@pytest.mark.parametrize("num_drafts", [2, 8])
def test_budget_below_one_request_s_drafts_is_refused_with_the_least_that_works(num_drafts: int) -> None:
    budget = (num_drafts * LAYOUT.slot_bytes - 1) / 2**30
    needed = f"{num_drafts} draft states take {num_drafts * LAYOUT.slot_bytes} bytes.*--num-speculative-tokens"
    with pytest.raises(ValueError, match=needed) as error:
        LAYOUT.num_slots_in(budget, 4, num_drafts)
    assert LAYOUT.num_slots_in(least_in(str(error.value)), 4, num_drafts) == 4 + num_drafts


@given(st.integers(1, 100), st.integers(1, 10_000), st.integers(1, 300), st.sampled_from([2**20, 2**24, 1, 1000]))
def test_the_least_budget_that_is_named_always_works(layers: int, channels: int, heads: int, scale: int) -> None:
    group = window_and_matrix(layers, (3, channels), (heads, scale), torch.float32, torch.float32)
    layout = SlotLayout.of([group])
    with pytest.raises(ValueError) as error:
        layout.num_slots_in((layout.slot_bytes - 1) / 2**30 - 1e-12, num_live=0)
    least = least_in(str(error.value))
    assert layout.num_slots_in(least, num_live=0) >= 1
    assert (least - layout.slot_bytes / 2**30) <= 1.001e-6
