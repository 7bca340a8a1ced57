"""Replace the weights of a model that stay quantized, and fill them from the tensors of a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from ..kernels.quantized.prompt_gemm import has_prompt_gemm
from ..kernels.quantized.quantized_matrix import QuantizedMatrix, packed
from ..mcore.linear import PromptTokens, QuantizableLinear
from ..mcore.stacked_experts import EXPERT_WEIGHTS, StackedExperts
from .checkpoints.quantized_weights import CodedTensor, WeightFormat
from .kept_form import Ranks, Source, is_cut_in_columns, kept_form, rows_of
from .placement import Placement, Placements


class QuantizedTarget:
    """A weight that stays quantized, to be filled with the tensors of a checkpoint.

    Args:
        plain: Last rows of the weight, which are not quantized; None if all rows are quantized.
        activation_scale: [1] float32; receives the maximum over the tensors' scales of activations. None: not needed.
    """

    def __init__(
        self, matrix: QuantizedMatrix, plain: Tensor | None = None, activation_scale: Tensor | None = None
    ) -> None:
        self._activation_scale = activation_scale
        self._matrix = matrix
        self._plain = plain
        self._num_quantized, self._columns = matrix.shape
        self._rows = self._num_quantized + (0 if plain is None else len(plain))

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self._matrix.words.device

    def numel(self) -> int:
        """Return the number of elements, of quantized and other rows."""
        return self._rows * self._columns

    def fill(self, placement: Placement, stored: Tensor | CodedTensor, ranks: Ranks) -> int:
        """Copy this rank's shard of a checkpoint tensor to the rows of its placement; return the number of elements."""
        rows = rows_of(placement, self._rows).to(self.device)
        codes = ranks.local(placement, stored.codes if isinstance(stored, CodedTensor) else stored)
        if codes.shape != (len(rows), self._columns):
            raise ValueError(f"the shard must be {len(rows)} x {self._columns}, found {tuple(codes.shape)}")
        if isinstance(stored, Tensor):
            assert self._plain is not None
            self._plain[rows - self._num_quantized] = codes.to(self._plain)
            return codes.numel()
        self._matrix.words[rows] = packed(codes, stored.code_bits)
        if self._activation_scale is not None and stored.activation_scale is not None:
            _check_activation_scale(stored.activation_scale.item())
            torch.maximum(self._activation_scale, stored.activation_scale, out=self._activation_scale)
        is_cut = is_cut_in_columns(placement)
        if self._matrix.factors is not None and stored.factors is not None:
            factors = stored.factors.unsqueeze(-1)
            factors = placement.select(factors) if is_cut else ranks.local(placement, factors)
            self._matrix.factors[rows] = factors.squeeze(-1)
        if self._matrix.scales is not None and stored.scales is not None:
            refined = stored.scales
            if stored.block_columns != self._matrix.block_columns:
                refined = refined.repeat_interleave(stored.block_columns // self._matrix.block_columns, dim=-1)
                refined = refined[..., : -(-stored.codes.shape[-1] // self._matrix.block_columns)]
            begins = rows % self._matrix.block_rows == 0
            scales, blocks = ranks.local(placement, refined)[begins], rows[begins] // self._matrix.block_rows
            if self._matrix.scales.dtype is torch.float32:
                self._matrix.scales[blocks] = scales
            else:
                self._matrix.scales.view(torch.uint8)[blocks] = scales.view(torch.uint8)
        return codes.numel()


def _check_activation_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(
            f"the scale of its activations must be positive and finite, found {scale}; fetch the file again, or set "
            "--activation-dtype to bf16, which does not use it"
        )


class QuantizedFiller:
    """Replaces the weights of a model that can stay quantized, and fills them from the tensors of a checkpoint.

    Args:
        formats: Name of each quantized checkpoint tensor → its format.
        shapes: Name of each checkpoint tensor → its shape.
        local_name: As in `ModelFiller`.
        device: Device of the quantized weights.
        quantizes_activations: True to quantize the activations of prompt tokens as the formats say.
    """

    def __init__(
        self,
        model: nn.Module,
        placements: Placements,
        formats: Mapping[str, WeightFormat],
        shapes: Mapping[str, tuple[int, ...]],
        ranks: Ranks,
        local_name: Callable[[str], str | None],
        device: torch.device,
        *,
        quantizes_activations: bool,
    ) -> None:
        self.device = device
        self._ranks = ranks
        self._local: dict[str, list[tuple[Placement, str]]] = {}
        sources: dict[str, list[Source]] = {}
        for name, placed in placements.items():
            for placement in placed:
                target = local_name(placement.target)
                if target is not None:
                    self._local.setdefault(name, []).append((placement, target))
                    sources.setdefault(target, []).append(_source(placement, formats.get(name), shapes[name]))
        prompt_tokens = PromptTokens() if quantizes_activations else None
        self._targets = _kept(model, sources, ranks, device, prompt_tokens)
        self._empty = {name: target.numel() for name, target in self._targets.items()}

    def takes(self, name: str) -> bool:
        """Return True if a checkpoint tensor is copied to weights that stay quantized."""
        return any(target in self._targets for _, target in self._local.get(name, ()))

    def fill(self, name: str, stored: Tensor | CodedTensor) -> None:
        """Copy a checkpoint tensor to its weights.

        Raises:
            ValueError: If the shape does not match the weight; the message names the tensor.
        """
        for placement, target in self._local[name]:
            try:
                self._empty[target] -= self._targets[target].fill(placement, stored, self._ranks)
            except (ValueError, IndexError) as error:
                raise ValueError(f"tensor {name}: {error}") from error

    def unfilled(self) -> list[str]:
        """Return the names of the quantized weights that have not been filled completely."""
        return sorted(name for name, count in self._empty.items() if count)


def _source(placement: Placement, format: WeightFormat | None, shape: tuple[int, ...]) -> Source:
    if format is None:
        return Source(placement, None, shape)
    return Source(placement, replace(format, activations="none"), shape, format.activations)


def _kept(
    model: nn.Module,
    sources: Mapping[str, list[Source]],
    ranks: Ranks,
    device: torch.device,
    prompt_tokens: PromptTokens | None,
) -> dict[str, QuantizedTarget]:
    """Replace the weights of a model that can stay quantized; return them by their keys in `sources`."""
    found: dict[str, QuantizedTarget] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizableLinear):
            of_weight = sources.get(f"{name}.weight", [])
            if (kept := kept_form(tuple(module.weight.shape), of_weight, ranks)) is not None:
                module.keep_quantized(kept.form, kept.num_plain, device)
                if prompt_tokens is not None:
                    _quantize_activations(module, of_weight, prompt_tokens)
                assert module.quantized is not None
                target = QuantizedTarget(module.quantized, module.plain_weight, module.activation_scale)
                found[f"{name}.weight"] = target
        elif isinstance(module, StackedExperts):
            found |= _kept_experts(module, name, sources, ranks, device, prompt_tokens)
    return found


def _quantize_activations(module: QuantizableLinear, sources: list[Source], prompt_tokens: PromptTokens) -> None:
    """Make a layer quantize the activations of prompt tokens if all quantized sources say so."""
    matrix = module.quantized
    if matrix is not None and _quantizes(matrix, sources):
        module.quantize_activations(prompt_tokens, _activation_scale(matrix, sources))


def _quantizes(matrix: QuantizedMatrix, sources: Sequence[Source]) -> bool:
    """Return True if the inputs of a weight's prompt tokens are quantized."""
    return has_prompt_gemm(matrix) and all(source.activations != "none" for source in sources if source.format)


def _activation_scale(matrix: QuantizedMatrix, sources: Sequence[Source]) -> Tensor | None:
    """Return a scale to be filled from the file; None if scales follow from the activations."""
    is_static = {source.activations for source in sources if source.format} == {"static"} and matrix.scales is None
    return matrix.words.new_zeros(1, dtype=torch.float32) if is_static else None


def _kept_experts(
    module: StackedExperts,
    prefix: str,
    sources: Mapping[str, list[Source]],
    ranks: Ranks,
    device: torch.device,
    prompt_tokens: PromptTokens | None,
) -> dict[str, QuantizedTarget]:
    """Keep weights of a layer's experts quantized if all experts have the same form of them; return the targets.

    With expert parallelism, tokens of other ranks do not say whether they are of prompts, so none are quantized.
    """
    kept: dict[str, QuantizedMatrix] = {}
    of_weights = {weight: _sources_of_experts(module, prefix, weight, sources) for weight in EXPERT_WEIGHTS}
    for weight, of_experts in of_weights.items():
        shape = tuple(getattr(module, weight).shape[1:])
        first = next(iter(of_experts.values()))
        if any([one.format for one in other] != [one.format for one in first] for other in of_experts.values()):
            continue
        form = kept_form(shape, first, ranks)
        if form is not None and not form.num_plain:
            module.keep_quantized(weight, form.form, device)
            stack = module.weight(weight)
            assert isinstance(stack, QuantizedMatrix)
            kept[weight] = stack
    all_sources = {weight: [*chain.from_iterable(of_weights[weight].values())] for weight in kept}
    has_all = module.num_experts == module.config.num_moe_experts and len(kept) == len(EXPERT_WEIGHTS)
    if prompt_tokens is not None and has_all and all(_quantizes(kept[name], all_sources[name]) for name in kept):
        scales = {name: _activation_scale(matrix, all_sources[name]) for name, matrix in kept.items()}
        module.quantize_activations(prompt_tokens, scales)
    return {
        name: QuantizedTarget(stack[number], None, getattr(module, f"{weight}_activation_scale"))
        for weight, stack in kept.items()
        for number, name in enumerate(of_weights[weight])
    }


def _sources_of_experts(
    module: StackedExperts, prefix: str, weight: str, sources: Mapping[str, list[Source]]
) -> dict[str, list[Source]]:
    """Return the sources of a weight of each expert, by their keys in `sources`."""
    names = (f"{prefix}.local_experts.{number}.{weight}.weight" for number in range(module.num_experts))
    return {name: sources.get(name, []) for name in names}
