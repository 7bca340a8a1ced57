"""Base class of the mixers of recurrent layers, and the norms that they use."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ...kernels.norm.gated_norm import gated_group_norm
from ...kernels.norm.norm_and_gate import norm_and_gate
from ...recurrences.batches import PrefillBatch, full_sequences
from ...recurrences.interface import LayerStates, Recurrence, StateDtypes
from ...step.batch import StepBatch


class GatedGroupRMSNorm(nn.Module):
    """RMSNorm(y * silu(z)) over groups of channels, in float32; y is the mixer's output and z its gate.

    The weight has the same name and shape as in mamba-ssm's gated norm, so checkpoints are interchangeable.

    Args:
        num_channels: Number of channels on this rank.
        group_size: Number of channels that are normalized together.
    """

    def __init__(
        self, num_channels: int, group_size: int, eps: float, dtype: torch.dtype, device: torch.device | int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels, dtype=dtype, device=device))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.group_size = group_size
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate y [..., channels] with z and normalize it; the result has y's dtype."""
        rows, gates = y.flatten(0, -2), z.flatten(0, -2)
        return gated_group_norm(rows, gates, self.weight, self.group_size, self.eps).view(y.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a sharded tensor, split over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class GatedHeadRMSNorm(nn.Module):
    """RMSNorm(y) * silu(z) per head, for a mixer's output y and gate z; all heads share one weight vector.

    Args:
        head_dim: Number of channels that are normalized together.
    """

    def __init__(self, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device | int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalize y [tokens, heads * head_dim] and gate it with z; the result has y's dtype."""
        return norm_and_gate(y, z, self.weight, self.eps)


class CachingMixer:
    """Mixin for Megatron modules that run a recurrence on decode and prefill requests, each with its own state slot.

    Attributes:
        in_proj, out_proj: Megatron's linear layers, which return (output, bias).
        layer_number: Layer number in the whole model, from 1.
        pp_layer_offset: Number of layers in earlier pipeline stages.
    """

    recurrence: Recurrence
    in_proj: Any
    out_proj: Any
    layer_number: int
    pp_layer_offset: int

    @property
    def num_mixed_channels(self) -> int:
        """Number of input channels of `out_proj` on this rank."""
        raise NotImplementedError

    def mix_prefill(self, projected: Tensor, states: LayerStates, rows: PrefillBatch) -> Tensor:
        """Return the input of `out_proj`, [tokens, channels], for packed prompt tokens [tokens, projected]."""
        raise NotImplementedError

    def mix_decode(self, projected: Tensor, states: LayerStates, step: StepBatch) -> Tensor:
        """Return the input of `out_proj` for decode tokens, including drafts; shapes as in `mix_prefill`."""
        raise NotImplementedError

    def mix_step(self, hidden_states: Tensor, context: Any) -> Any:
        """Run the mixer on the packed tokens of a step, [tokens, 1, hidden]; return output and bias."""
        projected, _ = self.in_proj(hidden_states)
        states = context.layer_states(self.layer_number - self.pp_layer_offset)
        mixed = self._mix(projected.squeeze(1), states, context.step.batch)
        return self.out_proj(mixed.unsqueeze(1))

    def mix_sequences(self, hidden_states: Tensor) -> Any:
        """Run the mixer on whole sequences [tokens, batch, hidden] from zero states, with the prefill kernels."""
        projected, _ = self.in_proj(hidden_states)
        num_tokens, batch, _ = projected.shape
        rows = full_sequences(batch, num_tokens, self.recurrence.grain, projected.device)
        packed = projected.transpose(0, 1).flatten(0, 1)
        mixed = self.mix_prefill(packed, self._no_states(projected), rows)
        return self.out_proj(mixed.unflatten(0, (batch, num_tokens)).transpose(0, 1))

    def _mix(self, projected: Tensor, states: LayerStates, step: StepBatch) -> Tensor:
        """Return [tokens, channels]: first decode requests, then prefill requests; zeros if the step has neither."""
        mixed = []
        first_prefilled = step.num_decode_tokens if step.prefill is not None else len(projected)
        if step.decode is not None:
            mixed.append(self.mix_decode(projected[:first_prefilled], states, step))
        if step.prefill is not None:
            mixed.append(self.mix_prefill(projected[first_prefilled:], states, step.prefill))
        if not mixed:
            return projected.new_zeros(len(projected), self.num_mixed_channels)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _no_states(self, projected: Tensor) -> LayerStates:
        """Return state tensors with one zeroed slot, for sequences whose states are not cached."""
        dtype, device = projected.dtype, projected.device
        tensors = self.recurrence.tensors(StateDtypes(dtype, window=dtype, whole=torch.float32))
        live = {tensor.name: torch.zeros((1, *tensor.shape), dtype=tensor.dtype, device=device) for tensor in tensors}
        return LayerStates(live, live)
