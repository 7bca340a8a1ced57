"""Routing and the order of tokens by expert, kernels and twins, against plain loops in float64.

Where a kernel neither compiles nor is interpreted, the op is its twin; `test_interpreted` runs this file again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.experts import expert_order, routing
from megatron_mamba_cache.kernels.experts.expert_order import ExpertOrder, order_by_expert, order_by_expert_ref
from megatron_mamba_cache.kernels.experts.routing import RoutingRule, route, route_ref
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_rows import same_bits

Route = Callable[[Tensor, Tensor | None, RoutingRule], tuple[Tensor, Tensor]]
Order = Callable[[Tensor, int], ExpertOrder]
both_routes = pytest.mark.parametrize("op", [route, route_ref])
both_orders = pytest.mark.parametrize("op", [order_by_expert, order_by_expert_ref])

RULES = {
    "nemotron 3 nano": (128, RoutingRule(6, "sigmoid", scale=2.5)),
    "nemotron 3 super": (512, RoutingRule(22, "sigmoid", scale=5.0)),
    "granite 4 small": (72, RoutingRule(10)),
    "groups": (64, RoutingRule(4, "sigmoid", num_groups=8, top_groups=3)),
    "groups of odd sizes": (15, RoutingRule(5, "sigmoid", num_groups=5, top_groups=2, normalizes=False)),
    "groups of one": (6, RoutingRule(2, "softmax", num_groups=6, top_groups=2)),
    "one expert": (1, RoutingRule(1, "sigmoid", normalizes=False)),
    "all experts": (5, RoutingRule(5, "softmax", normalizes=False, scale=0.5)),
}


def expected_route(logits: list[float], bias: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """Route one token by plain loops."""
    if rule.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit - max(logits)) for logit in logits)
        scores = [math.exp(logit - max(logits)) / total for logit in logits]
    choice = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups

    def worth(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-2:])

    groups = sorted(range(rule.num_groups), key=lambda group: (-worth(group), group))[: rule.top_groups]
    reach = [expert for expert in range(len(logits)) if expert // size in groups]
    ids = sorted(reach, key=lambda expert: (-choice[expert], expert))[: rule.top_k]
    weights = [scores[expert] for expert in ids]
    total = sum(weights) if rule.normalizes else 1.0
    return ids, [weight / total * rule.scale for weight in weights]


@both_routes
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_gets_its_best_experts(
    name: str, has_bias: bool, dtype: torch.dtype, op: Route, device: str
) -> None:
    num_experts, rule = RULES[name]
    torch.manual_seed(num_experts)
    wide = torch.randn(7, num_experts + 3, device=device).to(dtype)
    logits, bias = wide[:, :num_experts], torch.randn(num_experts, device=device) if has_bias else None
    ids, weights = op(logits, bias, rule)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    offsets = [0.0] * num_experts if bias is None else bias.tolist()
    for token, line in enumerate(logits.tolist()):
        expected_ids, expected_weights = expected_route(line, offsets, rule)
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        if list(found) != expected_ids:  # bf16 logits are often equal, and then rounding decides
            assert dtype == torch.bfloat16 and num_differing(found, expected_ids) <= 1
            continue
        assert list(found.values()) == pytest.approx(expected_weights, rel=1e-5)


def num_differing(found: Iterable[int], expected: Sequence[int]) -> int:
    """Return how many experts are in one of two choices only."""
    return len(set(found) ^ set(expected)) // 2


@both_routes
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_equal_scores_go_to_the_lowest_experts(score: str, op: Route, device: str) -> None:
    logits = torch.tensor([[0.0] * 12, [1.0, 2.0] * 6, [-0.0, 0.0] * 6], device=device)
    ids, weights = op(logits, None, RoutingRule(4, score))
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7], [0, 1, 2, 3]]
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25, device=device))


@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_same_bits_in_any_batch(name: str, device: str) -> None:
    num_experts, rule = RULES[name]
    torch.manual_seed(1)
    logits, bias = torch.randn(9, num_experts, device=device), torch.randn(num_experts, device=device)
    ids, weights = route(logits, bias, rule)
    for rows in (slice(0, 1), slice(4, 5), slice(2, 9)):
        some_ids, some_weights = route(logits[rows], bias, rule)
        assert torch.equal(some_ids, ids[rows]) and same_bits(some_weights, weights[rows])


@both_routes
def test_scores_that_vanish_still_choose_by_logits(op: Route, device: str) -> None:
    logits = torch.tensor([[200.0, -10.0, -20.0, -5.0]], device=device)
    ids, weights = op(logits, None, RoutingRule(3))
    assert ids.tolist() == [[0, 3, 1]] and weights[0, 0] == 1 and weights.isfinite().all()


@both_orders
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 6, 128), (9, 2, 5), (700, 3, 7), (3, 1, 1)])
@pytest.mark.parametrize("spread", ["random", "one expert", "the last expert"])
def test_pairs_are_in_the_order_of_experts(
    num_tokens: int, top_k: int, num_experts: int, spread: str, op: Order, device: str
) -> None:
    torch.manual_seed(num_tokens)
    shape = num_tokens, top_k
    ids = {
        "random": torch.randint(num_experts, shape),
        "one expert": torch.zeros(shape, dtype=torch.int64),
        "the last expert": torch.full(shape, num_experts - 1),
    }[spread].to(torch.int32)
    pairs, places, starts = op(ids.to(device), num_experts)
    flat = ids.flatten().tolist()
    assert pairs.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert pairs[places.flatten().long()].tolist() == list(range(len(flat))) and places.shape == shape
    assert starts.tolist() == [sum(expert < bound for expert in flat) for bound in range(num_experts + 1)]


def test_no_tokens(device: str) -> None:
    ids, weights = route(torch.zeros(0, 8, device=device), None, RoutingRule(2))
    assert ids.shape == weights.shape == (0, 2)
    order = order_by_expert(ids, 8)
    assert order.pairs.shape == (0,) and order.starts.tolist() == [0] * 9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logits": torch.zeros(3)}, r"\[tokens, experts\]"),
        ({"logits": torch.zeros(3, 16)[:, ::2]}, "contiguous experts"),
        ({"bias": torch.zeros(7)}, r"bias \[experts\]"),
        ({"bias": torch.zeros(8, device="meta")}, "one device"),
        ({"rule": RoutingRule(9)}, "can choose from 8"),
        ({"rule": RoutingRule(2, num_groups=3)}, "3 groups of one size"),
    ],
)
def test_arguments_that_disagree_are_refused(changes: dict, reason: str) -> None:
    arguments = {"logits": torch.zeros(3, 8), "bias": None, "rule": RoutingRule(2)} | changes
    with pytest.raises(ValueError, match=reason):
        route(**arguments)


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": 1, "top_groups": 2}, {"top_k": 1, "score": "tanh"}])
def test_rules_that_cannot_be_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"top_k >= 1|'sigmoid' and 'softmax'"):
        RoutingRule(**fields)


@pytest.mark.parametrize("name", ["nemotron 3 nano", "nemotron 3 super", "granite 4 small", "groups"])
def test_other_numbers_of_tokens_compile_nothing_new(
    name: str, compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched]
) -> None:
    routes = compile_for_hopper(routing, "_route_kernel")
    orders = compile_for_hopper(expert_order, "_order_kernel")
    num_experts, rule = RULES[name]
    for num_tokens in (1, 2, 16, 33, 4096):
        ids, _ = route(torch.empty(num_tokens, num_experts), torch.empty(num_experts), rule)
        order_by_expert(ids, num_experts)
    for kernel in (routes, orders):
        assert len(kernel.ptx) == 5 and len(kernel.compiled) == 1 and ".local." not in kernel.ptx[0]
