"""Check the MoE settings in Megatron's configuration and derive the routing rule."""

from typing import Any

from megatron.core.transformer import TransformerConfig

from ..kernels.experts.routing_rule import RoutingRule
from .megatron_settings import require_settings

_OF_EXPERTS = {"moe_shared_expert_overlap": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0}
_OF_ROUTERS = {
    "moe_expert_capacity_factor": None,  # no token is dropped
    "moe_apply_probs_on_input": False,
    "moe_router_force_load_balancing": False,
}
_OF_MEGATRONS_LAYER = {
    "moe_expert_capacity_factor": None,
    "moe_router_force_load_balancing": False,
    "moe_input_jitter_eps": None,
}


def check_megatrons_experts(config: TransformerConfig) -> None:
    """Raise `ValueError` if a setting makes the output of Megatron's MoE layer random or dependent on the batch."""
    require_settings(config, _OF_MEGATRONS_LAYER)


def checked_routing(config: TransformerConfig, groups: Any, routing: RoutingRule | None = None) -> RoutingRule:
    """Return the routing rule for the model's MoE layers; raise like `MixtureOfExperts`."""
    check_experts(config, groups)
    rule = routing or routing_rule(config)
    rule.check(config.num_moe_experts)
    return rule


def check_experts(config: TransformerConfig, groups: Any) -> None:
    """Raise `ValueError` if the settings do not allow an MoE layer on these ranks; the message names the setting."""
    if config.num_moe_experts is None:
        raise ValueError("num_moe_experts is None, but the model has MoE layers; set num_moe_experts")
    for name, number, group in (
        ("num_moe_experts", config.num_moe_experts, groups.ep),
        ("moe_ffn_hidden_size", config.moe_ffn_hidden_size, groups.tp),
    ):
        if number % group.size():
            raise ValueError(f"{name} is {number}, which must be divisible by the number of ranks, {group.size()}")
    if groups.expt_tp.size() != groups.tp.size():
        raise ValueError(
            f"the expert tensor-parallel size is {groups.expt_tp.size()}; it must equal the tensor-parallel size, "
            f"{groups.tp.size()}"
        )
    if config.add_bias_linear:
        raise ValueError("add_bias_linear is True, but experts with biases are not supported; set it to False")
    require_settings(config, _OF_EXPERTS)


def routing_rule(config: TransformerConfig) -> RoutingRule:
    """Return the routing rule in Megatron's configuration; raise `ValueError` if a setting is not supported."""
    score, top_k = config.moe_router_score_function, config.moe_router_topk
    if score not in ("sigmoid", "softmax"):
        raise ValueError(f"moe_router_score_function is {score!r}; only 'sigmoid' and 'softmax' are supported")
    require_settings(config, _OF_ROUTERS)
    balancing = config.moe_router_load_balancing_type
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        raise ValueError("moe_router_load_balancing_type is 'sinkhorn', which is not supported; set it to 'none'")
    num_groups = config.moe_router_num_groups or 1
    top_groups = config.moe_router_group_topk or num_groups
    num_scoring = top_k // top_groups
    if config.moe_router_group_topk and num_groups > 1:
        if not num_scoring:
            raise ValueError(
                f"moe_router_topk is {top_k}; it must be at least moe_router_group_topk, {top_groups}, so that each "
                "chosen group has a chosen expert"
            )
        if score == "softmax" and config.moe_router_pre_softmax and num_scoring > 1:
            raise ValueError(
                "moe_router_pre_softmax is True, which is supported only if a group's score depends on one expert; "
                f"here it depends on {num_scoring}: set moe_router_pre_softmax to False"
            )
    return RoutingRule(
        top_k=top_k,
        score=score,
        num_groups=num_groups,
        top_groups=top_groups,
        num_scoring=max(1, num_scoring),
        normalizes=not config.moe_router_pre_softmax if score == "softmax" else top_k > 1,
        scale=config.moe_router_topk_scaling_factor or 1.0,
    )
