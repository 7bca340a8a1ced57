"""The shared expert of some hundred tokens, computed beside the products of the others in a graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mamba_cache.kernels.activations import Activation, activated_ref
from megatron_mamba_cache.kernels.experts.few_tokens import SharedExpert
from megatron_mamba_cache.kernels.experts.routed_experts import routed_experts, takes_shared_expert
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 128, 4, 192, 64
IS_HOPPER = torch.cuda.is_available() and not INTERPRETED and torch.cuda.get_device_capability()[0] == 9


def random_weights(activation: Activation, device: str) -> tuple[Tensor, Tensor, SharedExpert]:
    generator, halves = torch.Generator().manual_seed(5), 2 if activation == "gated_silu" else 1

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).mul(sizes[-1] ** -0.5).bfloat16().to(device)

    shared = SharedExpert(drawn(halves * 2 * INNER, HIDDEN), drawn(HIDDEN, 2 * INNER))
    return drawn(NUM_EXPERTS, halves * INNER, HIDDEN), drawn(NUM_EXPERTS, HIDDEN, INNER), shared


def shared_output(x: Tensor, shared: SharedExpert, activation: Activation) -> Tensor:
    return F.linear(activated_ref(F.linear(x.float(), shared.first.float()), activation), shared.second.float())


def test_without_a_graph_a_product_of_its_own_is_taken(device: str) -> None:
    first, second, shared = random_weights("squared_relu", device)
    x, ids = torch.zeros(300, HIDDEN, device=device).bfloat16(), torch.zeros(300, TOP_K, device=device).int()
    assert not takes_shared_expert(x, first, ids.numel(), shared)
    with pytest.raises(ValueError, match="the shared expert of 300 tokens"):
        routed_experts(x, ids, ids.float(), first, second, "squared_relu", shared=shared)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
@pytest.mark.parametrize("num_tokens", [321, 512, 1024])
def test_in_a_graph_it_runs_beside_the_others(num_tokens: int, activation: Activation) -> None:
    first, second, shared = random_weights(activation, "cuda")
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.empty(num_tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.zeros(num_tokens, TOP_K, device="cuda", dtype=torch.int32)
    weights = torch.rand(num_tokens, TOP_K, generator=generator).cuda()
    own: list[bool] = []

    def layer() -> tuple[Tensor, Tensor]:
        given = 2 * x  # written by the kernel before
        own.append(takes_shared_expert(given, first, ids.numel(), shared))
        together = routed_experts(given, ids, weights, first, second, activation, shared=shared if own[-1] else None)
        return together, routed_experts(given, ids, weights, first, second, activation)

    layer()  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(priority=-1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        together, routed = layer()
    assert own == [False, True]
    for _ in range(5):
        x.copy_(torch.randn(x.shape, generator=generator))
        chosen = [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
        ids.copy_(torch.stack(chosen))
        graph.replay()
        torch.cuda.synchronize()
        expected = routed.float() + shared_output(2 * x, shared, activation)
        error = ((together.float() - expected).abs().max() / expected.abs().max()).item()
        print(f"{num_tokens} tokens, {activation}: {error:.5f} of the largest output")
        assert error < 1e-2
