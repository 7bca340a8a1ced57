"""Random inputs for the gated delta rule, and the rule computed token by token in fp64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_mamba_cache.kernels.reference import compute_dtype
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens, GateWeights
from tests.kernels.ssm_steps import SSMShape

NAMES = ("q", "k", "v", "b", "a")


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Dimensions of a layer."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 7
    value_dim: int = 5

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a state."""
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def of_ring(self) -> SSMShape:
        """The same sizes under the names of a replay ring."""
        return SSMShape(self.value_heads, self.value_dim, self.key_dim, self.key_heads)


@dataclass(frozen=True, slots=True)
class DeltaSteps:
    """Packed tokens, and the gate weights of a layer."""

    tokens: DeltaTokens
    gates: GateWeights

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return self.tokens.v.shape[0]

    @property
    def values(self) -> Tensor:
        """The tensor of the outputs' shape and dtype."""
        return self.tokens.v

    @property
    def ring_dtype(self) -> torch.dtype:
        """Dtype of values in a replay ring, which holds corrected ones."""
        return compute_dtype(self.values)

    @property
    def weights(self) -> GateWeights:
        """The weights of `SSMSteps`: the gates."""
        return self.gates

    def __getitem__(self, tokens: slice | Sequence[int]) -> "DeltaSteps":
        """Copy a slice of the tokens."""
        return self._with_tokens(lambda tensor: tensor[tokens].clone())

    def joined_with(self, before: Sequence["DeltaSteps"], after: Sequence["DeltaSteps"]) -> "DeltaSteps":
        """Concatenate the tokens of `before`, these tokens, and the tokens of `after`."""
        parts = [*(steps.tokens for steps in before), self.tokens, *(steps.tokens for steps in after)]
        return replace(
            self, tokens=DeltaTokens(*(torch.cat([getattr(part, name) for part in parts]) for name in NAMES))
        )

    def cast(self, dtype: torch.dtype) -> "DeltaSteps":
        """Convert the tokens to another dtype."""
        return self._with_tokens(lambda tensor: tensor.to(dtype))

    def cpu(self) -> "DeltaSteps":
        """Copy the tokens to the CPU, where a loop over tokens needs no launches."""
        return replace(
            self._with_tokens(Tensor.cpu), gates=GateWeights(self.gates.A_log.cpu(), self.gates.dt_bias.cpu())
        )

    def poison(self, tokens: slice) -> None:
        """Set some tokens to NaN."""
        for name in NAMES:
            getattr(self.tokens, name)[tokens] = float("nan")

    def recurrence(self, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the fp64 outputs, and the states before each token and after the last one."""
        times = self.tokens.v.shape[1] // self.tokens.q.shape[1]
        q, k, v, b, a = (getattr(self.tokens, name).double() for name in NAMES)
        q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(times, 1) for t in (q, k))
        q = q / q.shape[-1] ** 0.5
        beta = torch.sigmoid(b).to(self.tokens.b.dtype).double()
        softplus = torch.nn.functional.softplus(a + self.gates.dt_bias.double(), threshold=100)
        decay = torch.exp(-torch.exp(self.gates.A_log.double()) * softplus)
        states, outputs = [state.double()], []
        for t in range(self.num_tokens):
            kept = decay[t][:, None, None] * states[-1]
            written = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", kept, k[t]))
            states.append(kept + torch.einsum("hk,hv->hkv", k[t], written))
            outputs.append(torch.einsum("hkv,hk->hv", states[-1], q[t]))
        return torch.stack(outputs) if outputs else v, states

    def _with_tokens(self, change: Callable[[Tensor], Tensor]) -> "DeltaSteps":
        return replace(self, tokens=DeltaTokens(*(change(getattr(self.tokens, name)) for name in NAMES)))


def random_steps(
    num_tokens: int, device: str, shape: DeltaShape = DeltaShape(), *, dtype: torch.dtype = torch.float32
) -> DeltaSteps:
    """Return random tokens in `dtype`, and gates in float32, or float64 if the tokens are float64.

    Decays are as in a newly initialized model: A is between 0 and 16, time steps between 0.001 and 0.1.
    """

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(device, dtype)

    tokens = DeltaTokens(
        q=randn(num_tokens, shape.key_heads, shape.key_dim),
        k=randn(num_tokens, shape.key_heads, shape.key_dim),
        v=randn(num_tokens, shape.value_heads, shape.value_dim),
        b=randn(num_tokens, shape.value_heads),
        a=randn(num_tokens, shape.value_heads),
    )
    of_gates = torch.float64 if dtype == torch.float64 else torch.float32
    A_log = torch.log(16 * torch.rand(shape.value_heads) + 1e-3)
    time_steps = 10 ** (-3 + 2 * torch.rand(shape.value_heads))
    dt_bias = torch.log(torch.expm1(time_steps))
    return DeltaSteps(tokens, GateWeights(A_log.to(device, of_gates), dt_bias.to(device, of_gates)))
