"""The architecture file keeps every field, for each kind of recurrent layer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mamba_cache.models.architecture import (
    AttentionSizes,
    ExpertsSizes,
    FeedForwardSizes,
    GatedDeltaSizes,
    HybridArchitecture,
    MambaSizes,
    check_architecture,
)
from megatron_mamba_cache.models.checkpoints.architecture_file import (
    ARCHITECTURE_FILE,
    read_architecture,
    write_architecture,
)

GATED_DELTA = HybridArchitecture(
    pattern="M-MEME*E",
    vocab_size=100,
    hidden_size=32,
    max_sequence_length=256,
    norm_eps=1e-6,
    recurrent=GatedDeltaSizes(2, 6, 4, 5, d_conv=3, chunk_size=16),
    attention=AttentionSizes(4, 2, 8, None, 1e7, 0.25, has_output_gate=True, has_head_norms=True),
    feed_forward=FeedForwardSizes(48, "silu", gated=True),
    experts=ExpertsSizes(8, 2, 16, 24, "softmax", has_shared_gate=True),
    tie_embeddings=True,
    zero_centered_norms=True,
)
MAMBA = replace(
    GATED_DELTA,
    recurrent=MambaSizes(4, 8, 16, 2, 64, conv_bias=False, gated_norm_eps=1e-5),
    attention=AttentionSizes(4, 2, 8),
    experts=None,
    tie_embeddings=False,
    zero_centered_norms=False,
    residual_multiplier=0.5,
)


@pytest.mark.parametrize("architecture", [GATED_DELTA, MAMBA], ids=["gated_delta", "mamba"])
def test_written_architecture_is_read_back(architecture: HybridArchitecture, tmp_path: Path) -> None:
    write_architecture(architecture, tmp_path)
    assert read_architecture(tmp_path) == architecture


def test_architecture_file_with_two_recurrent_layer_types_is_refused(tmp_path: Path) -> None:
    write_architecture(GATED_DELTA, tmp_path)
    path = tmp_path / ARCHITECTURE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mamba": {"num_heads": 4}}))
    with pytest.raises(ValueError, match=f"{path}: .*'mamba' and 'gated_delta'"):
        read_architecture(tmp_path)


def test_value_head_count_must_be_a_multiple_of_key_heads() -> None:
    check_architecture(GATED_DELTA)
    with pytest.raises(ValueError, match="number of value heads must be a multiple of the 4 key heads, found 6"):
        check_architecture(replace(GATED_DELTA, recurrent=GatedDeltaSizes(4, 6, 4, 5)))


def test_shared_expert_gate_without_a_shared_expert_is_refused() -> None:
    assert GATED_DELTA.experts is not None
    ungated = replace(GATED_DELTA.experts, shared_hidden_size=None)
    with pytest.raises(ValueError, match="has_shared_gate needs a shared expert"):
        check_architecture(replace(GATED_DELTA, experts=ungated))
