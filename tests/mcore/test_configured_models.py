"""Models of experts that are configured in Megatron itself; what cannot be served is refused, not built."""

from typing import Any

import pytest
import torch
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.expert_layer import ExpertLayer, routing_rule
from megatron_mamba_cache.mcore.local_spec import LocalSpecOptions, local_hybrid_spec
from megatron_mamba_cache.mcore.process_groups import initialize_single_process

PATTERN = "MEM*"


def configured(**settings: Any) -> TransformerConfig:
    """Return the configuration of a tiny hybrid with four experts; the settings are set when Megatron has checked."""
    config = TransformerConfig(
        num_layers=len(PATTERN),
        hidden_size=64,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        mamba_num_heads=4,
        mamba_head_dim=32,
        mamba_state_dim=16,
        mamba_num_groups=1,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_mamba_mem_eff_path=False,
    )
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def built(config: TransformerConfig, num_experts: int | None = 4) -> MambaModel:
    """Build the model as a user of Megatron does."""
    initialize_single_process()
    spec = local_hybrid_spec(LocalSpecOptions(num_experts=num_experts))
    model = MambaModel(config, spec, vocab_size=128, max_sequence_length=64, hybrid_override_pattern=PATTERN)
    return model.to(torch.cuda.current_device())


@pytest.fixture
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail that builds a layer."""

    def build(*_arguments: Any, **_settings: Any) -> None:
        raise RuntimeError("a layer took memory first")

    monkeypatch.setattr(MambaLayer, "__init__", build)


def test_a_model_with_experts_is_built() -> None:
    config = configured()
    assert (routing_rule(config).top_k, routing_rule(config).score) == (2, "softmax")
    assert isinstance(built(config).decoder.layers[1], ExpertLayer)


@pytest.mark.usefixtures("no_layers")
@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("moe_router_score_function", "tanh", "'tanh'.*support"),
        ("moe_router_load_balancing_type", "sinkhorn", "'sinkhorn'.*set 'none'"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], "'sinkhorn'.*set 'none'"),
        ("moe_apply_probs_on_input", True, "True.*support"),
        ("moe_router_force_load_balancing", True, "True.*support"),
        ("moe_expert_capacity_factor", 1.5, "1.5.*support"),
        ("moe_shared_expert_overlap", True, "True; set it to False"),
        ("add_bias_linear", True, "True.*support"),
        ("num_moe_experts", None, "None.*set it"),
        ("top_k", None, "8, and a token can choose from 4"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(setting: str, value: Any, shown: str) -> None:
    config = configured(moe_router_topk=8) if setting == "top_k" else configured(**{setting: value})
    with pytest.raises(ValueError, match=f"{setting} is {shown}"):
        built(config)


@pytest.mark.usefixtures("no_layers")
def test_a_spec_without_experts_is_refused_for_a_pattern_with_some() -> None:
    """Megatron would leave these layers out, and tokens would be wrong."""
    with pytest.raises(ValueError, match=r"num_experts of LocalSpecOptions is None.*hybrid_override_pattern.*set it"):
        built(configured(), num_experts=None)


def test_a_model_whose_layers_are_left_out_is_refused() -> None:
    """A spec of the user's own may have none for a symbol; Megatron builds the model all the same."""
    initialize_single_process()
    spec = local_hybrid_spec()
    spec.submodules.mlp_layer = IdentityOp
    settings = {"vocab_size": 128, "max_sequence_length": 64, "hybrid_override_pattern": "M-M*"}
    model = MambaModel(configured(), spec, **settings).to(torch.cuda.current_device())
    with pytest.raises(ValueError, match="the model's spec has no layer for '-'"):
        build_engine(model, CacheConfig(block_size_tokens=128, buffer_size_gb=0.01))
