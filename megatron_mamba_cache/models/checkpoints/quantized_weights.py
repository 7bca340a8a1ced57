"""Formats of quantized weights, stored as codes and scales, and their dequantization."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.quantized.quantized_matrix import codes_of_pairs

_SLABS = {"cpu": 2**18, "cuda": 2**22}
"""Device type → maximum number of weights to dequantize at a time; on a CPU, more would fragment memory."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_FLOATS = ("F32", "BF16", "F16")
_ACTIVATION_SCALES = ("input_scale", "activation_scale")
_POWERS_OF_2 = ("U8", "F8_E8M0")

Shape = tuple[int, ...]
Activations = Literal["none", "dynamic", "static"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of quantized matrices [..., rows, columns]. Types have the names that safetensors uses.

    Args:
        name: Name shown in messages.
        code_type: Type of the codes. "U8" holds two e2m1 codes per byte, low four bits first.
        scale_types: Allowed types of the scales. "U8" holds exponents of 2 with a bias of 127.
        rows, columns: Shape of the block that shares a scale; None for the whole length. The last block may be smaller.
        has_global: True if each matrix has a second scale, which applies to all its blocks.
        activations: Quantization of the weight's inputs: "none", or FP8 with scales that are computed from the inputs
            ("dynamic") or stored in the checkpoint ("static").
    """

    name: str
    code_type: str
    scale_types: tuple[str, ...]
    rows: int | None = None
    columns: int | None = None
    has_global: bool = False
    activations: Activations = "none"

    def shape_of(self, codes: Shape) -> Shape:
        """Return the shape of a weight, given the shape of its codes."""
        return (*codes[:-1], 2 * codes[-1]) if self.code_type == "U8" and codes else codes

    def grid(self, weight: Shape) -> Shape:
        """Return the number of blocks along the rows and along the columns of a weight of this shape."""
        *leading, rows, columns = weight
        return (*leading, _ceil(rows, self.rows), _ceil(columns, self.columns))

    def scale_shapes(self, weight: Shape) -> list[Shape]:
        """Return the shapes that the scale tensor may have for a weight of this shape, the most common first."""
        grid = *leading, rows, columns = self.grid(weight)
        shapes: list[Shape] = [grid, (*leading, rows, 1, columns, 1)]
        if self.columns is None:
            shapes.append((*leading, rows))
        if self.columns is None and self.rows is None:
            shapes += [tuple(leading), (), (1,)]
        return shapes


def fp8(rows: int | None, columns: int | None, activations: Activations = "none") -> WeightFormat:
    """Return the FP8 (e4m3) format with a scale per `rows` x `columns` block; None means all rows or all columns."""
    if columns is None:
        name = f"FP8 with a scale a {'tensor' if rows is None else 'row'}"
    else:
        name = f"FP8 in blocks of {rows} x {columns}"
    return WeightFormat(name, "F8_E4M3", (*_FLOATS, "F8_E8M0"), rows, columns, activations=activations)


MXFP8 = WeightFormat("MXFP8", "F8_E4M3", _POWERS_OF_2, 1, 32)
NVFP4 = WeightFormat("NVFP4", "U8", ("F8_E4M3",), 1, 16, has_global=True)
MXFP4 = WeightFormat("MXFP4", "U8", _POWERS_OF_2, 1, 32)


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A quantized weight, with scales for each row: the weight is codes * scales * factors.

    Args:
        codes: [..., rows, columns] uint8, one code per element.
        code_bits: Number of bits of a code, 4 or 8.
        scales: [..., rows, column blocks], float32, or bytes of e4m3 or E8M0; None if there are only factors.
        factors: [..., rows] float32; None if there are only scales.
        block_rows, block_columns: Size of the blocks that share a scale in the file.
        activation_scale: [1] float32; static scale of the weight's inputs, None if there is none.
    """

    codes: Tensor
    code_bits: int
    scales: Tensor | None
    factors: Tensor | None
    block_rows: int = 1
    block_columns: int = 1
    activation_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight, which a checkpoint stores as a tensor of codes and tensors of scales.

    Args:
        codes, scale, global_scale: Names of the tensors; `global_scale` is None if the format has no global scale.
        divides: True if the checkpoint stores the inverse of the global scale.
        activation_scale: Name of the static scale of the weight's inputs; None if there is none or it is not used.
    """

    format: WeightFormat
    shape: Shape
    codes: str
    scale: str
    global_scale: str | None = None
    divides: bool = False
    activation_scale: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all tensors needed to dequantize the weight."""
        optional = (self.global_scale, self.activation_scale)
        return (self.codes, self.scale, *(name for name in optional if name is not None))

    def with_activation_scale(self, name: str, shapes: Mapping[str, Shape]) -> "QuantizedWeight":
        """Return the weight with the name of its static activation scale; if there is none, with dynamic scales.

        Args:
            name: Name of the weight.
            shapes: Name of each tensor in the files → its shape.
        """
        if self.format.activations != "static":
            return self
        stem = name.removesuffix("weight")
        choices = (f"{stem}{ending}" for ending in _ACTIVATION_SCALES)
        found = next((choice for choice in choices if choice in shapes and math.prod(shapes[choice]) == 1), None)
        format = self.format if found else replace(self.format, activations="dynamic")
        return replace(self, format=format, activation_scale=found)

    def coded(self, tensors: Mapping[str, Tensor], device: torch.device) -> CodedTensor:
        """Return the weight as codes, scales and factors on `device`, without dequantizing it.

        A global scale that is stored as its inverse is inverted in float32.

        Args:
            tensors: The tensors in `parts`, by name.
        """
        *leading, rows, _ = self.shape
        on_device = {name: tensors[name].to(device) for name in self.parts}
        codes = on_device[self.codes].reshape(*leading, rows, -1).view(torch.uint8)
        inputs = None if self.activation_scale is None else on_device[self.activation_scale].float().reshape(1)
        grid = self.format.grid(self.shape)
        scales = on_device[self.scale]
        scales = (scales if self.format.code_type == "U8" else _float32(scales)).reshape(-1, *grid[-2:])
        scales = scales.expand(math.prod(leading), -1, -1).reshape(grid)  # a stack may have one scale
        if self.format.columns is None:
            return CodedTensor(codes, 8, None, scales.squeeze(-1).expand(*leading, rows), activation_scale=inputs)
        height, width = self.format.rows or rows, self.format.columns
        by_row = scales if height == 1 else scales.repeat_interleave(height, dim=-2)[..., :rows, :]
        if self.format.code_type != "U8":
            return CodedTensor(codes, 8, by_row, None, height, width, inputs)
        factors = None
        if self.global_scale is not None:
            factor = on_device[self.global_scale].float().reshape(-1).expand(math.prod(leading))
            factors = (1 / factor if self.divides else factor).reshape(*leading, 1).expand(*leading, rows)
        return CodedTensor(codes_of_pairs(codes), 4, by_row, factors, height, width)

    def values(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the dequantized weight; it is computed in float32 and rounded once to the result's dtype.

        Args:
            tensors: Tensors by name; must include `parts`.
            like: A tensor with the dtype and device for the result.
        """
        rows, columns = self.shape[-2:]
        found = torch.empty(self.shape, dtype=like.dtype, device=like.device)
        matrices = found.view(-1, rows, columns)
        on_device = {name: tensors[name].to(like.device) for name in self.parts}
        codes = on_device[self.codes].reshape(len(matrices), rows, -1)
        scales = _float32(on_device[self.scale]).reshape(-1, *self.format.grid(self.shape)[-2:])
        scales = scales.expand(len(matrices), -1, -1)  # all matrices in a stack may share one scale
        step = max(1, _SLABS[like.device.type] // columns)
        for number, matrix in enumerate(matrices):
            for start in range(0, rows, step):
                slab = slice(start, min(start + step, rows))
                values = _decoded(codes[number, slab])
                self._scale(values, scales[number], slab)
                if self.global_scale is not None:
                    factors = on_device[self.global_scale].float().reshape(-1).expand(len(matrices))
                    values = values.div_(factors[number]) if self.divides else values.mul_(factors[number])
                matrix[slab] = values
        return found

    def _scale(self, values: Tensor, scales: Tensor, slab: slice) -> None:
        """Multiply each block of `values` by its scale, in place; `values` holds the rows `slab` of the weight."""
        rows, columns = self.shape[-2:]
        height, width = self.format.rows or rows, self.format.columns or columns
        of_rows = scales[torch.arange(slab.start, slab.stop, device=scales.device) // height]  # [rows, blocks]
        num_whole = columns // width
        whole, rest = values[:, : num_whole * width], values[:, num_whole * width :]
        whole.unflatten(1, (num_whole, width)).mul_(of_rows[:, :num_whole, None])
        rest.mul_(of_rows[:, num_whole:])


def _decoded(codes: Tensor) -> Tensor:
    """Decode codes [rows, n] to float32: [rows, n], or [rows, 2 n] if each byte holds two codes."""
    if codes.dtype is not torch.uint8:
        return codes.float()
    return functional.embedding(codes.int(), _pairs(codes.device)).flatten(1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return a lookup table with the two values that each byte encodes, shape [256, 2]."""
    return torch.tensor([(_E2M1[byte % 16], _E2M1[byte // 16]) for byte in range(256)], device=device)


def _float32(scale: Tensor) -> Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).float()


def _ceil(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)
