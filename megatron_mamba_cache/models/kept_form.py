"""The forms in which weights can stay quantized, by the checkpoint tensors that are copied to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from ..kernels.quantized.quantized_matrix import RUN, QuantizedForm
from .checkpoints.quantized_weights import MXFP4, NVFP4, Activations, WeightFormat
from .placement import Placement, Split

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
    num_plain = sum(len(rows_of(source.placement, rows)) for source in plain)
    if any(int(rows_of(source.placement, rows).min()) < rows - num_plain for source in plain):
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
    is_cut = ranks.size > 1 and any(is_cut_in_columns(source.placement) for source in quantized)
    block_columns = gcd(format.columns, columns) if is_cut else format.columns
    if format.rows is None or format.rows == 1 or block_columns % RUN:
        return None
    block_rows = _shared_rows(_owners(rows, format.rows, quantized, ranks)[: rows - num_plain], format.rows)
    return KeptForm(QuantizedForm(8, torch.float32, False, block_rows, block_columns), num_plain)


def rows_of(placement: Placement, rows: int) -> Tensor:
    """Return the indices of the weight's rows that a placement fills."""
    return placement.view(torch.arange(rows).unsqueeze(-1)).flatten()


def is_cut_in_columns(placement: Placement) -> bool:
    """Return True if tensor-parallel ranks split the columns of a checkpoint tensor."""
    return isinstance(placement.split, Split) and placement.split.dim == 1


def _owners(rows: int, height: int, sources: list[Source], ranks: Ranks) -> Tensor:
    """Return a block id for each row of the weight: rows from the same `height`-row block of the files share it."""
    owners = torch.full((rows,), -1)
    for number, source in enumerate(sources):
        blocks = (torch.arange(source.shape[-2]) // height).unsqueeze(-1).expand(*source.shape[:-1], 1)
        is_whole = is_cut_in_columns(source.placement)
        found = source.placement.select(blocks) if is_whole else ranks.local(source.placement, blocks)
        owners[rows_of(source.placement, rows)] = found.flatten() * len(sources) + number
    return owners


def _shared_rows(owners: Tensor, height: int) -> int:
    """Return the largest divisor of `height` such that every run of so many rows has only one block id."""
    for size in (divisor for divisor in range(height, 1, -1) if height % divisor == 0):
        whole, rest = owners[: len(owners) // size * size].view(-1, size), owners[len(owners) // size * size :]
        if bool((whole == whole[:, :1]).all()) and bool((rest == rest[:1]).all()):
            return size
    return 1
