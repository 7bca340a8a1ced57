"""A Mamba mixer that starts rows from cached states and writes boundary states while it scans."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer as megatron_mixer
from torch import Tensor
from typing_extensions import override

from ...recurrences.interface import LayerStates
from ...recurrences.mamba2.inputs import NO_LIMIT, SSMWeights
from ...recurrences.mamba2.recurrence import Mamba2, Mamba2Weights
from ...recurrences.rows import PrefillRows, whole_rows
from ...step.batch import StepBatch
from ..gated_norm import GatedGroupRMSNorm


@dataclass(frozen=True, slots=True)
class _MixerInputs:
    """The parts of the input projection: gate, convolution input, time step."""

    z: Tensor  # [tokens, d_inner]
    xbc: Tensor  # [tokens, conv_dim]
    dt: Tensor  # [tokens, heads]

    def rows(self, tokens: slice) -> "_MixerInputs":
        return _MixerInputs(self.z[tokens], self.xbc[tokens], self.dt[tokens])


class CachingMambaMixer(megatron_mixer.MambaMixer):
    """Megatron's Mamba mixer with its inference replaced: any mix of decode and prefill rows, each from its own slot.

    Needs neither mamba-ssm nor causal-conv1d. Arguments that Megatron's mixer lacks or restricts:

    Args:
        norm_eps: Epsilon of the gated norm; a constant in Megatron's mixer.
        time_step_limit: Range that time steps are clamped to, after softplus.
        conv_bias: May be False here.
    """

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
            raise ValueError("D_has_hdim=True is not supported; use one D for each head")
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
        """The settings that, with the weights, determine the mixer's output."""
        return self.recurrence, self.rmsnorm, self.time_step_limit

    @override
    def forward(self, hidden_states: Tensor, inference_context: Any = None, **settings: Any) -> Any:
        """Mix hidden_states [tokens, batch, hidden]; see Megatron's mixer.

        A full-sequence forward without a context runs the same kernels from zero states.
        """
        if inference_context is not None or self.training:
            return super().forward(hidden_states, inference_context, **settings)
        projected, _ = self.in_proj(hidden_states)
        return self.out_proj(self._full_sequences(projected))

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
        projected, _ = self.in_proj(hidden_states)
        states = context.layer_states(self.layer_number - self.pp_layer_offset)
        mixed = self._mix(self._split(projected.squeeze(1)), states, context.step.batch)
        return self.out_proj(mixed.unsqueeze(1))

    def _mix(self, inputs: _MixerInputs, states: LayerStates, step: StepBatch) -> Tensor:
        """Return [tokens, d_inner]: those of decode rows, of prefill rows, and zeros for padding at the end."""
        mixed = []
        first_prefilled = step.num_decode_tokens if step.prefill is not None else len(inputs.z)
        if step.decode is not None:
            mixed.append(self._decode_rows(inputs.rows(slice(0, first_prefilled)), states, step))
        if step.prefill is not None:
            mixed.append(self._prefill_rows(inputs.rows(slice(first_prefilled, None)), states, step.prefill))
        if not mixed:
            return torch.zeros_like(inputs.z)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _prefill_rows(self, inputs: _MixerInputs, states: LayerStates, rows: PrefillRows) -> Tensor:
        y = self.recurrence.prefill(inputs.xbc, inputs.dt, self._weights, states, rows)
        return self._gate(y.flatten(1), inputs.z)

    def _decode_rows(self, inputs: _MixerInputs, states: LayerStates, step: StepBatch) -> Tensor:
        assert step.decode is not None
        y = self.recurrence.decode(inputs.xbc, inputs.dt, self._weights, states, step.decode, step.replay)
        return self._gate(y.flatten(1), inputs.z)

    def _full_sequences(self, projected: Tensor) -> Tensor:
        num_tokens, batch, _ = projected.shape
        rows = whole_rows(batch, num_tokens, self.chunk_size, projected.device)
        no_state = self.recurrence.no_states(projected.dtype, projected.device)
        packed = self._split(projected.transpose(0, 1).flatten(0, 1))
        mixed = self._prefill_rows(packed, no_state, rows)
        return mixed.unflatten(0, (batch, num_tokens)).transpose(0, 1)

    def _split(self, projected: Tensor) -> _MixerInputs:
        d_inner, bc = self.d_inner_local_tp, 2 * self.ngroups_local_tp * self.d_state
        return _MixerInputs(*projected.split([d_inner, d_inner + bc, self.nheads_local_tp], dim=-1))

    @property
    def _weights(self) -> Mamba2Weights:
        ssm = SSMWeights(self.A_log, self.D, self.dt_bias, self.time_step_limit)
        return Mamba2Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, ssm)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm(y, z) if self.rmsnorm else y * F.silu(z)


@contextmanager
def _without_mamba_ssm() -> Iterator[None]:
    """Let Megatron's mixer be built where mamba-ssm is absent: nothing of it is used."""
    had = megatron_mixer.HAVE_MAMBA_SSM
    megatron_mixer.HAVE_MAMBA_SSM = True
    try:
        yield
    finally:
        megatron_mixer.HAVE_MAMBA_SSM = had
