"""Write checkpoints in quantized formats and their dequantized values, with numpy and integers only.

Nothing here comes from the package or from torch's types of 8 bits: tables follow from the formats' definitions, bits
are rounded as integers, and files are written byte by byte.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.models.checkpoint_edits import INDEX, edit_json, tensors_of

Floats = npt.NDArray[np.float32]

_TYPES = {"F32": np.uint32, "I32": np.uint32, "BF16": np.uint16, "F16": np.uint16}
_TYPES |= dict.fromkeys(["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8"], np.uint8)
_NEVER = re.compile(r"conv1d|embed|lm_head|gate\.weight|router|norm|\.layer\.weight")
"""Names of matrices that no published file quantizes."""


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


E4M3: Floats = np.array([_e4m3(byte) for byte in range(256)], np.float32)
"""Values of all codes but 127 and 255, which are NaN."""
E2M1: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: its type, and the bits of its values."""

    type: str
    bits: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight as a format stores it, by the suffix of each tensor's name, and its dequantized float32 values."""

    parts: Mapping[str, Stored]
    values: Floats


Encoder = Callable[[Floats, np.random.Generator], Encoded]


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to store a checkpoint.

    Args:
        config: `quantization_config` of config.json.
        encoders: Pattern of weight names → encoder of these weights; the first pattern that matches applies.
        columns: The number of columns of a quantized weight must be a multiple of this.
        file: Content of `hf_quant_config.json`.
        extra: Endings of tensors that activations and the KV cache have, next to those of a weight.
        stem: What precedes the ending of a scale's name where the weight's own name does not end in "weight".
    """

    config: Mapping[str, Any] | None
    encoders: Mapping[str, Encoder]
    columns: int = 1
    file: Mapping[str, Any] | None = None
    extra: tuple[str, ...] = field(default=())
    stem: str = ""


def quantize(directory: Path, kind: Kind, keep: str = "$^", num_shards: int = 3, seed: int = 0) -> dict[str, Floats]:
    """Store a checkpoint in another format, and return the dequantized float32 values of all its tensors.

    Args:
        keep: Pattern of names of weights that stay in bf16.
        num_shards: Number of files; the tensors of one weight are in different files.
    """
    rng = np.random.default_rng(seed)
    stored: dict[str, Stored] = {}
    means: dict[str, Floats] = {}
    for name, tensor in sorted(tensors_of(directory).items()):
        values = tensor.float().numpy()
        encoder = None if re.search(keep, name) else _encoder_of(kind, name, values)
        if encoder is None:
            stored[name] = stored_as("BF16", values)
            means[name] = floats_of(stored[name])
            continue
        encoded = encoder(values, rng)
        means[name] = encoded.values
        stem = "" if name.endswith(".weight") else kind.stem
        stored |= {f"{name}{stem if 'scale' in ending else ''}{ending}": each for ending, each in encoded.parts.items()}
        stored |= {f"{name.removesuffix('.weight')}{each}": stored_as("F32", np.float32(0.5)) for each in kind.extra}
    write_files(directory, stored, num_shards)
    edit_json(directory / "config.json", lambda fields: fields.update(quantization_config=kind.config))
    if kind.file is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(kind.file))
    return means


def write_plain(directory: Path, means: Mapping[str, Floats], stored_type: str) -> None:
    """Store these values as an unquantized checkpoint, rounded to a dtype."""
    write_files(directory, {name: stored_as(stored_type, values) for name, values in means.items()}, num_shards=1)
    edit_json(directory / "config.json", lambda fields: fields.update(quantization_config=None))
    (directory / "hf_quant_config.json").unlink(missing_ok=True)


def write_files(directory: Path, tensors: Mapping[str, Stored], num_shards: int) -> None:
    """Write tensors into safetensors files, instead of all in a directory; neighbours are in different files."""
    for file in (*directory.glob("*.safetensors"), *directory.glob(INDEX)):
        file.unlink()
    names = sorted(tensors)
    if num_shards == 1:
        write_file(directory / "model.safetensors", tensors)
        return
    files = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        write_file(directory / file_name, part)
        files |= dict.fromkeys(part, file_name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write one safetensors file."""
    header, data = {}, bytearray()
    for name, tensor in tensors.items():
        content = np.ascontiguousarray(tensor.bits, _TYPES[tensor.type]).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": tensor.type, "shape": list(tensor.bits.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_stored(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file that `write_file` wrote."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, header in json.loads(content[8:start]).items():
        first, last = header["data_offsets"]
        bits = np.frombuffer(content[start + first : start + last], _TYPES[header["dtype"]])
        found[name] = Stored(header["dtype"], bits.reshape(header["shape"]))
    return found


def stored_as(type_: str, values: npt.ArrayLike) -> Stored:
    """Round float32 values to nearest even in a type for scales or unquantized weights."""
    floats = np.asarray(values, np.float32)
    if type_ == "F32":
        return Stored(type_, floats.view(np.uint32))
    if type_ == "F16":
        return Stored(type_, floats.astype(np.float16).view(np.uint16))
    if type_ == "BF16":
        bits = floats.view(np.uint32).astype(np.uint64)
        return Stored(type_, (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16))
    if type_ == "F8_E4M3":
        return Stored(type_, _nearest(floats, E4M3[:127]) | (np.signbit(floats).astype(np.uint8) << 7))
    exponents = np.ceil(np.log2(np.maximum(floats, np.float32(2.0**-100))))  # of "U8" and "F8_E8M0"
    return Stored(type_, (exponents + 127).astype(np.uint8))


def floats_of(stored: Stored) -> Floats:
    """Return scales or unquantized weights as float32 values."""
    if stored.type == "F32":
        return stored.bits.view(np.float32)
    if stored.type == "F16":
        return stored.bits.view(np.float16).astype(np.float32)
    if stored.type == "BF16":
        return (stored.bits.astype(np.uint32) << 16).view(np.float32)
    if stored.type == "F8_E4M3":
        return E4M3[stored.bits]
    return np.ldexp(np.float32(1), stored.bits.astype(np.int32) - 127)


def fp8(
    rows: int | None, columns: int | None, scale_type: str = "F32", ending: str = "_scale", shape: str = "grid"
) -> Encoder:
    """Return the encoder of e4m3 codes with a scale per block; None: all rows, or all columns.

    Args:
        shape: "grid", "four" with a one after each number of blocks, or "flat" without the last dimensions of one.
    """

    def encode(values: Floats, rng: np.random.Generator) -> Encoded:
        largest = _of_blocks(values, rows, columns)
        jitter = rng.uniform(1, 1.3, largest.shape).astype(np.float32)
        scale = stored_as(scale_type, np.maximum(largest, 1e-3) / np.float32(448) * jitter)
        each = _spread(floats_of(scale), values.shape, rows, columns)
        codes = stored_as("F8_E4M3", np.clip(values / each, -448, 448))
        shapes = {
            "grid": largest.shape,
            "four": (*largest.shape[:-1], 1, largest.shape[-1], 1),
            "flat": largest.shape[: -1 if rows == 1 else -2],
        }
        parts = {"": codes, ending: Stored(scale.type, scale.bits.reshape(shapes[shape]))}
        return Encoded(parts, E4M3[codes.bits] * each)

    return encode


def fp4(group: int, *, modelopt: bool = False, blocks: bool = False) -> Encoder:
    """Return the encoder of pairs of e2m1 codes: NVFP4 for groups of 16, MXFP4 for groups of 32.

    Args:
        modelopt: Names and global scale as modelopt has them, else as compressed-tensors has them.
        blocks: MXFP4 as `_blocks` and `_scales`.
    """

    def encode(values: Floats, rng: np.random.Generator) -> Encoded:
        largest, overall = _of_blocks(values, 1, group), np.float32(1)
        stored_factor = {}
        if group == 16:
            of_matrices = np.abs(values).max((-2, -1)) / np.float32(6 * 448)
            overall = (of_matrices * rng.uniform(1, 1.3, of_matrices.shape)).astype(np.float32)[..., None, None]
            inverse = np.float32(1) / overall
            leading = values.shape[:-2]
            shapes = {"_scale_2": leading, "_global_scale": (*leading, 1)}
            ending = "_scale_2" if modelopt else "_global_scale"
            stored_factor = {ending: (overall if modelopt else inverse).reshape(shapes[ending])}
        scale = stored_as("F8_E4M3" if group == 16 else "U8", np.maximum(largest / 6 / overall, np.float32(2**-6)))
        each = _spread(floats_of(scale), values.shape, 1, group)
        scaled = np.clip(values / each / overall, -6, 6)
        codes = _nearest(scaled, E2M1[:8]) | (np.signbit(scaled).astype(np.uint8) << 3)
        if group == 16:
            exact = E2M1[codes] * each
            means = exact * overall if modelopt else exact / inverse
        else:
            means = E2M1[codes] * each
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        if blocks:
            pairs = pairs.reshape(*pairs.shape[:-1], -1, group // 2)
        name = "_blocks" if blocks else "" if modelopt else "_packed"
        parts = {name: Stored("U8", pairs), "_scales" if blocks else "_scale": scale}
        parts |= {ending: stored_as("F32", factor) for ending, factor in stored_factor.items()}
        return Encoded(parts, means)

    return encode


def _encoder_of(kind: Kind, name: str, values: Floats) -> Encoder | None:
    if values.ndim < 2 or _NEVER.search(name) or values.shape[-1] % kind.columns:
        return None
    return next((encoder for pattern, encoder in kind.encoders.items() if re.search(pattern, name)), None)


def _nearest(values: Floats, table: Floats) -> npt.NDArray[np.uint8]:
    """Return the index of the nearest entry of an ascending table for each magnitude."""
    halfway = (table[1:] + table[:-1]) / np.float32(2)
    return np.searchsorted(halfway, np.abs(values)).astype(np.uint8)


def _of_blocks(values: Floats, rows: int | None, columns: int | None) -> Floats:
    """Return the largest magnitude of each block."""
    height, width = rows or values.shape[-2], columns or values.shape[-1]
    of_rows = np.maximum.reduceat(np.abs(values), np.arange(0, values.shape[-2], height), axis=-2)
    return np.maximum.reduceat(of_rows, np.arange(0, values.shape[-1], width), axis=-1)


def _spread(scale: Floats, shape: tuple[int, ...], rows: int | None, columns: int | None) -> Floats:
    """Return each weight's scale."""
    row = np.arange(shape[-2]) // (rows or shape[-2])
    column = np.arange(shape[-1]) // (columns or shape[-1])
    return scale[..., row[:, None], column[None, :]]
