"""Random inputs for the Mamba2 recurrence, and the recurrence computed token by token in fp64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.mamba2.inputs import NO_LIMIT, SSMTokens, SSMWeights


@dataclass(frozen=True, slots=True)
class SSMShape:
    """Dimensions of a layer."""

    heads: int = 4
    head_dim: int = 5
    d_state: int = 7
    groups: int = 2

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a state."""
        return (self.heads, self.d_state, self.head_dim)


@dataclass(frozen=True, slots=True)
class SSMSteps:
    """Packed tokens, and the weights of a layer."""

    tokens: SSMTokens
    weights: SSMWeights

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return self.tokens.x.shape[0]

    @property
    def values(self) -> Tensor:
        """The tensor of the outputs' shape and dtype; a replay ring holds it as it is."""
        return self.tokens.x

    @property
    def ring_dtype(self) -> torch.dtype:
        """Dtype of values in a replay ring."""
        return self.values.dtype

    def __getitem__(self, tokens: slice | Sequence[int]) -> "SSMSteps":
        """Copy a slice of the tokens."""
        return self._with_tokens(lambda tensor: tensor[tokens].clone())

    def joined_with(self, before: Sequence["SSMSteps"], after: Sequence["SSMSteps"]) -> "SSMSteps":
        """Concatenate the tokens of `before`, these tokens, and the tokens of `after`."""
        parts = [*(steps.tokens for steps in before), self.tokens, *(steps.tokens for steps in after)]
        return replace(self, tokens=SSMTokens(*(torch.cat([getattr(part, name) for part in parts]) for name in NAMES)))

    def cast(self, dtype: torch.dtype) -> "SSMSteps":
        """Convert x, B and C to another dtype."""
        tokens = replace(self.tokens, **{name: getattr(self.tokens, name).to(dtype) for name in ("x", "B", "C")})
        return replace(self, tokens=tokens)

    def cpu(self) -> "SSMSteps":
        """Copy the tokens to the CPU, where a loop over tokens needs no launches."""
        weights = replace(
            self.weights, **{name: getattr(self.weights, name).cpu() for name in ("A_log", "D", "dt_bias")}
        )
        return replace(self._with_tokens(Tensor.cpu), weights=weights)

    def poison(self, tokens: slice) -> None:
        """Set some tokens to NaN."""
        for name in NAMES:
            getattr(self.tokens, name)[tokens] = float("nan")

    def recurrence(self, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the fp64 outputs, and the states before each token and after the last one."""
        heads = self.tokens.x.shape[1]
        x, dt, B, C = (getattr(self.tokens, name).double() for name in NAMES)
        B, C = (t.repeat_interleave(heads // t.shape[1], 1) for t in (B, C))
        A, D = -torch.exp(self.weights.A_log.double()), self.weights.D.double()
        dt = torch.nn.functional.softplus(dt + self.weights.dt_bias.double(), threshold=100)
        dt = dt.clamp(*self.weights.dt_limit)
        states, outputs = [state.double()], []
        for t in range(self.num_tokens):
            increment = torch.einsum("h,hn,hp->hnp", dt[t], B[t], x[t])
            states.append(torch.exp(dt[t] * A)[:, None, None] * states[-1] + increment)
            outputs.append(torch.einsum("hn,hnp->hp", C[t], states[-1]) + D[:, None] * x[t])
        return torch.stack(outputs) if outputs else x, states

    def _with_tokens(self, change: Callable[[Tensor], Tensor]) -> "SSMSteps":
        return replace(self, tokens=SSMTokens(*(change(getattr(self.tokens, name)) for name in NAMES)))


NAMES = ("x", "dt", "B", "C")


def random_steps(
    num_tokens: int,
    device: str,
    shape: SSMShape = SSMShape(),
    *,
    dtype: torch.dtype = torch.float32,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> SSMSteps:
    """Return random tokens and weights in `dtype`."""

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(device, dtype)

    tokens = SSMTokens(
        x=randn(num_tokens, shape.heads, shape.head_dim),
        dt=randn(num_tokens, shape.heads),
        B=randn(num_tokens, shape.groups, shape.d_state),
        C=randn(num_tokens, shape.groups, shape.d_state),
    )
    A_log = torch.log(torch.rand(shape.heads) + 0.1).to(device, dtype)
    return SSMSteps(tokens, SSMWeights(A_log, randn(shape.heads), 0.3 * randn(shape.heads), dt_limit))
