"""Mixer for a Gated DeltaNet layer: projections, norm and gate around the recurrence."""

from typing import Any

import torch
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules, _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from typing_extensions import override

from ...recurrences.batches import PrefillBatch
from ...recurrences.gated_delta.recurrence import GatedDelta, GatedDeltaWeights
from ...recurrences.interface import LayerStates
from ...step.batch import StepBatch
from .caching_mixer import CachingMixer, GatedHeadRMSNorm

_PROJECTED = ("query", "key", "value", "z", "beta", "alpha")
"""Names of the sections of `in_proj`'s rows in checkpoints, in order; the first three are convolved."""
_NUM_CONVOLVED = 3


class GatedDeltaMixer(CachingMixer, MegatronModule):
    """Gated DeltaNet mixer for MambaLayer, with dimensions from Megatron's `linear_*` settings; inference only.

    Tensor-parallel ranks divide the heads, so each section of `in_proj` and of the convolution is split separately.

    Args:
        submodules: Contains the specs for `in_proj` and `out_proj`.
        chunk_size: Number of tokens per chunk of the scan.
        norm_eps: Epsilon of the norm before the gate.

    Raises:
        ValueError: If the number of key heads is not divisible by the number of ranks, or the number of value heads by
            the number of key heads.
    """

    recurrence: GatedDelta

    def __init__(
        self,
        config: Any,
        submodules: MambaMixerSubmodules,
        d_model: int,
        *,
        chunk_size: int = 64,
        norm_eps: float = 1e-6,
        layer_number: int,
        pg_collection: Any,
        pp_layer_offset: int = 0,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.pp_layer_offset = pp_layer_offset
        self._tensor_ranks = pg_collection.tp
        self.recurrence = _recurrence_of(config, chunk_size, pg_collection.tp.size())
        self.in_proj, self.out_proj = self._linears(submodules, d_model)
        keys, values, heads = self._widths
        channels, device = 2 * keys + values, torch.cuda.current_device()
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            config.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
            device=device,
            dtype=config.params_dtype,
        )
        self.A_log = nn.Parameter(torch.zeros(heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=torch.float32, device=device))
        self.norm = GatedHeadRMSNorm(config.linear_value_head_dim, norm_eps, config.params_dtype, device)
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def _linears(self, submodules: MambaMixerSubmodules, d_model: int) -> tuple[Any, Any]:
        config, num_ranks = self.config, self._tensor_ranks.size()
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self._tensor_ranks}
        first = build_module(
            submodules.in_proj,
            d_model,
            num_ranks * sum(self._sections),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        second = build_module(
            submodules.out_proj,
            num_ranks * self._widths[1],
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        return first, second

    @property
    def facts(self) -> tuple[Any, ...]:
        """Settings that determine the mixer's output for given weights."""
        return self.recurrence, self.norm.eps

    def forward(self, hidden_states: Tensor, inference_context: Any = None, **settings: Any) -> Any:
        """Run the mixer on hidden_states [tokens, batch, hidden]; return output and bias."""
        if self.training:
            raise NotImplementedError("Gated DeltaNet layers support only inference; call model.eval()")
        if settings.get("packed_seq_params") is not None:
            raise NotImplementedError("packed_seq_params is not supported; pass sequences of equal length")
        if inference_context is None:
            return self.mix_sequences(hidden_states)
        return self.mix_step(hidden_states, inference_context)

    @property
    def num_mixed_channels(self) -> int:
        return self._widths[1]

    def mix_prefill(self, projected: Tensor, states: LayerStates, rows: PrefillBatch) -> Tensor:
        qkv, z, b, a = self._split(projected)
        return self.norm(self.recurrence.prefill(qkv, b, a, self._weights, states, rows).flatten(1), z)

    def mix_decode(self, projected: Tensor, states: LayerStates, step: StepBatch) -> Tensor:
        assert step.decode is not None
        qkv, z, b, a = self._split(projected)
        y = self.recurrence.decode(qkv, b, a, self._weights, states, step.decode, step.replay)
        return self.norm(y.flatten(1), z)

    @override
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as sharded tensors; `in_proj` and the convolution are sharded by section."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        by_heads = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            by_heads,
            prefix,
            dict.fromkeys(by_heads, 0),
            sharded_offsets,
            tp_group=self._tensor_ranks,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "norm", "out_proj"):
            part = getattr(self, name)
            state |= sharded_state_dict_default(
                part, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._tensor_ranks
            )
        for name, count in (("in_proj.weight", len(_PROJECTED)), ("conv1d.weight", _NUM_CONVOLVED)):
            key = f"{prefix}{name}"
            state[key] = _split_tensor_factory(state[key], self._sections[:count], list(_PROJECTED[:count]), 0)
        return state

    @property
    def _sections(self) -> list[int]:
        """Number of rows in each section of `in_proj` on this rank, in the order of `_PROJECTED`."""
        keys, values, heads = self._widths
        return [keys, keys, values, values, heads, heads]

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Numbers of key channels, value channels and value heads on this rank."""
        sizes = self.recurrence
        heads = sizes.num_value_heads
        return sizes.num_key_heads * sizes.key_dim, heads * sizes.value_dim, heads

    @property
    def _weights(self) -> GatedDeltaWeights:
        return GatedDeltaWeights(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Return the convolution's input, the gate, and the inputs b and a of each value head's beta and decay."""
        keys, values, heads = self._widths
        return projected.split([2 * keys + values, values, heads, heads], dim=-1)


def _recurrence_of(config: Any, chunk_size: int, num_ranks: int) -> GatedDelta:
    """Return one rank's shard of the recurrence in Megatron's configuration."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ValueError(f"linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}")
    if keys % num_ranks:
        raise ValueError(
            f"linear_num_key_heads {keys} is not divisible by {num_ranks} tensor-parallel ranks; choose a "
            "--tensor-model-parallel-size that divides it"
        )
    return GatedDelta(
        num_key_heads=keys // num_ranks,
        num_value_heads=values // num_ranks,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        d_conv=config.linear_conv_kernel_dim,
        grain=chunk_size,
    )
