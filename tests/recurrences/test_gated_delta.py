"""Gated DeltaNet as a recurrence: prefill, decode with drafts, and the storage of its states."""

from dataclasses import replace

import pytest
import torch

from megatron_mamba_cache import CacheConfig
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


def test_gated_delta_drafts_use_state_slots_instead_of_replay() -> None:
    assert not isinstance(DELTA, ReplayedRecurrence)
    for requests in (1, 64):
        config = CacheConfig(max_requests=requests, num_speculative_tokens=5)
        assert not delta_shape().resolved(config).replays


def test_replay_is_refused_for_gated_delta_layers() -> None:
    config = CacheConfig(max_requests=64, num_speculative_tokens=2, draft_states="replay")
    with pytest.raises(ValueError, match="not supported for models with gated_delta layers; set --draft-states window"):
        delta_shape().draft_buffers(delta_shape().with_forms(config))
