"""Expert layers with random weights, and random routing."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_ref
from megatron_mamba_cache.kernels.experts.weighted_sum import weighted_sum, weighted_sum_ref

OPS = {"kernel": (grouped_gemm, weighted_sum), "reference": (grouped_gemm_ref, weighted_sum_ref)}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Layer:
    """Weights of an MoE layer."""

    def __init__(self, num_experts: int, hidden: int, inside: int, activation: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_experts * hidden + inside)
        width = 2 * inside if activation == "gated_silu" else inside
        self.first = torch.randn(num_experts, width, hidden, generator=generator).div(hidden**0.5).to(dtype)
        self.second = torch.randn(num_experts, hidden, inside, generator=generator).div(inside**0.5).to(dtype)
        self.activation = activation

    def to(self, device: str) -> "Layer":
        self.first, self.second = self.first.to(device), self.second.to(device)
        return self

    def run(self, ops: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the layer's output [tokens, hidden] with the ops."""
        product, total = OPS[ops]
        order = order_by_expert(ids, len(self.first))
        inside = product(x, self.first, order, top_k=ids.shape[1], activation=self.activation)
        return total(product(inside, self.second, order), order.positions, weights)

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the expected output in float64, one token and one expert at a time."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                inside = self.first[expert].double().cpu() @ x[token].double().cpu()
                if self.activation == "squared_relu":
                    inside = inside.relu().square()
                elif self.activation == "gated_silu":
                    inside = F.silu(inside[: len(inside) // 2]) * inside[len(inside) // 2 :]
                out[token] += weight * (self.second[expert].double().cpu() @ inside)
        return out


def choice(num_tokens: int, top_k: int, num_experts: int, spread: str) -> Tensor:
    """Return random expert ids [tokens, top_k] int32, distinct per token, or the same ids for all tokens."""
    generator = torch.Generator().manual_seed(num_tokens)
    lines = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
    if spread == "the same":
        lines = lines[:1] * num_tokens
    return torch.stack(lines).to(torch.int32)
