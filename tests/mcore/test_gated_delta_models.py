"""Gated DeltaNet models: their layers match the oracle; their states, dtypes and checkpoint names."""

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.mixers.gated_delta import GatedDeltaMixer
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.models.architecture import GatedDeltaSizes
from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_architecture, random_hybrid_model
from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS
from megatron_mamba_cache.recurrences.replay.drafts import ReplayStorage
from megatron_mamba_cache.recurrences.window import WindowStorage
from tests.mcore.configured_models import SETTINGS, built, configured
from tests.mcore.engine_runs import EngineRun, cache_config, hybrid, quantized_bytes, state_bytes, tiny_sizes
from tests.mcore.random_workloads import GATED_DELTA_MODELS

MODELS = [tiny_sizes(**model) for model in GATED_DELTA_MODELS]
models = pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes.pattern)
NUM_TOKENS = 40


@models
def test_each_layer_matches_the_oracle_over_whole_sequences(sizes: RandomHybridConfig) -> None:
    subject = hybrid(sizes)
    generator = torch.Generator().manual_seed(len(sizes.pattern))
    hidden_from = ~torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    has_rope = subject.model.position_embedding_type == "rope"
    rotary = subject.model.rotary_pos_emb(NUM_TOKENS) if has_rope else None
    for number, layer in enumerate(subject.model.decoder.layers):
        hidden = torch.randn(NUM_TOKENS, 2, sizes.hidden_size, generator=generator)
        with torch.inference_mode():
            out = layer(hidden, attention_mask=hidden_from, rotary_pos_emb=rotary)
        out = out[0] if isinstance(out, tuple) else out
        for sequence in range(2):
            before = hidden[:, sequence].double()
            expected = before + subject.oracle.layers[number](before)
            torch.testing.assert_close(out[:, sequence].double(), expected, rtol=2e-5, atol=2e-5)


@models
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_state_slot_size_is_that_of_a_conv_window_and_a_state_matrix(
    sizes: RandomHybridConfig, num_drafts: int
) -> None:
    shape = hybrid(sizes).shape
    config = cache_config(sizes, num_speculative_tokens=num_drafts).resolved()
    assert shape.state_layout(config).slot_bytes == state_bytes(sizes, num_drafts)
    layout = CACHED_FORMS["int8"].layout(shape.state_groups(config), shape.state_layout(config))
    assert layout.slot_bytes == quantized_bytes(sizes)


@pytest.mark.parametrize("form", ["replay", "window"])
def test_draft_states_setting_selects_the_draft_storage(form: str) -> None:
    subject = hybrid(MODELS[0])
    config = cache_config(subject.sizes, draft_states=form, num_speculative_tokens=4)
    run = EngineRun.start(subject, config)
    drafts = run.context.memory.state_pool.drafts
    assert isinstance(drafts, ReplayStorage if form == "replay" else WindowStorage)


def test_decay_parameters_stay_in_float32_in_a_bf16_model() -> None:
    model = random_hybrid_model(replace(MODELS[1], dtype=torch.bfloat16))
    dtypes = {name.rsplit(".", 1)[-1]: parameter.dtype for name, parameter in model.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert kept == {"A_log", "dt_bias"} and set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_norm_epsilon_of_a_mixer_changes_the_model_fingerprint() -> None:
    model, other = (random_hybrid_model(MODELS[0]) for _ in range(2))
    assert model_shape_of(model).fingerprint == model_shape_of(other).fingerprint
    other.decoder.layers[0].mixer.norm.eps *= 2
    assert model_shape_of(model).fingerprint != model_shape_of(other).fingerprint


def test_checkpoint_names_of_projection_and_convolution_match_megatron() -> None:
    model = random_hybrid_model(MODELS[0])
    state = model.sharded_state_dict()
    apply_factories(state)
    found = {part.key: part for part in nested_values(state)}
    prefix = "decoder.layers.0.mixer."
    sizes = {"query": 32, "key": 32, "value": 96, "z": 96, "beta": 4, "alpha": 4}
    for name, requests in sizes.items():
        assert tuple(found[f"{prefix}in_proj.weight.{name}"].global_shape) == (requests, 32)
    convolved = {key.rpartition(".")[2] for key in found if key.startswith(f"{prefix}conv1d.weight.")}
    assert convolved == {"query", "key", "value"}
    whole = torch.cat([found[f"{prefix}in_proj.weight.{name}"].data for name in sizes])
    assert torch.equal(whole, model.decoder.layers[0].mixer.in_proj.weight)
    assert found[f"{prefix}norm.weight"].data.shape == (24,)


def test_training_and_packed_sequences_are_refused() -> None:
    mixer = random_hybrid_model(MODELS[0]).decoder.layers[0].mixer
    hidden = torch.zeros(8, 1, 32)
    with pytest.raises(NotImplementedError, match="packed_seq_params is not supported"):
        mixer(hidden, packed_seq_params=object())
    mixer.train()
    with pytest.raises(NotImplementedError, match=r"support only inference; call model\.eval\(\)"):
        mixer(hidden)


def test_local_layer_spec_builds_gated_delta_layers() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    spec = local_hybrid_spec(LocalSpecOptions(mixer="gated_delta", grain=32, num_experts=4))
    model = built(configured(**sizes, linear_value_head_dim=16), spec).eval()
    mixers = [module for module in model.modules() if isinstance(module, GatedDeltaMixer)]
    assert [mixer.recurrence.grain for mixer in mixers] == [32, 32]
    build_engine(model, SETTINGS).close()


@pytest.mark.parametrize(("num_heads", "message"), [((4, 6), "6 is not divisible by linear_num_key_heads 4")])
def test_value_heads_not_divisible_by_key_heads_are_refused(num_heads: tuple[int, int], message: str) -> None:
    keys, values = num_heads
    spec = local_hybrid_spec(LocalSpecOptions(mixer="gated_delta", num_experts=4))
    with pytest.raises(ValueError, match=f"linear_num_value_heads {message}"):
        built(configured(linear_num_key_heads=keys, linear_num_value_heads=values), spec)


def test_random_gated_delta_models_have_gates_norms_and_shared_experts() -> None:
    architecture = random_architecture(RandomHybridConfig("MEM*E", gated_delta=GatedDeltaSizes(2, 4, 8, 8)))
    attention, experts = architecture.attention, architecture.experts
    assert attention.has_output_gate and attention.has_head_norms and attention.rotary_percent == 0.25
    assert architecture.zero_centered_norms and experts is not None and experts.has_shared_gate
