"""Mamba mixer whose scan starts from cached states and writes states at block boundaries."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer as megatron_mixer
from torch import Tensor
from typing_extensions import override

from ...recurrences.batches import PrefillBatch
from ...recurrences.interface import LayerStates
from ...recurrences.mamba2.inputs import NO_LIMIT, SSMWeights
from ...recurrences.mamba2.recurrence import Mamba2, Mamba2Weights
from ...step.batch import StepBatch
from .caching_mixer import CachingMixer, GatedGroupRMSNorm


class CachingMambaMixer(CachingMixer, megatron_mixer.MambaMixer):
    """Megatron's Mamba mixer, extended to run decode and prefill requests, each with its own state slot.

    It needs neither mamba-ssm nor causal-conv1d. Megatron's mixer does not have these arguments, or restricts them:

    Args:
        norm_eps: Epsilon of the gated norm; Megatron's mixer uses a constant.
        time_step_limit: Range to which time steps are clamped after softplus.
        conv_bias: False for a convolution without a bias, which Megatron's mixer does not support.
    """

    recurrence: Mamba2

    def __init__(
        self,
        config: Any,
        submodules: Any,
        d_model: int,
        *,
        rmsnorm: bool = True,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        time_step_limit: tuple[float, float] = NO_LIMIT,
        **settings: Any,
    ) -> None:
        with _without_mamba_ssm():
            super().__init__(config, submodules, d_model, rmsnorm=False, **settings)
        if self.D_has_hdim:
            raise ValueError("D_has_hdim is True, which is not supported; use one D per head")
        if not conv_bias:
            self.conv1d.bias = None
        self.time_step_limit = time_step_limit
        self.recurrence = Mamba2(
            num_heads=self.nheads_local_tp,
            head_dim=self.headdim,
            d_state=self.d_state,
            num_groups=self.ngroups_local_tp,
            d_conv=self.d_conv,
            grain=self.chunk_size,
        )
        self.rmsnorm = rmsnorm
        if rmsnorm:
            channels = self.d_inner_local_tp
            self.norm = GatedGroupRMSNorm(
                channels, channels // self.ngroups_local_tp, norm_eps, config.params_dtype, self.D.device
            )

    @property
    def facts(self) -> tuple[Any, ...]:
        """Settings that determine the mixer's output for given weights."""
        return self.recurrence, self.rmsnorm, self.time_step_limit

    @override
    def forward(self, hidden_states: Tensor, inference_context: Any = None, **settings: Any) -> Any:
        """Run the mixer on hidden_states [tokens, batch, hidden]; see Megatron's mixer.

        Without a context, the same kernels run on full sequences from zero states.
        """
        if inference_context is not None or self.training:
            return super().forward(hidden_states, inference_context, **settings)
        return self.mix_sequences(hidden_states)

    @override
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as sharded tensors; see Megatron's mixer, which assumes a conv bias."""
        if self.conv1d.bias is not None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        self.conv1d.bias = torch.nn.Parameter(self.conv1d.weight.new_zeros(self.conv1d.weight.shape[0]))
        try:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.conv1d.bias = None
        del state[f"{prefix}conv1d.bias"]
        return state

    @override
    def _dynamic_inference(self, hidden_states: Tensor, context: Any) -> Any:
        return self.mix_step(hidden_states, context)

    @property
    def num_mixed_channels(self) -> int:
        return int(self.d_inner_local_tp)

    def mix_prefill(self, projected: Tensor, states: LayerStates, rows: PrefillBatch) -> Tensor:
        z, xbc, dt = self._split(projected)
        return self._gate(self.recurrence.prefill(xbc, dt, self._weights, states, rows).flatten(1), z)

    def mix_decode(self, projected: Tensor, states: LayerStates, step: StepBatch) -> Tensor:
        assert step.decode is not None
        z, xbc, dt = self._split(projected)
        y = self.recurrence.decode(xbc, dt, self._weights, states, step.decode, step.replay)
        return self._gate(y.flatten(1), z)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Return gate [tokens, d_inner], convolution's input [tokens, conv_dim] and time steps [tokens, heads]."""
        d_inner, bc = self.d_inner_local_tp, 2 * self.ngroups_local_tp * self.d_state
        return projected.split([d_inner, d_inner + bc, self.nheads_local_tp], dim=-1)

    @property
    def _weights(self) -> Mamba2Weights:
        ssm = SSMWeights(self.A_log, self.D, self.dt_bias, self.time_step_limit)
        return Mamba2Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, ssm)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm(y, z) if self.rmsnorm else y * F.silu(z)


@contextmanager
def _without_mamba_ssm() -> Iterator[None]:
    """Context manager in which Megatron's mixer can be built without mamba-ssm, which is never called."""
    had = megatron_mixer.HAVE_MAMBA_SSM
    megatron_mixer.HAVE_MAMBA_SSM = True
    try:
        yield
    finally:
        megatron_mixer.HAVE_MAMBA_SSM = had
