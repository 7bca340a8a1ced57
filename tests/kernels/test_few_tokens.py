"""Expert GEMMs for few tokens; kernels and references are compared with plain loops in float64."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.experts import pair_gemms, summed_gemms
from megatron_mamba_cache.kernels.experts.pair_gemms import pair_gemm, pair_gemm_ref
from megatron_mamba_cache.kernels.experts.summed_gemms import summed_gemm, summed_gemm_ref
from tests.kernels.expert_layers import TOLERANCES, Layer, choice
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits

OPS = {"kernel": (pair_gemm, summed_gemm), "reference": (pair_gemm_ref, summed_gemm_ref)}


def run(
    ops: str,
    layer: Layer,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    addend: Tensor | None = None,
    shared: Layer | None = None,
) -> Tensor:
    """Compute the layer's output [tokens, hidden] with the ops, and check whether kernels were launched.

    Args:
        shared: A layer with one expert, which processes all tokens.
    """
    product, total = OPS[ops]
    device, of_kernel = x.device.type, ops == "kernel"
    with (
        launches_expected(pair_gemms, "_pairs_kernel", of_kernel=of_kernel, device=device),
        launches_expected(summed_gemms, "_sum_kernel", of_kernel=of_kernel, device=device),
    ):
        if shared is None:
            inner, _ = product(x, layer.first, ids, activation=layer.activation)
            return total(inner, layer.second, ids, weights, addend)
        inner, inner_shared = product(x, layer.first, ids, shared.first[0], activation=layer.activation)
        given = {} if ops == "reference" else {"follows_pairs": addend is None}
        return total(
            inner,
            layer.second,
            ids,
            weights,
            addend,
            shared_rows=inner_shared,
            shared_weight=shared.second[0],
            **given,
        )


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu", "none"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "inside"),
    [(1, 3, 8, 64, 96), (4, 2, 5, 72, 40), (3, 1, 4, 131, 33), (2, 1, 1, 16, 16), (2, 12, 14, 24, 16)],
)
def test_expert_gemms_of_few_tokens_sum_the_weighted_experts(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inside: int,
    dtype: torch.dtype,
    activation: str,
    ops: str,
    device: str,
) -> None:
    layer = Layer(num_experts, hidden, inside, activation, dtype).to(device)
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden + 8).to(dtype)[:, :hidden].to(device)
    ids, weights = choice(num_tokens, top_k, num_experts, "random").to(device), torch.rand(num_tokens, top_k).to(device)
    addend = torch.randn(num_tokens, hidden).to(dtype).to(device)
    out = run(ops, layer, x, ids, weights, addend)
    expected = layer.expected(x, ids, weights) + addend.double().cpu()
    assert out.dtype == dtype and out.shape == (num_tokens, hidden)
    tolerance = TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("has_addend", [False, True])
@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu", "none"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_tokens", "inside", "widest"), [(1, 96, 4096), (4, 50, 4096), (3, 33, 32), (2, 3, 64)])
def test_expert_gemms_of_few_tokens_add_the_shared_expert(
    num_tokens: int,
    inside: int,
    widest: int,
    dtype: torch.dtype,
    activation: str,
    has_addend: bool,
    ops: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_gemms, "_WIDEST", widest)
    layer, shared = (Layer(*sizes, activation, dtype).to(device) for sizes in ((5, 72, 40), (1, 72, inside)))
    torch.manual_seed(7)
    x = torch.randn(num_tokens, 72).to(dtype).to(device)
    ids, weights = choice(num_tokens, 2, 5, "random").to(device), torch.rand(num_tokens, 2).to(device)
    addend = torch.randn(num_tokens, 72).to(dtype).to(device) if has_addend else None
    out = run(ops, layer, x, ids, weights, addend, shared)
    expected = layer.expected(x, ids, weights) + shared.expected(x, torch.zeros_like(ids[:, :1]), torch.ones(len(x), 1))
    if addend is not None:
        expected += addend.double().cpu()
    tolerance = TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_last_routing_weight_scales_the_shared_expert(ops: str, dtype: torch.dtype, device: str) -> None:
    """The weight scales the output of the shared expert's GEMM, or an addend that is rounded afterwards."""
    layer, shared = (Layer(*sizes, "gated_silu", dtype).to(device) for sizes in ((5, 72, 40), (1, 72, 24)))
    torch.manual_seed(8)
    x, ids = torch.randn(3, 72).to(dtype).to(device), choice(3, 2, 5, "random").to(device)
    weights, none = torch.rand(3, 3).to(device), torch.zeros(3, 2, device=device)
    own, everyone = weights[:, :2].contiguous(), torch.zeros_like(ids[:, :1])
    of_shared = shared.expected(x, everyone, weights[:, 2:].cpu())
    expected = layer.expected(x, ids, own) + of_shared
    tolerance = TOLERANCES[dtype] * expected.abs().max().item()
    found = run(ops, layer, x, ids, weights, shared=shared)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=tolerance)
    addend = shared.expected(x, everyone, torch.ones(3, 1)).to(dtype).to(device)
    found = run(ops, layer, x, ids, weights, addend)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=tolerance)
    nothing = torch.cat((none, weights[:, 2:]), dim=1)
    weighted = (addend.float() * weights[:, 2:]).to(dtype)
    assert same_bits(run(ops, layer, x, ids, nothing, addend), weighted)
    both = run(ops, layer, x, ids, weights, addend, shared)  # then the last weight scales the GEMM's output
    torch.testing.assert_close(both.double().cpu(), expected + addend.double().cpu(), rtol=0, atol=2 * tolerance)


def test_expert_sum_refuses_weights_that_do_not_match_the_experts() -> None:
    layer = Layer(5, 72, 40, "none", torch.float32)
    rows, ids = torch.zeros(6, 40), choice(3, 2, 5, "random")
    for weights in (torch.zeros(3, 4), torch.zeros(3, 1), torch.zeros(2, 2), torch.zeros(3, 4)[:, :2]):
        with pytest.raises(ValueError, match=r"weights must be contiguous \[3, 2\]"):
            summed_gemm(rows, layer.second, ids, weights)


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
def test_expert_gemms_of_few_tokens_are_bitwise_equal_in_any_batch(activation: str, device: str) -> None:
    layer = Layer(6, 80, 48, activation, torch.bfloat16).to(device)
    torch.manual_seed(3)
    x, ids = torch.randn(4, 80).bfloat16().to(device), choice(4, 2, 6, "random").to(device)
    weights = torch.rand(4, 2).to(device)
    shared = Layer(1, 80, 32, activation, torch.bfloat16).to(device)
    together = run("kernel", layer, x, ids, weights, shared=shared)
    for token in range(4):
        own = slice(token, token + 1)
        assert same_bits(run("kernel", layer, x[own], ids[own], weights[own], shared=shared), together[own])


def test_expert_gemms_of_few_tokens_support_inputs_wider_than_a_tile(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_gemms, "_WIDEST", 32)
    layer = Layer(3, 80, 48, "gated_silu", torch.float32).to(device)
    torch.manual_seed(4)
    x, ids, weights = torch.randn(2, 80).to(device), choice(2, 2, 3, "random").to(device), torch.rand(2, 2).to(device)
    expected = layer.expected(x, ids, weights)
    torch.testing.assert_close(run("kernel", layer, x, ids, weights).double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", OPS)
def test_expert_gemms_of_few_tokens_ignore_experts_on_other_ranks(ops: str, device: str) -> None:
    layer = Layer(6, 80, 48, "squared_relu", torch.float32).to(device)
    torch.manual_seed(5)
    x, ids, weights = torch.randn(4, 80).to(device), choice(4, 3, 6, "random").to(device), torch.rand(4, 3).to(device)
    ids[1] = -1
    product, total = OPS[ops]
    out = torch.zeros(4, 80, dtype=torch.float64)
    for first in (0, 3):
        experts = slice(first, first + 3)
        inner, _ = product(x, layer.first[experts], ids, activation="squared_relu", first_expert=first)
        elsewhere = ((ids < first) | (ids >= first + 3)).flatten()
        inner[elsewhere] = float("nan")  # must not be read
        out += total(inner, layer.second[experts], ids, weights, first_expert=first).double().cpu()
    expected = layer.expected(x, ids.clamp_min(0), weights.masked_fill(ids < 0, 0))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(3, 7)}, r"\[experts, outputs, inputs\]"),
        ({"weight": torch.zeros(2, 4, 8).bfloat16()}, "the same dtype"),
        ({"ids": torch.zeros(3, 1)}, "int32"),
        ({"weight": torch.zeros(2, 4, 16)[:, :, ::2]}, "contiguous"),
        (
            {"shared_weight": torch.zeros(4, 9)},
            "shared expert's weight must have shape .* and its input one row .* per token",
        ),
        (
            {"shared_weight": torch.zeros(4, 8).bfloat16()},
            "weight and input of the shared expert must be contiguous torch.float32",
        ),
    ],
)
def test_expert_gemms_of_few_tokens_refuse_mismatched_arguments(changes: dict, reason: str) -> None:
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(2, 4, 8), "ids": torch.zeros(3, 1, dtype=torch.int32)}
    with pytest.raises(ValueError, match=reason):
        pair_gemm(**(arguments | changes))
