"""The layers of the oracle: plain functions of fp64 weights over one whole sequence.

The Mamba2 layer uses the quadratic form of state space duality (Dao and Gu 2024, "Transformers are SSMs", equation
16): y = (L ∘ C Bᵀ)(dt x), where L[t, s] is the decay from token s to token t. The Gated DeltaNet layer solves for what
all tokens write at once: the delta rule makes each write depend linearly on the earlier ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GATED_NORM_EPSILON = 1e-5
LENGTH_EPSILON = 1e-6
"""Epsilon that Gated DeltaNet adds to the squared length of a query or key."""

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,  # the exact form, with erf
    "silu": F.silu,
    "squared_relu": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True, slots=True)
class MambaLayer:
    """Weights of one Mamba2 layer; the rows of `in_proj` are z, x, B, C, dt."""

    input_norm: Tensor  # [hidden]
    in_proj: Tensor  # [2 * inner + 2 * groups * state + heads, hidden]
    conv_weight: Tensor  # [inner + 2 * groups * state, taps]
    conv_bias: Tensor
    dt_bias: Tensor  # [heads]
    a_log: Tensor  # [heads]
    skip: Tensor  # [heads, head_dim or 1]
    gated_norm: Tensor  # [inner]
    out_proj: Tensor  # [hidden, inner]
    num_groups: int
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        num_heads, inner = len(self.a_log), len(self.gated_norm)
        group_width = (len(self.conv_weight) - inner) // 2
        projected = rms_norm(hidden, self.input_norm, self.epsilon) @ self.in_proj.T
        z, mixed, dt = projected.split([inner, len(self.conv_weight), num_heads], dim=-1)
        convolved = convolve(mixed, self.conv_weight) + self.conv_bias
        x, b, c = F.silu(convolved).split([inner, group_width, group_width], dim=-1)
        x = x.unflatten(-1, (num_heads, -1))
        b, c = (t.unflatten(-1, (self.num_groups, -1)) for t in (b, c))
        y = ssd_quadratic(x, F.softplus(dt + self.dt_bias), -self.a_log.exp(), b, c) + self.skip * x
        gated = (y.flatten(-2) * F.silu(z)).unflatten(-1, (self.num_groups, -1))
        weight = self.gated_norm.unflatten(-1, (self.num_groups, -1))
        return rms_norm(gated, weight, GATED_NORM_EPSILON).flatten(-2) @ self.out_proj.T


@dataclass(frozen=True, slots=True)
class GatedDeltaLayer:
    """Weights of one Gated DeltaNet layer; the rows of `in_proj` are q, k, v, z, b, a."""

    input_norm: Tensor  # [hidden]
    in_proj: Tensor
    conv_weight: Tensor  # [2 * key heads * key_dim + value heads * value_dim, taps]
    a_log: Tensor  # [value heads]
    dt_bias: Tensor  # [value heads]
    head_norm: Tensor  # [value_dim], of all heads
    out_proj: Tensor  # [hidden, value heads * value_dim]
    num_key_heads: int
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        num_heads, values, channels = len(self.a_log), self.out_proj.shape[1], len(self.conv_weight)
        keys, share = (channels - values) // 2, num_heads // self.num_key_heads
        projected = rms_norm(hidden, self.input_norm, self.epsilon) @ self.in_proj.T
        mixed, z, b, a = projected.split([channels, values, num_heads, num_heads], dim=-1)
        q, k, v = F.silu(convolve(mixed, self.conv_weight)).split([keys, keys, values], dim=-1)
        q, k = (
            part.unflatten(-1, (self.num_key_heads, -1)).repeat_interleave(share, dim=1).transpose(0, 1)
            for part in (q, k)
        )
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + LENGTH_EPSILON) for part in (q, k))
        v = v.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [heads, tokens, value_dim]
        log_decay = (-self.a_log.exp() * F.softplus(a + self.dt_bias)).T.cumsum(-1)  # [heads, tokens]
        y = delta_rule(q / k.shape[-1] ** 0.5, k, v, b.sigmoid().T, log_decay)
        normed = rms_norm(y.transpose(0, 1), self.head_norm, self.epsilon)
        return (normed.flatten(1) * F.silu(z)) @ self.out_proj.T


@dataclass(frozen=True, slots=True)
class ToyMatrixLayer:
    """Weights of one toy layer with four state tensors; the rows of `in_proj` are u, k, q, v and the memory's input.

    It sums over all earlier tokens instead of keeping states.
    """

    input_norm: Tensor  # [hidden]
    in_proj: Tensor
    taps: Tensor  # [taps, channels], oldest input first
    decays: Tensor  # [heads]
    out_proj: Tensor
    is_first: bool  # only this layer reads the input before the current one
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        num_heads, (num_taps, width) = len(self.decays), self.taps.shape
        projected = (rms_norm(hidden, self.input_norm, self.epsilon) @ self.in_proj.T).tanh()
        u, k, q, v, memorized = projected.split([width, 6, 6, 8, 7], dim=-1)
        padded = F.pad(u, (0, 0, num_taps - 1, 0))
        c = (padded.unfold(0, num_taps, 1) * self.taps.T).sum(-1).tanh()
        k, q, v = (part.unflatten(-1, (num_heads, -1)) for part in (k, q, v))
        scores = torch.einsum("thr,shr->hts", q, k)
        read = torch.einsum("hts,shl->thl", scores * _powers(self.decays, len(hidden)), v).flatten(1)
        memory = (_powers(torch.full_like(self.decays[:1], 0.8), len(hidden))[0] @ memorized).tanh()
        last = padded[num_taps - 2 : -1] * c * float(self.is_first)
        return torch.cat((c, read, memory, last), dim=-1) @ self.out_proj.T


@dataclass(frozen=True, slots=True)
class ToyVectorLayer:
    """Weights of one toy layer with one state tensor; the rows of `in_proj` are u, the gate and the read weights."""

    input_norm: Tensor  # [hidden]
    in_proj: Tensor
    out_proj: Tensor
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        u, gate, read = (rms_norm(hidden, self.input_norm, self.epsilon) @ self.in_proj.T).tanh().chunk(3, dim=-1)
        kept = 0.55 + 0.4 * gate
        log_kept = kept.log().cumsum(0)
        decay = (log_kept[:, None] - log_kept[None]).masked_fill(
            ~causal_mask(len(u), u.device)[..., None], -math.inf
        )  # [tokens, tokens, cells]
        cells = torch.einsum("tsc,sc->tc", decay.exp(), (1 - kept) * u)
        return (cells * read) @ self.out_proj.T


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Weights of one causal attention layer; the rows of `qkv` are, group by group, its query heads, key and value."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [groups * (heads_per_group + 2) * head_dim, hidden]
    proj: Tensor  # [hidden, heads * head_dim]
    num_groups: int
    head_dim: int
    scale: float
    rope_frequencies: Tensor | None  # [rotated dims / 2]
    epsilon: float
    head_norms: tuple[Tensor, Tensor] | None = None  # of queries and of keys, [head_dim] each
    has_gate: bool = False  # each group's gate heads follow its query heads

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        num_tokens = len(hidden)
        packed = rms_norm(hidden, self.input_norm, self.epsilon) @ self.qkv.T
        packed = packed.view(num_tokens, self.num_groups, -1, self.head_dim)
        query, key, value = packed[:, :, :-2], packed[:, :, -2:-1], packed[:, :, -1]
        query, gate = query.chunk(2, dim=2) if self.has_gate else (query, None)
        if self.head_norms is not None:
            query, key = (rms_norm(x, w, self.epsilon) for x, w in zip((query, key), self.head_norms, strict=True))
        if self.rope_frequencies is not None:
            query, key = rotate(query, self.rope_frequencies), rotate(key, self.rope_frequencies)
        scores = torch.einsum("tghd,sgd->ghts", query, key[:, :, 0]) * self.scale
        scores = scores.masked_fill(~causal_mask(num_tokens, hidden.device), -math.inf)
        mixed = torch.einsum("ghts,sgd->tghd", scores.softmax(-1), value)
        return (mixed if gate is None else mixed * gate.sigmoid()).flatten(1) @ self.proj.T


@dataclass(frozen=True, slots=True)
class MLPLayer:
    """Weights of one dense layer; when gated, the rows of `fc1` are the gate's, then the linear part's."""

    input_norm: Tensor  # [hidden]
    fc1: Tensor
    fc2: Tensor
    activation: Activation
    is_gated: bool
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        return self.of_normed(rms_norm(hidden, self.input_norm, self.epsilon))

    def of_normed(self, normed: Tensor) -> Tensor:
        """Return the layer's output for normed inputs."""
        inner = normed @ self.fc1.T
        if self.is_gated:
            gate, linear = inner.chunk(2, dim=-1)
            return (self.activation(gate) * linear) @ self.fc2.T
        return self.activation(inner) @ self.fc2.T


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router selects the top-k experts of each token.

    Args:
        top_k: Experts of a token.
        bias: [experts] added to the sigmoid of the logits for the choice; None: softmax, by the logits.
        num_groups, top_groups, num_scoring: Groups of experts, those of a token, and a group's experts that score it.
        normalizes, scale: If and how the chosen ones' weights are divided by their sum and scaled.
    """

    top_k: int
    bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    num_scoring: int = 1
    normalizes: bool = True
    scale: float = 1.0

    def shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the [tokens, experts] weights, and the gap between the last chosen expert or group and the next."""
        scores = logits.softmax(-1) if self.bias is None else logits.sigmoid()
        merits = logits if self.bias is None else scores + self.bias
        gaps = torch.full((len(logits),), math.inf, dtype=logits.dtype, device=logits.device)
        if self.top_groups < self.num_groups:
            groups = merits.unflatten(1, (self.num_groups, -1))
            of_groups = groups.sort(-1, descending=True).values[..., : self.num_scoring].sum(-1)
            is_chosen, gaps = _best(of_groups, self.top_groups)
            merits = groups.masked_fill(~is_chosen[..., None], -math.inf).flatten(1)
        is_chosen, of_experts = _best(merits, self.top_k)
        shares = scores * is_chosen
        if self.normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        return self.scale * shares, gaps.minimum(of_experts)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the best entries of each row, and the gap between the last of these and the next; infinite without one."""
    ordered = scores.sort(-1, descending=True)
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ordered.indices[:, :count], True)
    if count == scores.shape[1]:
        return is_chosen, torch.full_like(scores[:, 0], math.inf)
    return is_chosen, ordered.values[:, count - 1] - ordered.values[:, count]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Weights of one mixture of experts."""

    input_norm: Tensor  # [hidden]
    router: Tensor  # [experts, hidden]
    routing: Routing
    experts: tuple[MLPLayer, ...]
    shared: MLPLayer  # that every token goes to
    latent: tuple[Tensor, Tensor] | None  # [latent, hidden] before the experts and [hidden, latent] after them
    epsilon: float
    shared_gate: Tensor | None = None  # [1, hidden]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [tokens, hidden], without the residual."""
        normed = rms_norm(hidden, self.input_norm, self.epsilon)
        shares, _ = self.routing.shares(normed @ self.router.T)
        read = normed if self.latent is None else normed @ self.latent[0].T
        mixed = sum(
            (share[:, None] * expert.of_normed(read) for share, expert in zip(shares.T, self.experts, strict=True)),
            torch.zeros_like(read),
        )
        shared = self.shared.of_normed(normed)
        if self.shared_gate is not None:
            shared = shared * (normed @ self.shared_gate.T).sigmoid()
        return (mixed if self.latent is None else mixed @ self.latent[1].T) + shared

    def routing_of(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the [tokens, experts] weights, and the gaps as `Routing.shares` does."""
        return self.routing.shares(rms_norm(hidden, self.input_norm, self.epsilon) @ self.router.T)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Return the causal depthwise convolution of [tokens, channels] with [channels, taps]."""
    num_taps = weight.shape[-1]
    return (F.pad(x, (0, 0, num_taps - 1, 0)).unfold(0, num_taps, 1) * weight).sum(-1)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Scale the last dimension to a root mean square of 1, then by `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _powers(bases: Tensor, num_tokens: int) -> Tensor:
    """Return [bases, tokens, tokens], each base to the number of tokens from s to t; 0 if t precedes s."""
    ages = torch.arange(num_tokens, device=bases.device)
    ages = ages[:, None] - ages
    return torch.where(ages >= 0, bases[:, None, None] ** ages.clamp_min(0), 0.0)


def causal_mask(num_tokens: int, device: torch.device) -> Tensor:
    """Return [tokens, tokens] bool, True if column s is seen from row t."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def ssd_quadratic(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the SSM's output from a zero state, as one masked matrix per head.

    Args:
        x: [tokens, heads, head_dim].
        dt: [tokens, heads], positive.
        a: [heads], negative.
        b, c: [tokens, groups, state].
    """
    num_tokens, num_heads, _ = x.shape
    log_decay = (dt * a).cumsum(0).T  # [heads, tokens]
    segments = log_decay[:, :, None] - log_decay[:, None, :]
    # Above the diagonal the sum is positive and exp may overflow, so the mask comes first.
    decay = segments.masked_fill(~causal_mask(num_tokens, x.device), -math.inf).exp()
    scores = torch.einsum("tgn,sgn->gts", c, b).repeat_interleave(num_heads // b.shape[1], dim=0)
    return torch.einsum("hts,shp->thp", scores * decay, x * dt[..., None])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Return the output of the gated delta rule from a zero state, [heads, tokens, value_dim].

    Token t writes w_t = beta_t (v_t - (what its key reads)), and reads the sum over s of the decay from s to t times
    (k_t . k_s) w_s, for s < t: a unit lower triangular system for all w.

    Args:
        q, k: [heads, tokens, key_dim].
        v: [heads, tokens, value_dim].
        beta: [heads, tokens].
        log_decay: [heads, tokens], summed from the first token on.
    """
    mask = causal_mask(q.shape[1], q.device)
    segments = log_decay[:, :, None] - log_decay[:, None, :]
    decay = segments.masked_fill(~mask, -math.inf).exp()
    reads = beta[..., None] * decay * (k @ k.transpose(1, 2))
    writes = torch.linalg.solve_triangular(reads.tril(-1), beta[..., None] * v, upper=False, unitriangular=True)
    return (decay * (q @ k.transpose(1, 2))) @ writes


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """Apply rotary positions to [tokens, groups, heads, head_dim]; pair i is dims i and i + len(frequencies)."""
    num_pairs = len(frequencies)
    angles = torch.arange(len(x), dtype=torch.float64, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos()[:, None, None], angles.sin()[:, None, None]
    first, second, rest = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs], x[..., 2 * num_pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
