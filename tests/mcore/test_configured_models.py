"""Models with experts configured in Megatron itself are built or refused."""

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_mamba_cache import build_engine, with_mamba_cache
from megatron_mamba_cache.mcore.expert_layer import ExpertLayer
from megatron_mamba_cache.mcore.expert_settings import routing_rule
from megatron_mamba_cache.mcore.local_spec import local_hybrid_spec
from tests.mcore.configured_models import SETTINGS, built, configured, spec_with_experts

GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 2, "moe_router_topk": 4}


@pytest.fixture
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that builds a layer."""

    def build(*_arguments: Any, **_settings: Any) -> None:
        raise RuntimeError("a layer took memory first")

    monkeypatch.setattr(MambaLayer, "__init__", build)


def test_moe_model_is_built() -> None:
    config = configured()
    assert (routing_rule(config).top_k, routing_rule(config).score) == (2, "softmax")
    assert isinstance(built(config).decoder.layers[1], ExpertLayer)


@pytest.mark.usefixtures("no_layers")
@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("moe_router_score_function", "tanh", "'tanh'.*support"),
        ("moe_router_load_balancing_type", "sinkhorn", "'sinkhorn'.*set it to 'none'"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], "'sinkhorn'.*set it to 'none'"),
        ("moe_apply_probs_on_input", True, "True.*support"),
        ("moe_router_force_load_balancing", True, "True.*support"),
        ("moe_expert_capacity_factor", 1.5, "1.5.*support"),
        ("moe_shared_expert_overlap", True, "True.*support"),
        ("add_bias_linear", True, "True.*support"),
        ("num_moe_experts", None, "None.*set num_moe_experts"),
        ("top_k", {"moe_router_topk": 8}, "8, but a token can choose from 4"),
        ("moe_router_topk", GROUPS | {"moe_router_topk": 1}, "1; it must be at least .*group_topk, 2, so that each"),
        (
            "moe_router_pre_softmax",
            GROUPS | {"moe_router_pre_softmax": True},
            "True, which is supported only if .* depends on 2: set",
        ),
        ("activation_func_clamp_value", 7.0, "7.0.*support"),
        ("glu_linear_offset", 1.0, "1.0.*support"),
        ("window_size", (4, 0), r"\(4, 0\).*support"),
        ("softmax_type", "off-by-one", "'off-by-one'.*support"),
        ("multi_latent_attention", True, "True.*support"),
        ("flash_decode", True, "True.*support"),
        ("fp8", "e4m3", "'e4m3'.*support"),
        ("fp4", "e2m1", "'e2m1'.*support"),
        ("mlp_chunks_for_prefill", 2, "2.*support"),
    ],
)
def test_unsupported_model_configuration_is_refused(setting: str, value: Any, shown: str) -> None:
    config = configured(**(value if isinstance(value, dict) else {setting: value}))
    with pytest.raises(ValueError, match=f"{setting} is {shown}"):
        built(config)


@pytest.mark.usefixtures("no_layers")
def test_moe_layer_pattern_is_refused_when_the_spec_has_no_experts() -> None:
    """Megatron would skip these layers, and tokens would be wrong."""
    with pytest.raises(
        ValueError, match=r"LocalSpecOptions\.num_experts is None.*hybrid_override_pattern.*set num_experts"
    ):
        built(configured(), local_hybrid_spec())


def test_spec_without_a_layer_type_used_in_the_pattern_is_refused() -> None:
    """A custom spec may lack a symbol; Megatron builds the model all the same."""
    spec = local_hybrid_spec()
    spec.submodules.mlp_layer = IdentityOp
    model = built(configured(), spec, hybrid_override_pattern="M-M*")
    with pytest.raises(ValueError, match="layer pattern contains '-', but its spec has no layer of this type"):
        build_engine(model, SETTINGS)


@pytest.mark.parametrize("setting", ["qk_layernorm", "qk_l2_norm"])
def test_spec_without_the_configured_query_and_key_norms_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} is True, but the spec has no norm.*set it to False"):
        built(configured(**{setting: True}))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("moe_expert_capacity_factor", 1.0), ("moe_router_force_load_balancing", True), ("moe_input_jitter_eps", 0.1)],
)
def test_moe_routing_with_capacity_limits_or_randomness_is_refused(setting: str, value: Any) -> None:
    spec = spec_with_experts()
    spec.submodules.moe_layer.module = TransformerLayer
    spec.submodules.moe_layer.submodules.mlp = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    model = built(configured(), spec)
    assert isinstance(model.decoder.layers[1].mlp, MoELayer)
    build_engine(model, SETTINGS).close()
    setattr(model.config, setting, value)
    with pytest.raises(ValueError, match=f"{setting} is {value!r}.*support"):
        build_engine(model, SETTINGS)


def test_request_longer_than_the_learned_positions_is_refused() -> None:
    model = built(configured(), position_embedding_type="learned_absolute")
    with pytest.raises(ValueError, match="embeddings for 64 positions, but a request may have 256 tokens; set"):
        build_engine(model, SETTINGS)
    build_engine(model, replace(SETTINGS, max_sequence_length=64)).close()


@pytest.mark.parametrize(
    ("layer", "part", "base"),
    [("attention_layer", "self_attention", SelfAttention), ("mamba_layer", "mixer", MambaMixer)],
)
def test_custom_mixer_or_attention_class_is_refused(layer: str, part: str, base: type) -> None:
    own = type("Own", (base,), {})
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=ModuleSpec(MambaMixer))),
        attention_layer=ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=ModuleSpec(SelfAttention))
        ),
    )
    spec = ModuleSpec(MambaStack, submodules=layers)
    with_mamba_cache(spec)
    setattr(getattr(layers, layer).submodules, part, ModuleSpec(own))
    with pytest.raises(
        ValueError, match=f"Own.* as its {part}, which cannot be replaced.*; it must be {base.__name__}"
    ):
        with_mamba_cache(spec)


def test_custom_core_attention_class_is_refused() -> None:
    spec = spec_with_experts()
    own = type("Own", (DotProductAttention,), {"__module__": "somewhere"})
    spec.submodules.attention_layer.submodules.self_attention.submodules.core_attention = own
    with pytest.raises(ValueError, match="core_attention is Own, which would never be called"):
        built(configured(), spec)
