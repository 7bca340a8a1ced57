"""Routed experts of a layer as two stacked parameters; checkpoints store each expert separately."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from typing_extensions import override

from ..kernels.activations import Activation
from ..kernels.experts.overlapped_expert import OverlappedExpert
from ..kernels.experts.prompt_experts import QuantizedExperts, routed_prompt_experts
from ..kernels.experts.quantized_experts import (
    QuantizedSharedExpert,
    can_multiply_quantized,
    routed_quantized_experts,
    takes_quantized_shared,
)
from ..kernels.experts.routed_experts import SharedExpert, routed_experts, takes_shared_expert
from ..kernels.quantized.activations import ActivationScheme
from ..kernels.quantized.dequantize import dequantize
from ..kernels.quantized.quantized_matrix import QuantizedForm, QuantizedMatrix
from .feed_forward import fused_activation
from .linear import PromptTokens, check_not_quantized, frozen, matrix_of

EXPERT_WEIGHTS = ("linear_fc1", "linear_fc2")
"""Names of the parameters of `StackedExperts`."""
STACKED_PARAMETERS = (".experts.linear_fc1", ".experts.linear_fc2")
"""Suffixes of the names of parameters that hold the weights of several experts."""


class StackedExperts(MegatronModule):
    """This rank's routed experts, each split over the tensor-parallel ranks like Megatron's experts.

    Args:
        config: Megatron's configuration; the experts' inputs and outputs have `moe_latent_size` channels if it is set,
            otherwise `hidden_size`.
        pg_collection: Contains the process groups `ep`, `tp` and `expt_dp`.

    Attributes:
        linear_fc1: [experts, inner, inputs]; [experts, 2 * inner, inputs] if gated, with the gates first.
        linear_fc2: [experts, inputs, inner].
        forms: Of those that are quantized, by name; they are the words of a `QuantizedMatrix`, with scales and factors
            as further parameters.
        prompt_tokens: Prompt tokens whose activations are quantized; None if the experts quantize none.
        activations: For each weight, "dynamic" or "static" if its inputs are quantized; None if not. Keys of cached
            states depend on it.
    """

    def __init__(self, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._tensor_rank, self._num_tensor_ranks = pg_collection.tp.rank(), pg_collection.tp.size()
        self._copy = pg_collection.expt_dp.rank()
        self.num_experts = config.num_moe_experts // pg_collection.ep.size()
        self.first_expert = pg_collection.ep.rank() * self.num_experts
        self._num_halves = 2 if config.gated_linear_unit else 1
        inner = config.moe_ffn_hidden_size // self._num_tensor_ranks
        width = config.moe_latent_size or config.hidden_size
        self.linear_fc1 = self._parameter(self._num_halves * inner, width)
        self.linear_fc2 = self._parameter(width, inner)
        self.forms: dict[str, QuantizedForm] = {}
        for name in EXPERT_WEIGHTS:
            for part in ("scales", "factors", "activation_scale"):
                self.register_parameter(f"{name}_{part}", None)
        self.prompt_tokens: PromptTokens | None = None
        self.activations: tuple[str, ...] | None = None
        self._activation, self._apart = _activation(config)

    def _parameter(self, *sizes: int) -> nn.Parameter:
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        return nn.Parameter(torch.empty(self.num_experts, *sizes, device=device, dtype=dtype), requires_grad=False)

    def keep_quantized(self, name: str, form: QuantizedForm, device: torch.device) -> None:
        """Replace `linear_fc1` or `linear_fc2` by an undefined quantized weight."""
        weight = getattr(self, name)
        matrix = form.empty(tuple(weight.shape), device)
        setattr(self, name, frozen(matrix.words, like=weight))
        setattr(self, f"{name}_scales", None if matrix.scales is None else frozen(matrix.scales))
        setattr(self, f"{name}_factors", None if matrix.factors is None else frozen(matrix.factors))
        self.forms[name] = form

    def quantize_activations(self, prompt_tokens: PromptTokens, scales: Mapping[str, Tensor | None]) -> None:
        """Quantize the activations of prompt tokens from now on; both weights must be FP8.

        Args:
            scales: For each weight, the file's [1] scale of its inputs; None for dynamic scales.
        """
        self.prompt_tokens = prompt_tokens
        self.activations = tuple("dynamic" if scales[name] is None else "static" for name in EXPERT_WEIGHTS)
        for name, scale in scales.items():
            setattr(self, f"{name}_activation_scale", None if scale is None else frozen(scale))

    def weight(self, name: str) -> Tensor | QuantizedMatrix:
        """Return `linear_fc1` or `linear_fc2`."""
        weight: Tensor = getattr(self, name)
        if name not in self.forms:
            return weight
        return matrix_of(self.forms[name], weight, getattr(self, f"{name}_scales"), getattr(self, f"{name}_factors"))

    def takes(self, shared: SharedExpert | QuantizedSharedExpert, x: Tensor) -> bool:
        """Return whether `forward` can also compute the shared expert for these tokens."""
        is_alike = self._apart is None and shared.first.shape[1:] == x.shape[1:]
        if not is_alike or self._first_prompt(len(x)) is not None:
            return False
        if isinstance(shared, SharedExpert):
            return not self.forms and takes_shared_expert(x)
        first, second = self.weight("linear_fc1"), self.weight("linear_fc2")
        is_quantized = isinstance(first, QuantizedMatrix) and isinstance(second, QuantizedMatrix)
        return is_quantized and takes_quantized_shared(x, first, second, shared)  # type: ignore[arg-type]

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        addend: Callable[[], Tensor] | None = None,
        shared: SharedExpert | QuantizedSharedExpert | None = None,
        overlapped: OverlappedExpert | None = None,
    ) -> Tensor:
        """Return the weighted sum over each token's experts on this rank; see `routed_experts`."""
        first_prompt = self._first_prompt(len(x))
        if first_prompt is None:
            return self._exactly(x, ids, weights, addend, shared, overlapped)
        if overlapped is not None:
            overlapped.launch(after_queued=False)
        added = None if addend is None else cache(addend)
        parts = []
        if first_prompt > 0:
            of_decode = None if added is None else lambda: added()[:first_prompt]
            parts.append(
                self._exactly(x[:first_prompt], ids[:first_prompt], weights[:first_prompt], of_decode, None, None)
            )
        parts.append(
            routed_prompt_experts(
                x[first_prompt:],
                ids[first_prompt:],
                weights[first_prompt:],
                self._quantized_experts(),
                self._activation,
                apart=self._apart,
                first_expert=self.first_expert,
                addend=None if added is None else lambda: added()[first_prompt:],
            )
        )
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _first_prompt(self, num_tokens: int) -> int | None:
        """Return the index of the first token that is quantized; None if the step quantizes none."""
        first = None if self.prompt_tokens is None else self.prompt_tokens.first
        return None if first is None or first >= num_tokens else first

    def _quantized_experts(self) -> QuantizedExperts:
        first, second = (self.weight(name) for name in EXPERT_WEIGHTS)
        assert isinstance(first, QuantizedMatrix) and isinstance(second, QuantizedMatrix)
        columns = (None if weight.scales is None else weight.block_columns for weight in (first, second))
        scales = (getattr(self, f"{name}_activation_scale") for name in EXPERT_WEIGHTS)
        return QuantizedExperts(first, second, *map(ActivationScheme, columns, scales))

    def _exactly(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        addend: Callable[[], Tensor] | None,
        shared: SharedExpert | QuantizedSharedExpert | None,
        overlapped: OverlappedExpert | None,
    ) -> Tensor:
        """Return the sum for tokens that are not quantized."""
        first, second = self.weight("linear_fc1"), self.weight("linear_fc2")
        settings: dict[str, Any] = {
            "apart": self._apart,
            "first_expert": self.first_expert,
            "addend": addend,
            "shared": shared,
            "overlapped": overlapped,
        }
        if self.forms and can_multiply_quantized(x, ids.numel(), first, second):
            return routed_quantized_experts(x, ids, weights, first, second, self._activation, **settings)  # type: ignore[arg-type]
        first, second = (
            weight if isinstance(weight, Tensor) else dequantize(weight, x.dtype) for weight in (first, second)
        )
        return routed_experts(x, ids, weights, first, second, self._activation, **settings)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield views of each expert's plain weights, under their names in Megatron's layer."""
        for expert in range(self.num_experts):
            for name in (name for name in EXPERT_WEIGHTS if name not in self.forms):
                yield f"local_experts.{expert}.{name}.weight", getattr(self, name).data[expert]

    @override
    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return views of each expert's weights under Megatron's checkpoint keys, for saving or loading in place.

        Args:
            metadata: If its `singleton_local_shards` is True, each expert has a separate key.
        """
        for form in self.forms.values():
            check_not_quantized(form)
        has_own_keys = (metadata or {}).get("singleton_local_shards", False)
        rank, num_ranks = self._tensor_rank, self._num_tensor_ranks
        parts = {}
        for name, view in self.named_views():
            expert, tensor = name.removeprefix("local_experts.").split(".", 1)
            number = self.first_expert + int(expert)
            own = f"{number}." if has_own_keys else ""
            of_expert = [] if has_own_keys else [(len(sharded_offsets), number, self.config.num_moe_experts)]
            offsets = [*sharded_offsets, *of_expert]
            is_first = tensor == "linear_fc1.weight"
            axis, num_halves = len(offsets) + (0 if is_first else 1), self._num_halves if is_first else 1
            for half, part in enumerate(view.chunk(num_halves)):
                # With separate keys, each half of a gated expert also has a key; otherwise all gates come first.
                suffix = ("_w", "_v")[half] if num_halves > 1 and has_own_keys else ""
                shard = (rank, num_ranks) if has_own_keys else (half * num_ranks + rank, num_halves * num_ranks)
                parts[f"{prefix}{name}" + (f".{half}" if num_halves > 1 else "")] = ShardedTensor.from_rank_offsets(
                    f"{prefix}experts.{own}{tensor}{suffix}",
                    part,
                    *offsets,
                    (axis, *shard),
                    replica_id=(0, 0, self._copy),
                    prepend_axis_num=len(offsets),
                )
        return parts


def _activation(config: Any) -> tuple[Activation, Any]:
    """Return (activation fused with the first GEMM, None), or ("none", function to apply to the GEMM's result)."""
    fused, is_gated = fused_activation(config), config.gated_linear_unit
    if fused != "none":
        return fused, None
    activation = config.activation_func
    if not is_gated:
        return "none", activation

    def gated(inner: Tensor) -> Tensor:
        gates, others = inner.chunk(2, dim=-1)
        return activation(gates) * others

    return "none", gated
