"""Routing and sorting by expert; kernels and references are compared with plain loops in float64.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mamba_cache.kernels.experts import expert_order, routing
from megatron_mamba_cache.kernels.experts import router_logits as logits_kernels
from megatron_mamba_cache.kernels.experts.expert_order import ExpertOrder, order_by_expert, order_by_expert_ref
from megatron_mamba_cache.kernels.experts.router_logits import router_logits, router_logits_ref
from megatron_mamba_cache.kernels.experts.routing import RouteRecord, RoutingRule, SharedGate, route, route_ref
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import same_bits

Route = Callable[..., tuple[Tensor, Tensor]]
Order = Callable[..., ExpertOrder]
Logits = Callable[[Tensor, Tensor], Tensor]
both_routes = pytest.mark.parametrize("op", [route, route_ref])
both_orders = pytest.mark.parametrize("op", [order_by_expert, order_by_expert_ref])

RULES = {
    "nemotron 3 nano": (128, RoutingRule(6, "sigmoid", scale=2.5)),
    "nemotron 3 super": (512, RoutingRule(22, "sigmoid", scale=5.0)),
    "granite 4 small": (72, RoutingRule(10)),
    "qwen3 next": (512, RoutingRule(10)),
    "qwen3.6 35b": (256, RoutingRule(8)),
    "groups": (64, RoutingRule(4, "sigmoid", num_groups=8, top_groups=3)),
    "groups of odd sizes": (15, RoutingRule(5, "sigmoid", num_groups=5, top_groups=2, normalizes=False)),
    "groups of one": (6, RoutingRule(2, "softmax", num_groups=6, top_groups=2)),
    "one expert": (1, RoutingRule(1, "sigmoid", normalizes=False)),
    "all experts": (5, RoutingRule(5, "softmax", normalizes=False, scale=0.5)),
}


def expected_route(logits: list[float], bias: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    """Route one token with plain loops."""
    if rule.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        total = sum(math.exp(logit - max(logits)) for logit in logits)
        scores = [math.exp(logit - max(logits)) / total for logit in logits]
    choice = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups

    def group_score(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-2:])

    groups = sorted(range(rule.num_groups), key=lambda group: (-group_score(group), group))[: rule.top_groups]
    reach = [expert for expert in range(len(logits)) if expert // size in groups]
    ids = sorted(reach, key=lambda expert: (-choice[expert], expert))[: rule.top_k]
    weights = [scores[expert] for expert in ids]
    total = sum(weights) if rule.normalizes else 1.0
    return ids, [weight / total * rule.scale for weight in weights]


@both_routes
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_selects_the_highest_scoring_experts_of_each_token(
    name: str, has_bias: bool, dtype: torch.dtype, op: Route, device: str
) -> None:
    num_experts, rule = RULES[name]
    torch.manual_seed(num_experts)
    wide = torch.randn(7, num_experts + 3, device=device).to(dtype)
    logits, bias = wide[:, :num_experts], torch.randn(num_experts, device=device) if has_bias else None
    ids, weights = op(logits[None], bias, rule)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    offsets = [0.0] * num_experts if bias is None else bias.tolist()
    for token, line in enumerate(logits.tolist()):
        expected_ids, expected_weights = expected_route(line, offsets, rule)
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        if list(found) != expected_ids:  # equal bf16 logits are frequent; then rounding decides
            assert dtype == torch.bfloat16 and num_differing(found, expected_ids) <= 1
            continue
        assert list(found.values()) == pytest.approx(expected_weights, rel=1e-5)


def num_differing(found: Iterable[int], expected: Sequence[int]) -> int:
    """Return the number of experts that only one of the two routings selects."""
    return len(set(found) ^ set(expected)) // 2


@both_routes
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_router_breaks_ties_by_the_lowest_expert(score: str, op: Route, device: str) -> None:
    logits = torch.tensor([[0.0] * 12, [1.0, 2.0] * 6, [-0.0, 0.0] * 6], device=device)
    ids, weights = op(logits[None], None, RoutingRule(4, score))
    assert ids.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7], [0, 1, 2, 3]]
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25, device=device))


@pytest.mark.parametrize("name", RULES)
def test_expert_routing_of_a_token_is_bitwise_equal_in_any_batch(name: str, device: str) -> None:
    num_experts, rule = RULES[name]
    torch.manual_seed(1)
    logits, bias = torch.randn(9, num_experts, device=device), torch.randn(num_experts, device=device)
    ids, weights = route(logits[None], bias, rule)
    for rows in (slice(0, 1), slice(4, 5), slice(2, 9)):
        some_ids, some_weights = route(logits[None, rows], bias, rule)
        assert torch.equal(some_ids, ids[rows]) and same_bits(some_weights, weights[rows])


@both_routes
def test_router_ranks_underflowing_scores_by_logits(op: Route, device: str) -> None:
    logits = torch.tensor([[200.0, -10.0, -20.0, -5.0]], device=device)
    ids, weights = op(logits[None], None, RoutingRule(3))
    assert ids.tolist() == [[0, 3, 1]] and weights[0, 0] == 1 and weights.isfinite().all()


@both_routes
def test_router_assigns_no_expert_to_padding_tokens(op: Route, device: str) -> None:
    torch.manual_seed(2)
    logits, is_real = torch.randn(1, 5, 8, device=device), torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32).to(device)
    ids, weights = op(logits, None, RoutingRule(3), is_real)
    expected_ids, expected_weights = op(logits, None, RoutingRule(3))
    assert ids[[1, 4]].eq(-1).all() and weights[[1, 4]].eq(0).all()
    assert torch.equal(ids[[0, 2, 3]], expected_ids[[0, 2, 3]])
    assert same_bits(weights[[0, 2, 3]], expected_weights[[0, 2, 3]])


@both_routes
@pytest.mark.parametrize("name", ["nemotron 3 nano", "groups", "one expert"])
@pytest.mark.parametrize(("first", "num_recorded"), [(0, 7), (3, 4), (2, 3), (0, 0), (6, 5)])
def test_router_records_experts_at_their_tokens_positions_only(
    name: str, first: int, num_recorded: int, op: Route, device: str
) -> None:
    num_experts, rule = RULES[name]
    torch.manual_seed(3)
    logits = torch.randn(1, 7, num_experts, device=device)
    is_real = torch.tensor([1, 1, 1, 0, 1, 1, 1], dtype=torch.int32).to(device)
    plain = op(logits, None, rule, is_real)
    whole = torch.full((5, 4, 3, rule.top_k), -7, dtype=torch.int16, device=device)
    blocks = torch.tensor([4, 0, -1, 2, 4, 1, 3][:num_recorded], dtype=torch.int32)
    offsets = torch.tensor([3, 0, 1, 2, 0, 3, 3][:num_recorded], dtype=torch.int32)
    expected = whole.clone()
    for index, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
        if block >= 0 and first + index < 7:
            expected[block, offset, 1] = plain[0][first + index].to(torch.int16)
    record = RouteRecord(whole[:, :, 1], blocks.to(device), offsets.to(device), first)
    ids, weights = op(logits, None, rule, is_real, None, record)
    assert torch.equal(whole, expected)
    assert torch.equal(ids, plain[0]) and same_bits(weights, plain[1])


@pytest.mark.parametrize(
    "change",
    [
        {"table": torch.zeros(2, 4, 2, dtype=torch.int16)},
        {"table": torch.zeros(2, 4, 3, dtype=torch.int32)},
        {"table": torch.zeros(2, 4, 6, dtype=torch.int16)[..., ::2]},
        {"blocks": torch.zeros(4, dtype=torch.int64)},
        {"offsets": torch.zeros(3, dtype=torch.int32)},
    ],
)
def test_routing_refuses_records_that_do_not_fit(change: dict[str, Tensor]) -> None:
    zeros = torch.zeros(4, dtype=torch.int32)
    record = RouteRecord(torch.zeros(2, 4, 3, dtype=torch.int16), zeros, zeros)._replace(**change)
    with pytest.raises(ValueError, match="must be"):
        route(torch.zeros(1, 4, 8), None, RoutingRule(3), record=record)


@both_routes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_inputs", [5, 130, 2048])
@pytest.mark.parametrize("has_padding", [False, True])
def test_shared_expert_weight_is_the_sigmoid_of_its_gate(
    num_inputs: int, dtype: torch.dtype, has_padding: bool, op: Route, device: str
) -> None:
    """The gate's logit and its sigmoid are rounded as in torch's linear layer and sigmoid."""
    torch.manual_seed(num_inputs)
    x = torch.randn(6, num_inputs + 8).to(dtype).to(device)[:, :num_inputs]
    gate = torch.randn(1, num_inputs).mul(2 / num_inputs**0.5).to(dtype).to(device)
    logits, is_real = torch.randn(2, 6, 8, device=device), torch.ones(6, dtype=torch.int32, device=device)
    is_real[2] = 0
    given = (is_real,) if has_padding else (None,)
    ids, weights = op(logits, None, RoutingRule(3), *given, SharedGate(x, gate))
    expected_ids, expected = op(logits, None, RoutingRule(3), *given)
    assert torch.equal(ids, expected_ids) and same_bits(weights[:, :3], expected)
    found, shared = weights[:, 3], F.linear(x, gate).sigmoid()[:, 0]
    assert weights.shape == (6, 4) and weights.dtype is torch.float32
    assert torch.equal(found.to(dtype).float(), found)  # the weight is rounded to the dtype
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), shared.double(), rtol=tolerance, atol=0)


@both_routes
def test_shared_expert_gate_logit_is_cast_to_bf16_before_its_sigmoid(op: Route, device: str) -> None:
    x = torch.tensor([[-5.0, -0.01171875]], device=device).bfloat16()  # their sum is not a bf16 number
    _, weights = op(torch.zeros(1, 1, 2, device=device), None, RoutingRule(1), None, SharedGate(x, torch.ones_like(x)))
    cast, exact = (torch.tensor(logit).sigmoid().bfloat16().item() for logit in (-5.0, -5.01171875))
    assert weights[0, 1].item() == cast != exact


def test_shared_expert_weight_is_bitwise_equal_in_any_batch(device: str) -> None:
    torch.manual_seed(4)
    x, gate = torch.randn(5, 70, device=device).bfloat16(), torch.randn(1, 70, device=device).bfloat16()
    logits = torch.randn(1, 5, 8, device=device)
    _, together = route(logits, None, RoutingRule(2), None, SharedGate(x, gate))
    for token in range(5):
        own = slice(token, token + 1)
        _, alone = route(logits[:, own], None, RoutingRule(2), None, SharedGate(x[own], gate))
        assert same_bits(alone, together[own])


@pytest.mark.parametrize(("num_experts", "top_k"), [(512, 10), (256, 8)])
def test_router_matches_transformers(num_experts: int, top_k: int, device: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if not hasattr(modeling, "Qwen3NextTopKRouter"):
        pytest.skip("this transformers routes inside its layer of experts")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    router = modeling.Qwen3NextTopKRouter(modeling.Qwen3NextConfig(**sizes))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(40, 64)
    _, expected_weights, expected_ids = router(x)
    ids, weights = route(router_logits(x.to(device), router.weight.detach().to(device)), None, RoutingRule(top_k))
    assert torch.equal(ids.cpu().long(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("op", [router_logits, router_logits_ref])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_experts"),
    [(1, 72, 5), (19, 1100, 70), (300, 130, 8), (2049, 130, 8), (2049, 72, 129), (4097, 72, 5)],
)
def test_router_logits_match_a_float64_matmul(
    num_tokens: int, num_inputs: int, num_experts: int, dtype: torch.dtype, tolerance: float, op: Logits, device: str
) -> None:
    torch.manual_seed(num_inputs)
    x = torch.randn(num_tokens, num_inputs + 8).to(dtype)[:, :num_inputs]
    gate = torch.randn(num_experts, num_inputs).div(num_inputs**0.5).to(dtype)
    logits = op(x.to(device), gate.to(device)).sum(0).cpu()
    expected = x.double() @ gate.double().T
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [(64, (slice(0, 1), slice(9, 40))), (700, (slice(1, 301),)), (2100, (slice(30, 2090),))]
)
def test_router_logits_are_bitwise_equal_in_all_batches_of_a_kernel_variant(
    num_tokens: int, rows: Sequence[slice], device: str
) -> None:
    if device == "cpu":
        pytest.skip("a CPU's matrix products round by their shape")
    torch.manual_seed(4)
    x, gate = torch.randn(num_tokens, 200, device=device), torch.randn(9, 200, device=device)
    together = router_logits(x, gate).sum(0)
    for some in rows:
        assert same_bits(router_logits(x[some], gate).sum(0), together[some])


@both_orders
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 6, 128), (9, 2, 5), (700, 3, 7), (1500, 3, 7), (3, 1, 1)]
)
@pytest.mark.parametrize("spread", ["random", "one expert", "the last expert", "few here"])
def test_token_expert_pairs_are_sorted_by_expert(
    num_tokens: int, top_k: int, num_experts: int, spread: str, op: Order, device: str
) -> None:
    torch.manual_seed(num_tokens)
    shape = num_tokens, top_k
    ids = {
        "random": torch.randint(num_experts, shape),
        "one expert": torch.zeros(shape, dtype=torch.int64),
        "the last expert": torch.full(shape, num_experts - 1),
        "few here": torch.randint(-1, 4 * num_experts, shape),
    }[spread].to(torch.int32)
    first = num_experts if spread == "few here" else 0
    order = op(ids.to(device), num_experts, first)
    pairs, pair_positions, starts = order.pairs, order.positions, order.starts
    flat = [expert - first for expert in ids.flatten().tolist()]
    here = [pair for pair, expert in enumerate(flat) if 0 <= expert < num_experts]
    assert pairs[: len(here)].tolist() == sorted(here, key=lambda pair: (flat[pair], pair))
    assert starts.tolist() == [sum(flat[pair] < bound for pair in here) for bound in range(num_experts + 1)]
    assert pair_positions.shape == shape
    for pair, position in enumerate(pair_positions.flatten().tolist()):
        assert pairs[position] == pair if pair in set(here) else position == -1


def test_token_expert_pairs_are_sorted_when_chunk_counts_exceed_one_prefix_sum(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_order, "_CHUNKS_AT_A_TIME", 16)
    torch.manual_seed(6)
    ids = torch.randint(11, (2500, 2)).to(torch.int32)
    found, expected = order_by_expert(ids.to(device), 11), order_by_expert_ref(ids, 11)
    assert all(
        torch.equal(getattr(found, name).cpu(), getattr(expected, name)) for name in ("pairs", "positions", "starts")
    )


def test_expert_routing_accepts_zero_tokens(device: str) -> None:
    logits = router_logits(torch.zeros(0, 16, device=device), torch.zeros(8, 16, device=device))
    ids, weights = route(logits, None, RoutingRule(2))
    assert ids.shape == weights.shape == (0, 2)
    order = order_by_expert(ids, 8)
    assert order.pairs.shape == (0,) and order.starts.tolist() == [0] * 9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logits": torch.zeros(3, 8)}, r"\[parts, tokens, experts\]"),
        ({"logits": torch.zeros(1, 3, 16)[..., ::2]}, "experts must be contiguous"),
        ({"bias": torch.zeros(7)}, r"bias \[experts\]"),
        ({"bias": torch.zeros(8, device="meta")}, "the same device"),
        ({"rule": RoutingRule(9)}, "can choose from 8"),
        ({"rule": RoutingRule(2, num_groups=3)}, "into 3 equal groups"),
        ({"shared": SharedGate(torch.zeros(2, 4), torch.zeros(1, 4))}, r"x \[3, inputs\]"),
        ({"shared": SharedGate(torch.zeros(3, 4), torch.zeros(2, 4))}, r"weight \[1, inputs\]"),
        ({"shared": SharedGate(torch.zeros(3, 4), torch.zeros(1, 4).bfloat16())}, "gate must have the same dtype on"),
        ({"shared": SharedGate(torch.zeros(3, 8)[:, ::2], torch.zeros(1, 4))}, "gate must be contiguous"),
    ],
)
def test_expert_routing_refuses_mismatched_arguments(changes: dict, reason: str) -> None:
    arguments = {"logits": torch.zeros(1, 3, 8), "bias": None, "rule": RoutingRule(2)} | changes
    with pytest.raises(ValueError, match=reason):
        route(**arguments)


@pytest.mark.parametrize(
    ("x", "gate", "reason"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 7), r"gate \[experts, inputs\]"),
        (torch.zeros(3, 8), torch.zeros(4, 8).bfloat16(), "the same dtype"),
        (torch.zeros(3, 16)[:, ::2], torch.zeros(4, 8), "contiguous"),
    ],
)
def test_router_logits_refuse_mismatched_arguments(x: Tensor, gate: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        router_logits(x, gate)


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": 1, "top_groups": 2}, {"top_k": 1, "score": "tanh"}])
def test_invalid_routing_rules_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match=r"top_k >= 1|'sigmoid' or 'softmax'"):
        RoutingRule(**fields)


@pytest.mark.parametrize(
    ("name", "has_shared_gate", "is_recorded"),
    [
        ("nemotron 3 nano", False, False),
        ("nemotron 3 nano", False, True),
        ("nemotron 3 super", False, False),
        ("granite 4 small", False, False),
        ("groups", False, False),
        ("qwen3.6 35b", True, True),
        ("qwen3 next", True, False),
    ],
)
def test_expert_routing_does_not_recompile_for_other_token_counts(
    name: str,
    has_shared_gate: bool,
    is_recorded: bool,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
) -> None:
    routes = compile_for_hopper(routing, "_route_kernel")
    products = compile_for_hopper(logits_kernels, "_logits_kernel")
    orders = [
        compile_for_hopper(expert_order, kernel)
        for kernel in ("_order_kernel", "_count_kernel", "_sum_counts_kernel", "_scatter_kernel")
    ]
    num_experts, rule = RULES[name]
    gate, bias = torch.empty(num_experts, 256).bfloat16(), torch.empty(num_experts)
    numbers = (1, 2, 16, 33, 90, 170, 300, 600, 2048, 4096, 8192)
    for num_tokens in numbers:
        x = torch.empty(num_tokens, 256).bfloat16()
        shared = SharedGate(x, gate[:1]) if has_shared_gate else None
        blocks = torch.zeros(num_tokens, dtype=torch.int32)
        layer = num_tokens % 3  # whose address may be a multiple of 2 bytes only
        record = RouteRecord(torch.empty(2, 16, 3, rule.top_k, dtype=torch.int16)[:, :, layer], blocks, blocks)
        ids, _ = route(router_logits(x, gate), bias, rule, None, shared, record if is_recorded else None)
        order_by_expert(ids, num_experts)
    assert len(routes.ptx) == len(products.ptx) == len(numbers)
    has_fewer_parts = num_experts <= 128  # for up to 4,096 tokens; with more experts, logits are not split
    assert len(routes.compiled) == 2 + has_fewer_parts  # variants for split and for whole logits
    assert len(products.compiled) == 3 + has_fewer_parts  # variants by number of tokens
    for kernel, num_forms in zip(orders, (4, 1, 1, 1), strict=True):  # the first: 128, 1,024, 2,048, 4,096 pairs
        assert kernel.ptx and len(kernel.compiled) == num_forms
    for kernel in (routes, products, *orders):
        assert ".local." not in kernel.ptx[0]
