"""Select the weights of a model that stay quantized, and fill them from the tensors of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor, nn

from ..kernels.quantized.prompt_gemm import has_prompt_gemm
from ..kernels.quantized.quantized_matrix import RUN, QuantizedForm, QuantizedMatrix, packed
from ..mcore.linear import PromptTokens, QuantizableLinear
from ..mcore.stacked_experts import StackedExperts
from .checkpoints.quantized_weights import MXFP4, NVFP4, Activations, CodedTensor, WeightFormat
from .placement import Placement, Placements, Split

_SCALE_DTYPES = {NVFP4: torch.float8_e4m3fn, MXFP4: torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Index of this tensor-parallel rank, and the number of ranks."""

    rank: int
    size: int

    def local(self, placement: Placement, tensor: Tensor) -> Tensor:
        """Return this rank's shard of the part of a checkpoint tensor that the placement selects."""
        return placement.split.local(placement.select(tensor), self.rank, self.size)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that is copied to a weight.

    Args:
        format: Format of the tensor, with `activations` "none"; None if it is not quantized.
        shape: Shape of the tensor.
        activations: As in its `WeightFormat`.
    """

    placement: Placement
    format: WeightFormat | None
    shape: tuple[int, ...]
    activations: Activations = "none"


@dataclass(frozen=True, slots=True)
class KeptForm:
    """Form of a weight that stays quantized, and the number of its last rows that are not quantized."""

    form: QuantizedForm
    num_plain: int = 0


def kept_form(shape: tuple[int, ...], sources: Sequence[Source], ranks: Ranks) -> KeptForm | None:
    """Return the form in which a weight can stay quantized; None if it must be dequantized.

    All sources must have the same format, except unquantized ones in the last rows. If tensor-parallel ranks split a
    block, the form has smaller blocks; if they split a run of codes, the weight must be dequantized.

    Args:
        shape: Rows and columns of the weight on this rank.
    """
    rows, columns = shape
    quantized = [source for source in sources if source.format is not None]
    plain = [source for source in sources if source.format is None]
    formats = {source.format for source in quantized}
    if len(formats) != 1 or not (format := next(iter(formats))):
        return None
    num_plain = sum(len(_rows_of(source.placement, rows)) for source in plain)
    if any(int(_rows_of(source.placement, rows).min()) < rows - num_plain for source in plain):
        return None
    code_bits = 4 if format.code_type == "U8" else 8
    if columns % (16 // code_bits * RUN):
        return None
    if format.columns is None:
        return KeptForm(QuantizedForm(8, has_factors=True), num_plain)
    if format in _SCALE_DTYPES:
        fits = columns % format.columns == 0
        form = QuantizedForm(4, _SCALE_DTYPES[format], format.has_global, 1, format.columns)
        return KeptForm(form, num_plain) if fits else None
    is_cut = ranks.size > 1 and any(_is_cut_in_columns(source.placement) for source in quantized)
    block_columns = gcd(format.columns, columns) if is_cut else format.columns
    if format.rows is None or format.rows == 1 or block_columns % RUN:
        return None
    block_rows = _shared_rows(_owners(rows, format.rows, quantized, ranks)[: rows - num_plain], format.rows)
    return KeptForm(QuantizedForm(8, torch.float32, False, block_rows, block_columns), num_plain)


def _rows_of(placement: Placement, rows: int) -> Tensor:
    """Return the indices of the weight's rows that a placement fills."""
    return placement.view(torch.arange(rows).unsqueeze(-1)).flatten()


def _is_cut_in_columns(placement: Placement) -> bool:
    return isinstance(placement.split, Split) and placement.split.dim == 1


def _owners(rows: int, height: int, sources: list[Source], ranks: Ranks) -> Tensor:
    """Return a block id for each row of the weight: rows from the same `height`-row block of the files share it."""
    owners = torch.full((rows,), -1)
    for number, source in enumerate(sources):
        blocks = (torch.arange(source.shape[-2]) // height).unsqueeze(-1).expand(*source.shape[:-1], 1)
        is_whole = _is_cut_in_columns(source.placement)
        found = source.placement.select(blocks) if is_whole else ranks.local(source.placement, blocks)
        owners[_rows_of(source.placement, rows)] = found.flatten() * len(sources) + number
    return owners


def _shared_rows(owners: Tensor, height: int) -> int:
    """Return the largest divisor of `height` such that every run of so many rows has only one block id."""
    for size in (divisor for divisor in range(height, 1, -1) if height % divisor == 0):
        whole, rest = owners[: len(owners) // size * size].view(-1, size), owners[len(owners) // size * size :]
        if bool((whole == whole[:, :1]).all()) and bool((rest == rest[:1]).all()):
            return size
    return 1


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
        rows = _rows_of(placement, self._rows).to(self.device)
        codes = ranks.local(placement, stored.codes if isinstance(stored, CodedTensor) else stored)
        if codes.shape != (len(rows), self._columns):
            raise ValueError(f"the shard must be {len(rows)} x {self._columns}, found {tuple(codes.shape)}")
        if isinstance(stored, Tensor):
            assert self._plain is not None
            self._plain[rows - self._num_quantized] = codes.to(self._plain)
            return codes.numel()
        self._matrix.words[rows] = packed(codes, stored.code_bits)
        if self._activation_scale is not None and stored.activation_scale is not None:
            torch.maximum(self._activation_scale, stored.activation_scale, out=self._activation_scale)
        is_cut = _is_cut_in_columns(placement)
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
            for weight in ("linear_fc1", "linear_fc2"):
                found |= _kept_experts(module, name, weight, sources, ranks, device)
    return found


def _quantize_activations(module: QuantizableLinear, sources: list[Source], prompt_tokens: PromptTokens) -> None:
    """Make a layer quantize the activations of prompt tokens if all quantized sources say so."""
    matrix = module.quantized
    found = {source.activations for source in sources if source.format is not None}
    if matrix is None or "none" in found or not has_prompt_gemm(matrix):
        return
    is_static = found == {"static"} and matrix.scales is None
    module.quantize_activations(prompt_tokens, matrix.words.new_zeros(1, dtype=torch.float32) if is_static else None)


def _kept_experts(
    module: StackedExperts,
    prefix: str,
    weight: str,
    sources: Mapping[str, list[Source]],
    ranks: Ranks,
    device: torch.device,
) -> dict[str, QuantizedTarget]:
    """Keep `weight` of a layer's experts quantized if it has the same form in all of them; return the targets."""
    shape = tuple(getattr(module, weight).shape[1:])
    names = [f"{prefix}.local_experts.{number}.{weight}.weight" for number in range(module.num_experts)]
    of_experts = [sources.get(name, []) for name in names]
    if len({tuple(source.format for source in of_expert) for of_expert in of_experts}) != 1:
        return {}
    kept = kept_form(shape, of_experts[0], ranks)
    if kept is None or kept.num_plain:
        return {}
    module.keep_quantized(weight, kept.form, device)
    stack = module.weight(weight)
    assert isinstance(stack, QuantizedMatrix)
    return {name: QuantizedTarget(stack[number]) for number, name in enumerate(names)}
