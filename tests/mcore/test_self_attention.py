"""Attention with head norms, partial rotation and an output gate matches Megatron's own modules."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_mamba_cache.kernels.attention.interface import AttentionRows
from megatron_mamba_cache.kernels.attention.kv_append import append_kv
from megatron_mamba_cache.kernels.attention.kv_values import UNSCALED, KVScales
from megatron_mamba_cache.kernels.attention.reference import paged_attention_ref
from megatron_mamba_cache.mcore import self_attention
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.model_ranks import initialize_single_process
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention, rotation_table
from tests.kernels.packed_batches import same_bits

LENGTHS, BLOCK, NUM_PADDING = (9, 1, 4), 8, 2


def built_layer(
    *, has_gate: bool, has_norms: bool, rotates: bool, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[CachingSelfAttention, Tensor | None]:
    """Return a layer of 6 heads, 3 per KV head, with random weights, and the angles of its positions."""
    initialize_single_process()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        mamba_state_dim=16,
        mamba_num_groups=1,
        attention_output_gate=has_gate,
        qk_layernorm=has_norms,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_mamba_mem_eff_path=False,
        params_dtype=dtype,
        **settings,
    )
    spec = local_hybrid_spec(LocalSpecOptions(has_head_norms=has_norms))
    rope = {"position_embedding_type": "rope", "rotary_percent": 0.5} if rotates else {}
    model = MambaModel(config, spec, 64, 64, hybrid_override_pattern="M*", **rope).to(torch.cuda.current_device())
    layer = model.decoder.layers[1].self_attention
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer.eval(), model.rotary_pos_emb(64) if rotates else None


@dataclass
class StubContext:
    """The part of a context that a layer needs: prompts of `LENGTHS` tokens, followed by padding."""

    layer: CachingSelfAttention
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        placed = [(row, token) for row, length in enumerate(LENGTHS) for token in range(length)]
        tokens = [*placed, *[(-1, 0)] * NUM_PADDING]
        blocks = [2 * row + token // BLOCK if row >= 0 else -1 for row, token in tokens]
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=self.device)
        table = torch.arange(2 * len(LENGTHS), dtype=torch.int32, device=self.device).view(-1, 2)
        self.caches = torch.zeros(2, len(table) * 2, BLOCK, 2, 16, dtype=self.dtype, device=self.device)
        self.rows = AttentionRows(
            torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            lengths,
            table,
            LENGTHS,
            LENGTHS,
            table.cpu().numpy(),
        )
        self.token_to_pos_ids = torch.tensor([token for _, token in tokens], device=self.device)
        self.batch = SimpleNamespace(
            num_tokens=len(tokens),
            positions=self.token_to_pos_ids,
            token_blocks=torch.tensor(blocks, dtype=torch.int32, device=self.device),
            token_offsets=torch.tensor([token % BLOCK for _, token in tokens], dtype=torch.int32, device=self.device),
        )
        self.step = SimpleNamespace(batch=self.batch)
        self.padded_active_token_count = len(tokens)
        self.token_to_position_in_request = self.token_to_pos_ids
        self.use_flashinfer_fused_rope = False

    apply_rotary_emb_query = DynamicInferenceContext.apply_rotary_emb_query
    apply_rotary_emb_key = DynamicInferenceContext.apply_rotary_emb_key

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        return False

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        return self.rows.cu_query, max(LENGTHS)

    def append_key_value_cache(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch = self.batch
        append_kv(key.squeeze(1), value.squeeze(1), *self.caches, batch.token_blocks, batch.token_offsets)

    def key_value_cache(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return *self.caches, self.rows.block_table

    def kv_scales(self, layer: int) -> KVScales:
        return UNSCALED

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales) -> Tensor:
        return paged_attention_ref(query, k_cache, v_cache, self.rows, 16**-0.5, scales)


def inputs_of(layer: CachingSelfAttention) -> tuple[Tensor, StubContext]:
    weight = layer.linear_qkv.weight
    hidden = torch.randn(sum(LENGTHS) + NUM_PADDING, 1, 48, generator=torch.Generator().manual_seed(4))
    return hidden.to(weight), StubContext(layer, weight.device, weight.dtype)


def by_megatrons_parts(layer: CachingSelfAttention, prompt: Tensor, angles: Tensor | None) -> Tensor:
    """Return the output [tokens, 1, hidden] of one prompt: Megatron's own modules around torch's attention."""
    query, key, value, *gates = layer.get_query_key_value_tensors(
        prompt, output_gate=layer.config.attention_output_gate
    )
    if angles is not None:
        query, key = (apply_rotary_pos_emb(x, angles[: len(prompt)], layer.config) for x in (query, key))
    heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    for gate in gates:
        out = layer._apply_output_gate(out.contiguous(), gate)
    projected: Tensor = layer.linear_proj(out.flatten(2))[0]
    return projected


COMBINATIONS = pytest.mark.parametrize(("has_gate", "has_norms", "rotates"), list(product((False, True), repeat=3)))


@COMBINATIONS
@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_step_matches_megatrons_modules(
    has_gate: bool,
    has_norms: bool,
    rotates: bool,
    is_zero_centered: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, angles = built_layer(
        has_gate=has_gate,
        has_norms=has_norms,
        rotates=rotates,
        dtype=dtype,
        layernorm_zero_centered_gamma=is_zero_centered,
    )
    hidden, context = inputs_of(layer)
    with torch.inference_mode():
        with pytest.MonkeyPatch.context() as patch:
            for name in ("get_query_key_value_tensors", "_adjust_key_value_for_inference"):
                patch.setattr(
                    CachingSelfAttention, name, lambda *_args, **_settings: pytest.fail("took Megatron's path")
                )
            found, _ = layer(hidden, None, inference_context=context, rotary_pos_emb=angles)
        monkeypatch.setattr(CachingSelfAttention, "_is_computed_by_head", lambda *_: False)
        other = inputs_of(layer)[1]
        expected, _ = layer(hidden, None, inference_context=other, rotary_pos_emb=angles)
    if not has_norms:  # tokens of models that have none are the same to the bit
        assert same_bits(context.caches, other.caches) and same_bits(found, expected)
    tolerance = 2**-5 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(context.caches, other.caches, rtol=tolerance, atol=tolerance)


@COMBINATIONS
def test_packed_attention_matches_megatrons_ops_for_each_prompt(has_gate: bool, has_norms: bool, rotates: bool) -> None:
    layer, angles = built_layer(
        has_gate=has_gate, has_norms=has_norms, rotates=rotates, layernorm_zero_centered_gamma=True
    )
    hidden, context = inputs_of(layer)
    with torch.inference_mode():
        found, _ = layer(hidden, None, inference_context=context, rotary_pos_emb=angles)
        for prompt in hidden[: sum(LENGTHS)].split(LENGTHS):
            expected = by_megatrons_parts(layer, prompt, angles)
            torch.testing.assert_close(found[: len(prompt)], expected, rtol=1e-4, atol=1e-4)
            found = found[len(prompt) :]


@pytest.mark.parametrize("setting", ["rotary_interleaved", "test_mode"])
def test_unsupported_attention_settings_run_megatrons_code(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, angles = built_layer(has_gate=True, has_norms=False, rotates=True)
    monkeypatch.setattr(layer.config, setting, True)
    monkeypatch.setattr(CachingSelfAttention, "run_realtime_tests", lambda self: None)
    monkeypatch.setattr(self_attention, "write_attention_inputs", lambda *_: pytest.fail("took the kernel"))
    hidden, context = inputs_of(layer)
    with torch.inference_mode():
        found, _ = layer(hidden, None, inference_context=context, rotary_pos_emb=angles)
        prompt = hidden[: LENGTHS[0]]
        expected = by_megatrons_parts(layer, prompt, angles)
    torch.testing.assert_close(found[: len(prompt)], expected, rtol=1e-4, atol=1e-4)


def test_unsupported_head_norms_run_their_own_modules() -> None:
    layer, angles = built_layer(has_gate=True, has_norms=True, rotates=True)
    layer.q_layernorm, layer.k_layernorm = (nn.LayerNorm(16, device=layer.linear_qkv.weight.device) for _ in range(2))
    hidden, context = inputs_of(layer)
    with torch.inference_mode():
        found, _ = layer(hidden, None, inference_context=context, rotary_pos_emb=angles)
        prompt = hidden[: LENGTHS[0]]
        expected = by_megatrons_parts(layer, prompt, angles)
    torch.testing.assert_close(found[: len(prompt)], expected, rtol=1e-4, atol=1e-4)


def test_cached_rotation_table_is_freed_with_its_angles() -> None:
    angles = torch.rand(5, 1, 1, 8)
    table = rotation_table(angles, torch.bfloat16)
    assert table.shape == (5, 2, 4) and rotation_table(angles, torch.bfloat16) is table
    assert rotation_table(angles, torch.float32).dtype is torch.float32
    num_kept = len(self_attention._TABLES)
    del angles
    assert len(self_attention._TABLES) == num_kept - 1
