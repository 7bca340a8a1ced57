"""Read tensors from a Hugging Face model directory; quantized weights are dequantized when they are read."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_config import read_json_object
from .quantization_config import QuantizationConfig
from .quantized_weights import CodedTensor, QuantizedWeight, Shape, WeightFormat

_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """Tensors stored in `model.safetensors`, or in several files listed by an index. Construction reads only headers.

    Attributes:
        names: Tensor name → path of its file.
        shapes: Tensor name → shape.
        types: Tensor name → name of its type in safetensors, such as "BF16".

    Raises:
        ValueError: If a file is missing, damaged or lacks a tensor that the index lists, or a tensor is in two files.
    """

    def __init__(self, directory: Path) -> None:
        index = _index(directory)
        files = sorted(set(index.values())) or ["model.safetensors"]
        self._files = [directory / name for name in files]
        self.names: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        for path in self._files:
            self._read_header(path)
        for name, file in index.items():
            if self.names.get(name) != directory / file:
                raise ValueError(f"{directory / file} lacks tensor {name}, which {_INDEX} lists for it")

    def tensors(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each key of `wanted` with its tensors by name, on the CPU, one file after another.

        One file at a time is mapped into memory. Tensors that its keys need from other files are copied first.

        Args:
            wanted: Tensor name → names of all tensors to yield together, including the tensor itself.
        """
        for path in self._files:
            here = {name: parts for name, parts in wanted.items() if self.names[name] == path}
            # Copy tensors from other files first, so that only one file at a time is mapped into memory.
            elsewhere = self._copied({part for parts in here.values() for part in parts if self.names[part] != path})
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name in here:
                        yield (
                            name,
                            {
                                part: elsewhere.pop(part) if part in elsewhere else file.get_tensor(part)
                                for part in here[name]
                            },
                        )

    def _copied(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return copies of tensors, by name, so that the files they are read from can be closed."""
        found: dict[str, Tensor] = {}
        for path in sorted({self.names[name] for name in names}):
            with _opened(path) as file:
                found |= {name: file.get_tensor(name).clone() for name in names if self.names[name] == path}
        return found

    def _read_header(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self.names:
                    raise ValueError(f"tensor {name} is in {path} and in {self.names[name]}; remove one of them")
                header = file.get_slice(name)
                self.names[name], self.types[name] = path, header.get_dtype()
                self.shapes[name] = tuple(header.get_shape())


def _index(directory: Path) -> dict[str, str]:
    """Return the index of a directory's tensors as tensor name → file name; empty if the directory has no index."""
    path = directory / _INDEX
    if not path.exists():
        return {}
    try:
        files = read_json_object(path).get("weight_map")
    except ValueError as error:
        raise ValueError(f"{path} is not an index of safetensors shards: {error}") from error
    if not isinstance(files, dict):
        raise ValueError(f"{path} is not an index of safetensors shards: weight_map is {files!r:.100}, not an object")
    for name, file in files.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(
                f"{path} is not an index of safetensors shards: {name} is in {file!r}, which is not a file name"
            )
    return files


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"{path} is missing; fetch all files of the checkpoint")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); fetch it again") from error


_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # integers and floats with fewer bits are codes that need scales
_NAMED_TYPES = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "F8_E8M0": "FP8 scales", "F4": "FP4", "U8": "packed NVFP4"}
_FACTOR_TYPES = ("F32", "BF16", "F16")

_OF_PAIRS = ("_packed", "_blocks")
_SCALES = ("_scale_inv", "_scale", "_scales", "_weight_scale")
_GLOBAL_SCALES = {"_scale_2": False, "_global_scale": True, "_weight_scale_2": False}
"""Suffix of a global scale's name → True if the tensor stores the inverse of the scale."""
_OTHER_SCALES = re.compile(r"[._](input|output|activation|q|k|v|kv|prob)(_global)?_scale(_inv|_2)?$")


class CheckpointTensors:
    """Tensors in a Hugging Face model directory; quantized weights are dequantized when they are read.

    Attributes:
        names: Tensor name → file that contains the tensor or, for a quantized weight, its codes.
        shapes: Tensor name → its shape.
        quantized: Name of each quantized weight → its format and the names of its parts.
        other_scales: Names of scales of the KV cache, and of unused scales of activations.

    Raises:
        ValueError: For the same reasons as `SafetensorsFiles`, or if a weight is stored twice.
    """

    def __init__(self, directory: Path, quantization: QuantizationConfig | None) -> None:
        self._files = SafetensorsFiles(directory)
        self.quantized: dict[str, QuantizedWeight] = {}
        self._stored: dict[str, tuple[str, ...]] = {}
        self.names: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        self.other_scales: list[str] = []
        self._errors: dict[str, ValueError] = {}
        scales = set() if quantization is None else {name for name in self._files.names if self._is_scale(name)}
        for name in self._files.names:
            if quantization is not None and name not in scales and _OTHER_SCALES.search(name):
                self.other_scales.append(name)
            elif name not in scales:
                self._add(*self._stored_as(name, quantization))
        used = {weight.activation_scale for weight in self.quantized.values()}
        self.other_scales = [name for name in self.other_scales if name not in used]

    def check(self, left_out: Container[str]) -> None:
        """Check the types, shapes and scales of all tensors that are not in `left_out`.

        Raises:
            ValueError: If the type of a tensor is not supported, or a scale is missing, unexpected, or has a type or
                shape that does not fit its format. The message names file and tensor.
        """
        for name, error in self._errors.items():
            if name not in left_out:
                raise error

    def tensors(
        self,
        wanted: Container[str],
        like: Callable[[str], Tensor],
        coded_on: Callable[[str], torch.device | None] = lambda _: None,
    ) -> Iterator[tuple[str, Tensor | CodedTensor]]:
        """Yield each name in `wanted` with its tensor, and keep no reference to it. Unquantized tensors are on the CPU.

        Args:
            like: Maps a name to a tensor whose dtype and device are used for the dequantized weight.
            coded_on: Maps a name to the device of the codes if the weight stays quantized, else to None.
        """
        by_first = {stored[0]: name for name, stored in self._stored.items() if name in wanted}
        for first, parts in self._files.tensors({first: self._stored[name] for first, name in by_first.items()}):
            name = by_first[first]
            weight, device = self.quantized.get(name), coded_on(name)
            if weight is None:
                yield name, parts.pop(first)
            else:
                yield name, weight.values(parts, like(name)) if device is None else weight.coded(parts, device)
            del parts  # otherwise these tensors stay in memory while the next are read

    def as_stored(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return these tensors by name, on the CPU and as they are stored."""
        return {name: found[name] for name, found in self._files.tensors({name: (name,) for name in names})}

    def quantized_summary(self, used: Collection[str]) -> str:
        """Return text with the number, formats and bytes of the quantized weights in `used`; "" if there are none."""
        weights = [self.quantized[name] for name in used if name in self.quantized]
        counts = Counter(weight.format.name for weight in weights)
        num_bytes = sum(self._bytes_of(part) for weight in weights for part in weight.parts)
        each = ", ".join(f"{count:,} of {name}" for name, count in sorted(counts.items()))
        return f"{len(weights):,} quantized tensors ({each}; {num_bytes:,} bytes in the files)" if weights else ""

    def _stored_as(self, name: str, quantization: QuantizationConfig | None) -> tuple[str, tuple[str, ...], Shape]:
        """Return a weight's name, its stored tensors' names, and its shape; keep any error for `check` to raise."""
        try:
            if quantization is None:
                self._check_plain(name, "config.json has no quantization_config that says how it is scaled")
            elif self._files.types[name] in _PLAIN_TYPES or not quantization.formats:
                self._check_plain(name, f"{quantization.source} describes {quantization}")
                self._check_no_scale(name)
            else:
                return self._quantized_as(name, quantization)
        except ValueError as error:
            self._errors[name] = error
        return name, (name,), self._files.shapes[name]

    def _check_plain(self, name: str, reason: str) -> None:
        path, found = self._files.names[name], self._files.types[name]
        if found not in _PLAIN_TYPES:
            kind = f" ({_NAMED_TYPES[found]})" if found in _NAMED_TYPES else ""
            raise ValueError(f"{path}: tensor {name} is of type {found}{kind}, which is not supported: {reason}")

    def _quantized_as(self, codes: str, quantization: QuantizationConfig) -> tuple[str, tuple[str, ...], Shape]:
        found = self._files.types[codes]
        formats = [format for format in quantization.formats if format.code_type == found]
        if not formats:
            described = f"{quantization.source} describes {quantization}"
            raise self._error(codes, f"is of type {found}, which is not supported: {described}")
        name = codes.removesuffix(next(filter(codes.endswith, _OF_PAIRS), "")) if found == "U8" else codes
        weight = self.quantized[name] = self._weight(name, codes, formats)
        return name, weight.parts, weight.shape

    def _add(self, name: str, stored: tuple[str, ...], shape: Shape) -> None:
        if name in self._stored:
            raise self._error(stored[0], f"is the same weight as {self._stored[name][0]}; remove one of them")
        self.names[name], self.shapes[name], self._stored[name] = self._files.names[stored[0]], shape, stored

    def _weight(self, name: str, codes: str, formats: list[WeightFormat]) -> QuantizedWeight:
        """Return a quantized weight, in the first of `formats` that agrees with the type and shape of its scale."""
        scale = self._only(codes, [f"{name}{ending}" for ending in _SCALES], f"its scale ({formats[0].name})")
        shape = self._shape_of(codes, formats[0])
        typed = [format for format in formats if self._files.types[scale] in format.scale_types]
        if not typed:
            needed = " or ".join(sorted({each for format in formats for each in format.scale_types}))
            raise self._error(scale, f"is of type {self._files.types[scale]}, but {codes} needs {needed}")
        found = self._files.shapes[scale]
        fitting = [format for format in typed if found in format.scale_shapes(shape)]
        if not fitting:
            needed = " or ".join(f"{format.scale_shapes(shape)[0]} ({format.name})" for format in typed)
            raise self._error(scale, f"has shape {found}, but {codes} of {shape} weights needs {needed}")
        format = fitting[0]
        others = {f"{name}{ending}": divides for ending, divides in _GLOBAL_SCALES.items()}
        if not format.has_global:
            for other in filter(self._files.names.__contains__, others):
                raise self._error(other, f"is not used by {format.name}, the format of {codes}; remove it")
            return QuantizedWeight(format, shape, codes, scale).with_activation_scale(name, self._files.shapes)
        factor = self._only(codes, list(others), f"its global scale ({format.name})")
        self._check_factor(factor, codes, shape[:-2])
        return QuantizedWeight(format, shape, codes, scale, factor, others[factor])

    def _shape_of(self, codes: str, format: WeightFormat) -> Shape:
        stored = self._files.shapes[codes]
        if codes.endswith("_blocks") and len(stored) > 2:  # [..., rows, blocks, bytes per block]
            stored = (*stored[:-2], stored[-2] * stored[-1])
        if len(stored) < 2 or 0 in stored:
            raise self._error(codes, f"has shape {stored}, but a quantized tensor must have at least 2 dimensions")
        return format.shape_of(stored)

    def _check_factor(self, factor: str, codes: str, leading: Shape) -> None:
        shape, found = self._files.shapes[factor], self._files.types[factor]
        if found not in _FACTOR_TYPES:
            raise self._error(factor, f"is of type {found}, but {codes} needs {' or '.join(_FACTOR_TYPES)}")
        if math.prod(shape) != 1 and shape not in (leading, (*leading, 1), (*leading, 1, 1)):
            raise self._error(factor, f"has shape {shape}, but {codes} needs a single value or {leading}")

    def _check_no_scale(self, name: str) -> None:
        for ending in (*_SCALES, *_GLOBAL_SCALES):
            if f"{name}{ending}" in self._files.names:
                raise self._error(name, f"is of type {self._files.types[name]}, but has the scale {name}{ending}")

    def _only(self, codes: str, choices: list[str], what: str) -> str:
        """Return the only name in `choices` that the files contain; raise `ValueError` unless there is exactly one."""
        found = [name for name in choices if name in self._files.names]
        if not found:
            raise self._error(
                codes, f"lacks {what}, such as {choices[0]} or {choices[1]}; fetch all files of the checkpoint"
            )
        if len(found) > 1:
            raise self._error(codes, f"has both {found[0]} and {found[1]}; remove one of them")
        return found[0]

    def _is_scale(self, name: str) -> bool:
        """Return True if a tensor is a scale for another tensor in the files."""
        weights = [name.removesuffix(ending) for ending in (*_SCALES, *_GLOBAL_SCALES) if name.endswith(ending)]
        return any(f"{weight}{ending}" in self._files.names for weight in weights for ending in ("", *_OF_PAIRS))

    def _bytes_of(self, name: str) -> int:
        return math.prod(self._files.shapes[name]) * {"F32": 4, "BF16": 2, "F16": 2}.get(self._files.types[name], 1)

    def _error(self, name: str, text: str) -> ValueError:
        return ValueError(f"{self._files.names[name]}: tensor {name} {text}")
