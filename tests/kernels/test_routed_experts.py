"""Kernel launches of an MoE layer, and the point at which overlapped work is launched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.activations import Activation, squared_relu
from megatron_mamba_cache.kernels.experts import gemm_tiles
from megatron_mamba_cache.kernels.experts import routed_experts as routed_experts_module
from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_ref
from megatron_mamba_cache.kernels.experts.overlapped_expert import OverlappedExpert, shared_gemm, takes_shared_gemm
from megatron_mamba_cache.kernels.experts.routed_experts import routed_experts
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED

TOP_K = 2


def layer_of(
    num_tokens: int,
    num_experts: int,
    hidden: int,
    apart: Callable[[Tensor], Tensor] | None,
    overlapped: OverlappedExpert,
) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(num_experts, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    first, second = torch.ones(num_experts, 128, hidden).bfloat16(), torch.ones(num_experts, hidden, 128).bfloat16()
    x, ids = torch.ones(num_tokens, hidden).bfloat16(), torch.stack(chosen).to(torch.int32)
    return routed_experts(x, ids, torch.ones(ids.shape), first, second, "none", apart=apart, overlapped=overlapped)


@pytest.mark.skipif(INTERPRETED, reason="the card is pretended")
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden", "apart", "follows_first", "comes_last"),
    [
        pytest.param(300, 16, 128, None, True, True, id="long tiles"),
        pytest.param(200, 16, 128, None, True, False, id="too few tokens to hold the routing up"),
        pytest.param(300, 16, 128, torch.relu, False, True, id="an activation between the products"),
        pytest.param(300, 16, 136, None, False, False, id="inputs that long tiles do not take in the first product"),
        pytest.param(1100, 2, 128, None, False, False, id="more rows an expert than long tiles gather"),
        pytest.param(40, 16, 128, None, False, False, id="short tiles"),
    ],
)
def test_expert_weights_are_prefetched_only_after_a_gemm_that_waits_for_its_inputs(
    num_tokens: int,
    num_experts: int,
    hidden: int,
    apart: Callable[[Tensor], Tensor] | None,
    follows_first: bool,
    comes_last: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second GEMM then reads its tiles before the previous kernel ends, so that kernel must not write them."""
    events: list[object] = []

    class NotesLaunch(OverlappedExpert):
        def launch(self, *, after_queued: bool) -> None:
            events.append(("overlapped", after_queued))

    def noting_product(*args: object, **settings: object) -> Tensor:
        events.append(("product", settings.get("follows_first", False)))
        return grouped_gemm(*args, **settings)

    monkeypatch.setattr(gemm_tiles, "can_load_boxes", lambda weight: True)
    monkeypatch.setattr(gemm_tiles, "has_tested_gluon", lambda: True)
    monkeypatch.setattr(routed_experts_module, "grouped_gemm", noting_product)
    overlapped = NotesLaunch(lambda: lambda: torch.zeros(0), torch.device("cpu"))
    assert layer_of(num_tokens, num_experts, hidden, apart, overlapped).shape == (num_tokens, hidden)
    assert events == [("overlapped", comes_last), ("product", False), ("product", follows_first)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [257, 300, 512, 777, 1024])
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
def test_shared_expert_gemm_matches_the_reference(num_tokens: int, activation: Activation) -> None:
    """The last tile is not full, in outputs and in rows."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 192, generator=generator).bfloat16().cuda()
    weight = torch.randn(2 * 200, 192, generator=generator).mul(192**-0.5).bfloat16().cuda()
    if not takes_shared_gemm(x, weight, activation):
        pytest.skip("the card or its Triton has no long tiles")
    found = shared_gemm(x, weight, activation)
    order = order_by_expert(torch.zeros(num_tokens, 1, dtype=torch.int32, device="cuda"), 1)
    expected = grouped_gemm_ref(x, weight[None], order, activation=activation)
    error = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    print(f"{num_tokens} tokens, {activation}: {error:.5f} of the largest output")
    assert found.shape == expected.shape and error < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [200, 300, 700, 1100, 2100])
@pytest.mark.parametrize("num_experts", [2, 16])
def test_captured_moe_layer_equals_its_separate_ops(num_tokens: int, num_experts: int) -> None:
    generator, hidden = torch.Generator().manual_seed(num_tokens), 256

    def random_weights(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).mul(sizes[-1] ** -0.5).bfloat16().cuda()

    first, second = random_weights(num_experts, 128, hidden), random_weights(num_experts, hidden, 128)
    up, down = random_weights(320, hidden), random_weights(hidden, 320)
    x, ids = torch.empty(num_tokens, hidden, device="cuda").bfloat16(), torch.empty(num_tokens, TOP_K, device="cuda")
    ids = ids.to(torch.int32)

    def begin(given: Tensor) -> Callable[[], Tensor]:
        if not takes_shared_gemm(given, up, "squared_relu"):
            return lambda: squared_relu(given @ up.T) @ down.T
        inner = shared_gemm(given, up, "squared_relu")
        return lambda: inner @ down.T

    def layer() -> Tensor:
        given = 2 * x
        overlapped = OverlappedExpert(lambda: begin(given), given.device)
        weights = torch.ones(ids.shape, device="cuda")
        return routed_experts(
            given, ids, weights, first, second, "squared_relu", addend=overlapped.output, overlapped=overlapped
        )

    ids.zero_()
    layer()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
        found = layer()
    for _ in range(10):
        x.copy_(torch.randn(x.shape, generator=generator))
        chosen = [torch.randperm(num_experts, generator=generator)[:TOP_K] for _ in range(num_tokens)]
        ids.copy_(torch.stack(chosen))
        graph.replay()
        torch.cuda.synchronize()
        given = 2 * x.float()
        expected = ((given @ up.float().T).relu().square() @ down.float().T).bfloat16().float()
        for expert in range(num_experts):
            inner = (given @ first[expert].float().T).relu().square()
            chose = (ids == expert).any(dim=1, keepdim=True)
            expected += torch.where(chose, inner @ second[expert].float().T, 0.0)
        error = ((found.float() - expected).abs().max() / expected.abs().max()).item()
        print(f"{num_tokens} tokens, {num_experts} experts: {error:.5f} of the largest output")
        assert error < 2e-2
