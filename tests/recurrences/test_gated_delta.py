"""Gated DeltaNet as a recurrence: prefill, decode with drafts, and the storage of its states."""

from dataclasses import replace

import pytest
import torch

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.recurrences.gated_delta import recurrence
from megatron_mamba_cache.recurrences.gated_delta.recurrence import GatedDelta, GatedDeltaWeights
from megatron_mamba_cache.recurrences.interface import LayerStates, ReplayedRecurrence, StateDtypes, StateGroup
from megatron_mamba_cache.recurrences.layout import SlotLayout, state_tensors
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape, RecurrentLayers
from megatron_mamba_cache.recurrences.pool import StatePool
from tests.kernels.packed_batches import RowSpec, VerifySpec, pack_rows, pack_verify, same_bits
from tests.published_shapes import NANO_30B

DELTA = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=24, d_conv=4, grain=8)
DRAFTS = 3


def delta_shape() -> HybridModelShape:
    """Return the shape of a model whose Mamba2 layers are replaced by Gated DeltaNet layers."""
    (mamba2,) = NANO_30B.recurrent
    return replace(NANO_30B, recurrent=(RecurrentLayers(DELTA, mamba2.layers),))


def layer_states(device: str, num_slots: int = 8) -> LayerStates:
    dtypes = StateDtypes(torch.float32, torch.float32, torch.float32)
    group = StateGroup((0,), DELTA.tensors(dtypes))
    return StatePool([group], state_tensors(SlotLayout.of([group], DRAFTS), num_slots, device)).layer(0)


def test_gated_delta_verification_of_drafts_matches_prefill_of_the_same_tokens(device: str) -> None:
    """Outputs and states of a prompt followed by drafts equal those of one longer prompt."""
    torch.manual_seed(0)
    length, drafted = 21, 1 + DRAFTS
    weights = GatedDeltaWeights(*(torch.randn(size, device=device) for size in ((DELTA.conv_dim, 4), (4,), (4,))))
    qkv, b, a = (torch.randn(length, size, device=device) for size in (DELTA.conv_dim, 4, 4))
    states = layer_states(device)
    y = DELTA.prefill(qkv, b, a, weights, states, pack_rows([RowSpec(length, final=0)], 8, device))
    before = length - drafted
    start = pack_rows([RowSpec(before, final=1, boundaries={8: 5, 16: 6})], 8, device)
    y_start = DELTA.prefill(qkv[:before], b[:before], a[:before], weights, states, start)
    rows = pack_verify([VerifySpec(drafted, (1, 2, 3, 4))], device)
    y_drafts = DELTA.decode(qkv[before:], b[before:], a[before:], weights, states, rows, None)
    torch.testing.assert_close(torch.cat((y_start, y_drafts)), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.live["state"][4], states.live["state"][0], rtol=1e-4, atol=1e-5)
    resumed = pack_rows([RowSpec(length - 16, start=16, initial=6, final=7)], 8, device)
    y_resumed = DELTA.prefill(qkv[16:], b[16:], a[16:], weights, states, resumed)
    assert same_bits(y_resumed, y[16:]) and same_bits(states.live["state"][7], states.live["state"][0])
    assert same_bits(states.live["conv"][7, :3], states.live["conv"][0, :3])


@pytest.mark.parametrize("is_fast", [False, True])
def test_gated_delta_states_are_replayed_where_that_is_faster(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(DELTA, ReplayedRecurrence)
    monkeypatch.setattr(recurrence, "replays_fast", lambda key_dim, value_dim: is_fast)
    for requests, drafts in ((1, 8), (2, 0), (3, 0), (64, 5)):
        config = CacheConfig(max_requests=requests, num_speculative_tokens=drafts)
        assert delta_shape().resolved(config).replays == (is_fast and requests > 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gated_delta_steps_may_pass_a_rounding_position(dtype: str) -> None:
    """The kernel folds within a step, to the bits that the pool would hold: drafts need not end before it."""
    config = CacheConfig(max_requests=64, num_speculative_tokens=5, draft_states="replay", ssm_state_dtype=dtype)
    assert delta_shape().rounding_len(config) is None
    assert NANO_30B.rounding_len(config) == (None if dtype == "fp32" else config.fold_len)


@pytest.mark.parametrize("model", [torch.bfloat16, torch.float32, torch.float64])
def test_gated_delta_rings_hold_keys_in_the_model_dtype_and_corrected_values_in_float32(model: torch.dtype) -> None:
    layout = DELTA.buffers(3, StateDtypes(model, torch.bfloat16, torch.bfloat16), fold_len=16, num_drafts=DRAFTS)
    rings, tail = layout.zeros(2, "cpu"), layout.draft_inputs(2, "cpu")
    of_values = torch.float64 if model == torch.float64 else torch.float32
    assert rings.x.shape == (3, 2, 16 + DRAFTS, 4, 24) and rings.x.dtype == of_values
    assert rings.B.shape == (3, 2, 17 + 2 * DRAFTS, 2, 8) and rings.B.dtype == model
    assert rings.steps.shape == (3, 2, 17 + 2 * DRAFTS, 2, 4) and rings.steps.dtype == of_values
    assert tail is not None and tail.shape == (3, 2, DRAFTS, DELTA.conv_dim)
    assert 2 * layout.num_bytes == sum(t.nbytes for t in (rings.x, rings.B, rings.steps, tail))
