"""Gated DeltaNet as a `Recurrence`: layer dimensions on this rank, prefill and decode."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..batches import DecodeBatch, PrefillBatch, ReplayBatch
from ..conv.conv import causal_conv
from ..conv.verify import conv_verify
from ..interface import LayerStates, StateDtypes, StateTensor
from ..replay.drafts import ReplayedLayer, RingLayout
from ..replay.ring import least_capacity, least_x_capacity
from ..request_tiles import tile_shape
from .inputs import DeltaTokens, GateWeights
from .replay.outputs import delta_replay
from .replay.tiling import replays_fast
from .scan import delta_scan
from .tile_systems import TileSystems
from .verify import delta_verify

CONV, STATE = "conv", "state"
"""Names of a layer's state tensors."""


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """Weights of a layer's convolution and gates.

    Args:
        conv: [conv_dim, d_conv].
        A_log, dt_bias: [value heads].
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor

    @property
    def gates(self) -> GateWeights:
        """Weights of the gates."""
        return GateWeights(self.A_log, self.dt_bias)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """`ReplayedRecurrence` for Gated DeltaNet layers, with their dimensions on this rank.

    Args:
        num_key_heads, num_value_heads: Value head h uses key head h // (num_value_heads / num_key_heads).
        d_conv: Number of taps of the convolution, which has no bias.
        grain: Chunk size of the scan, in tokens; equal on all ranks, including ranks without such a layer.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int
    grain: int

    name = "gated_delta"

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: q, then k, then v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the conv window [d_conv - 1, conv_dim] and the state [value heads, key_dim, value_dim]."""
        state = (self.num_value_heads, self.key_dim, self.value_dim)
        return (
            StateTensor(CONV, (self.d_conv - 1, self.conv_dim), dtypes.window, motion="window"),
            StateTensor(STATE, state, dtypes.whole, is_matrix=True),
        )

    def chunk_bytes(self, dtype: torch.dtype) -> int:
        """Return the size in bytes of the `TileSystems` for one chunk."""
        shape = tile_shape(self.grain, dtype)
        if shape is None:
            return 0
        v = torch.empty(0, self.num_value_heads, self.value_dim, dtype=dtype, device="meta")
        return TileSystems.empty(DeltaTokens(v, v, v, v, v), shape, shape.per_chunk).num_bytes

    @property
    def replays_fast(self) -> bool:
        """True if the current device has a replay kernel for these state dimensions."""
        return replays_fast(self.key_dim, self.value_dim)

    @property
    def folds_within_steps(self) -> bool:
        """True: ring entries depend on the state before them, so the kernel folds and rounds it in registers."""
        return True

    def buffers(self, num_layers: int, dtypes: StateDtypes, fold_len: int, num_drafts: int) -> RingLayout:
        """Return the layout of a request's replay buffer; tokens are folded into the state every `fold_len` tokens."""
        return RingLayout(
            num_layers=num_layers,
            capacity=least_capacity(fold_len, 1 + num_drafts),
            x_capacity=least_x_capacity(fold_len, 1 + num_drafts),
            heads=self.num_value_heads,
            head_dim=self.value_dim,
            groups=self.num_key_heads,
            d_state=self.key_dim,
            x_dtype=torch.float64 if dtypes.model == torch.float64 else torch.float32,
            key_dtype=dtypes.model,
            conv_dim=self.conv_dim,
            conv_dtype=dtypes.window,
            num_drafts=num_drafts,
        )

    def prefill(
        self, qkv: Tensor, b: Tensor, a: Tensor, weights: GatedDeltaWeights, states: LayerStates, rows: PrefillBatch
    ) -> Tensor:
        """Run the layer over packed prompt tokens; store the states at chunk ends and request ends in slots.

        Args:
            qkv: [tokens, conv_dim]; output of the input projection, before the convolution.
            b, a: [tokens, value heads]; outputs of the input projection.

        Returns:
            [tokens, value heads, value_dim].
        """
        is_live = states.cached is states.live
        ends = None if is_live else states.cached[CONV]
        qkv = causal_conv(qkv, weights.conv, None, states.live[CONV], rows, ends=ends)
        quantized = None if is_live else states.cached[STATE]
        tokens = self._tokens(qkv, b, a)
        return delta_scan(tokens, weights.gates, states.live[STATE], rows, self.grain, quantized, seed=states.seed)

    def decode(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        states: LayerStates,
        rows: DecodeBatch,
        replay: ReplayBatch | None,
    ) -> Tensor:
        """Run the layer over the base token and drafts of each request, and update its states in place.

        Other arguments and the result are as in `prefill`.

        Args:
            replay: The requests as a `ReplayBatch`; None if draft states are in slots.
        """
        replayed: ReplayedLayer | None = states.drafts if replay is not None else None
        tail = None if replayed is None or replay is None else replayed.tail(replay)
        qkv = conv_verify(qkv, weights.conv, None, states.live[CONV], rows, drafts=tail)
        tokens, gates, pool = self._tokens(qkv, b, a), weights.gates, states.live[STATE]
        if replayed is None or replay is None:
            return delta_verify(tokens, gates, pool, rows, after_conv=True, seed=states.seed)
        return delta_replay(
            tokens, gates, pool, replayed.ring, replay, replayed.ring_len, after_conv=True, seed=states.seed
        )

    def _tokens(self, qkv: Tensor, b: Tensor, a: Tensor) -> DeltaTokens:
        of_keys = self.num_key_heads * self.key_dim
        q, k, v = qkv.split([of_keys, of_keys, self.num_value_heads * self.value_dim], dim=-1)
        return DeltaTokens(
            q=q.unflatten(-1, (-1, self.key_dim)),
            k=k.unflatten(-1, (-1, self.key_dim)),
            v=v.unflatten(-1, (-1, self.value_dim)),
            b=b,
            a=a,
        )
