"""Mamba2 as a `Recurrence`: layer dimensions on this rank, prefill and decode."""

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
from .inputs import SSMTokens, SSMWeights
from .replay.outputs import state_replay
from .replay.tiling import replays_fast
from .scan import cut_rows, ssd_scan
from .tiles import ScanTiles
from .verify import state_verify

CONV, SSM = "conv", "ssm"
"""Names of a layer's state tensors."""


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Weights of a layer: convolution [conv_dim, d_conv], its bias [conv_dim], and those of the recurrence."""

    conv: Tensor
    bias: Tensor | None
    ssm: SSMWeights


@dataclass(frozen=True, slots=True)
class Mamba2:
    """`ReplayedRecurrence` for Mamba2 layers, with their dimensions on this rank.

    Args:
        num_groups: Number of head groups; the heads in a group share B and C.
        d_conv: Number of taps of the convolution.
        grain: Chunk size of the scan, in tokens; equal on all ranks, including ranks without such a layer.
    """

    num_heads: int
    head_dim: int
    d_state: int
    num_groups: int
    d_conv: int
    grain: int

    name = "mamba2"

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.d_state

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the conv window [d_conv - 1, conv_dim] and the SSM state [heads, d_state, head_dim]."""
        return (
            StateTensor(CONV, (self.d_conv - 1, self.conv_dim), dtypes.window, motion="window"),
            StateTensor(SSM, (self.num_heads, self.d_state, self.head_dim), dtypes.whole, is_matrix=True),
        )

    def chunk_bytes(self, dtype: torch.dtype) -> int:
        """Return the size in bytes of the decays and slot numbers for the tiles of one chunk."""
        shape = tile_shape(self.grain, dtype)
        if shape is None:
            return 0
        dt = torch.empty(0, self.num_heads, device="meta")
        return ScanTiles.empty(dt, shape, shape.per_chunk, self.head_dim, dtype).num_bytes

    @property
    def folds_within_steps(self) -> bool:
        """False: all tokens of a step use the base at its start; the next step folds and rounds it."""
        return False

    @property
    def replays_fast(self) -> bool:
        """True if the current device has a replay kernel for these state dimensions."""
        return replays_fast(self.head_dim, self.d_state)

    def buffers(self, num_layers: int, dtypes: StateDtypes, fold_len: int, num_drafts: int) -> RingLayout:
        """Return the layout of a request's replay buffer; tokens are folded into the state every `fold_len` tokens."""
        return RingLayout(
            num_layers=num_layers,
            capacity=least_capacity(fold_len, 1 + num_drafts),
            x_capacity=least_x_capacity(fold_len, 1 + num_drafts),
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.num_groups,
            d_state=self.d_state,
            x_dtype=dtypes.model,
            key_dtype=dtypes.model,
            conv_dim=self.conv_dim,
            conv_dtype=dtypes.window,
            num_drafts=num_drafts,
        )

    def prefill(
        self, xbc: Tensor, dt: Tensor, weights: Mamba2Weights, states: LayerStates, rows: PrefillBatch
    ) -> Tensor:
        """Run the layer over packed prompt tokens; store the states at chunk ends and request ends in slots.

        Args:
            xbc: [tokens, conv_dim]; output of the input projection, before the convolution.
            dt: [tokens, heads]; output of the input projection.

        Returns:
            [tokens, heads, head_dim].
        """
        cached_conv, cached_ssm = states.cached[CONV], states.cached[SSM]
        is_live = states.cached is states.live
        tiles = cut_rows(dt, weights.ssm, rows, self.grain, self.head_dim, xbc.dtype)
        xbc = causal_conv(
            xbc,
            weights.conv,
            weights.bias,
            states.live[CONV],
            rows,
            ends=None if is_live else cached_conv,
            after_cut=tiles is not None,
        )
        return ssd_scan(
            self._tokens(xbc, dt),
            weights.ssm,
            states.live[SSM],
            rows,
            self.grain,
            None if is_live else cached_ssm,
            tiles=tiles,
            seed=states.seed,
        )

    def decode(
        self,
        xbc: Tensor,
        dt: Tensor,
        weights: Mamba2Weights,
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
        xbc = conv_verify(xbc, weights.conv, weights.bias, states.live[CONV], rows, drafts=tail)
        tokens = self._tokens(xbc, dt)
        if replayed is None or replay is None:
            return state_verify(tokens, weights.ssm, states.live[SSM], rows, after_conv=True, seed=states.seed)
        return state_replay(
            tokens,
            weights.ssm,
            states.live[SSM],
            replayed.ring,
            replay,
            replayed.ring_len,
            after_conv=True,
            seed=states.seed,
        )

    def _tokens(self, xbc: Tensor, dt: Tensor) -> SSMTokens:
        of_keys = self.num_groups * self.d_state
        x, b, c = xbc.split([self.num_heads * self.head_dim, of_keys, of_keys], dim=-1)
        return SSMTokens(
            x=x.unflatten(-1, (-1, self.head_dim)),
            dt=dt,
            B=b.unflatten(-1, (-1, self.d_state)),
            C=c.unflatten(-1, (-1, self.d_state)),
        )
